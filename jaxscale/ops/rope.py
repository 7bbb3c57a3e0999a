"""Rotary positions.

Shapes: B batch, T time, N heads, H head_dim, h pairs (H / 2).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxscale.ops.sizes import LANES

# Llama 3's frequency scaling: frequencies with fewer than LOW_TURNS turns in the context that the
# model was first trained on are lowered, those with more than HIGH_TURNS turns are unchanged.
ORIGINAL_CONTEXT = 8192
LOW_TURNS = 1.0
HIGH_TURNS = 4.0


def rotary(
    x_BTNH: Array, positions_BT: Array, *, theta: float, scaling: float = 1.0, factor: float = 1.0
) -> Array:
    """Rotates pairs of features by an angle proportional to the position (arXiv 2104.09864).

    Feature i of the first half is paired with feature i of the second half, as in the Llama
    checkpoints of Hugging Face. Computed in float32, or in the input's type where that is wider.

    Args:
      theta: base of the geometric series of wavelengths.
      scaling: factor of Llama 3's frequency scaling (8 for Llama 3.1, 32 for 3.2); 1 is none.
      factor: of the result, before it is rounded to the input's type.
    """
    frequencies_h = _frequencies(x_BTNH.shape[-1], theta, scaling)

    # The backward pass recomputes the angles, so that they are not saved for every layer.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def turn(x_BTNH: Array, positions_BT: Array) -> Array:
        dtype = jnp.promote_types(x_BTNH.dtype, jnp.float32)
        angles_BT1h = positions_BT.astype(dtype)[..., None, None] * frequencies_h.astype(dtype)
        cos_BT1h, sin_BT1h = factor * jnp.cos(angles_BT1h), factor * jnp.sin(angles_BT1h)
        cos_BT1H = jnp.concatenate((cos_BT1h, cos_BT1h), axis=-1)
        sin_BT1H = jnp.concatenate((-sin_BT1h, sin_BT1h), axis=-1)
        # On whole heads, with the halves exchanged: a TPU would write separate halves to memory.
        first_BTNh, second_BTNh = jnp.split(x_BTNH, 2, axis=-1)
        partner_BTNH = jnp.concatenate((second_BTNh, first_BTNh), axis=-1).astype(dtype)
        turned_BTNH = x_BTNH.astype(dtype) * cos_BT1H + partner_BTNH * sin_BT1H
        return turned_BTNH.astype(x_BTNH.dtype)

    return turn(x_BTNH, positions_BT)


_BLOCK_BYTES = 2 * 2**20
"""Of the values that the kernel holds at a time, in float32: a fraction of VMEM."""


def rotary_on_tpu(
    x_BTNH: Array,
    positions_BT: Array,
    *,
    theta: float,
    scaling: float = 1.0,
    factor: float = 1.0,
    interpret: bool = False,
) -> Array:
    """`rotary` as a Pallas kernel, for heads of `LANES` features and T a multiple of it.

    It reads and writes each value once, forward and backward, where XLA for TPUs writes the halves
    of all heads to memory first, which is 4 % of its estimated time for a layer of Llama 2 7B. Like
    every Pallas kernel it needs all mesh axes manual.
    """
    frequencies_h = _frequencies(LANES, theta, scaling).astype(np.float32)

    def tables(positions_BT: Array) -> tuple[Array, Array]:
        angles_BTh = positions_BT.astype(jnp.float32)[..., None] * frequencies_h
        cos_BTh, sin_BTh = factor * jnp.cos(angles_BTh), factor * jnp.sin(angles_BTh)
        cos_BTH = jnp.concatenate((cos_BTh, cos_BTh), axis=-1)
        return cos_BTH, jnp.concatenate((-sin_BTh, sin_BTh), axis=-1)

    @jax.custom_vjp
    def turn(x_BNTH: Array, positions_BT: Array) -> Array:
        return _turn(x_BNTH, *tables(positions_BT), interpret)

    def forward(x_BNTH: Array, positions_BT: Array) -> tuple[Array, Array]:
        return turn(x_BNTH, positions_BT), positions_BT

    def backward(positions_BT: Array, dy_BNTH: Array) -> tuple[Array, None]:
        cos_BTH, sin_BTH = tables(positions_BT)
        return _turn(dy_BNTH, cos_BTH, -sin_BTH, interpret), None

    turn.defvjp(forward, backward)
    # Heads before time, as the attention kernel needs them: the matmuls write them in this layout.
    return jnp.swapaxes(turn(jnp.swapaxes(x_BTNH, 1, 2), positions_BT), 1, 2)


def _turn(x_BNTH: Array, cos_BTH: Array, sin_BTH: Array, interpret: bool) -> Array:
    """x * cos + (x with its halves exchanged) * sin."""
    # Half a second to import, and only a TPU needs it.
    from jax.experimental import pallas as pl  # noqa: PLC0415
    from jax.experimental.pallas import tpu as pltpu  # noqa: PLC0415

    batch, num_heads, time, head_dim = x_BNTH.shape
    rows = next(size for size in (512, 384, 256, LANES) if time % size == 0)
    most = max(_BLOCK_BYTES // (4 * rows * head_dim), 1)
    heads = next(size for size in range(min(most, num_heads), 0, -1) if num_heads % size == 0)

    def kernel(x_ref, cos_ref, sin_ref, out_ref):
        x_NTH = x_ref[0].astype(jnp.float32)
        partner_NTH = pltpu.roll(x_NTH, head_dim // 2, axis=2)
        out_ref[0] = (x_NTH * cos_ref[...] + partner_NTH * sin_ref[...]).astype(out_ref.dtype)

    values = pl.BlockSpec((1, heads, rows, head_dim), lambda b, t, n: (b, n, t, 0))
    table = pl.BlockSpec((1, rows, head_dim), lambda b, t, n: (b, t, 0))
    return pl.pallas_call(
        kernel,
        grid=(batch, time // rows, num_heads // heads),
        in_specs=[values, table, table],
        out_specs=values,
        out_shape=jax.ShapeDtypeStruct(x_BNTH.shape, x_BNTH.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=interpret,
        name="rotary",
    )(x_BNTH, cos_BTH, sin_BTH)


def _frequencies(head_dim: int, theta: float, scaling: float) -> np.ndarray:
    """Radians per position for each pair of features, in float64."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = ORIGINAL_CONTEXT * frequencies / (2 * math.pi)
    keep = np.clip((turns - LOW_TURNS) / (HIGH_TURNS - LOW_TURNS), 0, 1)
    return frequencies * (keep + (1 - keep) / scaling)
