"""Rotary position embedding (RoPE), with context extension (YaRN, LongRoPE, NTK) and a TPU kernel.

Shapes: B batch, T time, N heads, H head_dim, h pairs (H / 2).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxscale.ops.sizes import LANES


class RopeScaling(NamedTuple):
    """Scaling of RoPE frequencies for a context `factor` times the original one.

    "linear" divides all frequencies (arXiv 2306.15595). "llama3" and "yarn" (arXiv 2309.00071)
    divide frequencies with fewer than `low_turns` rotations in the original context, keep those
    with more than `high_turns`, and interpolate in between: "llama3" in the number of rotations,
    "yarn" in the feature's index. "longrope" (arXiv 2402.13753) divides each frequency by one of
    `short_factors`, or of `long_factors` for texts beyond the original context. "dynamic"
    (NTK-aware scaling, as in transformers) raises theta with the length of such texts. "yarn" and
    "longrope" also scale queries and keys by `attention_factor`; 0 is 1 + ln(factor) / 10 and
    sqrt(1 + ln(factor) / ln(original_context)).
    """

    kind: str
    factor: float
    original_context: int = 8192
    low_turns: float = 1.0
    high_turns: float = 4.0
    attention_factor: float = 0.0
    truncate: bool = True  # rounds the bounds of "yarn" to whole features
    short_factors: tuple[float, ...] = ()  # of "longrope", one for each pair of features
    long_factors: tuple[float, ...] = ()
    length: int = 0  # of the text, for "longrope" and "dynamic"

    @property
    def multiplier(self) -> float:
        """The factor of queries and keys."""
        if self.kind == "yarn":
            return self.attention_factor or 1 + 0.1 * math.log(self.factor)
        if self.kind == "longrope":
            usual = math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))
            return self.attention_factor or usual
        return 1.0


def rotary(
    x_BTNH: Array,
    positions_BT: Array,
    *,
    theta: float,
    scaling: RopeScaling | None = None,
    rotary_dim: int = 0,
    factor: float = 1.0,
    lengths_B: Array | None = None,
) -> Array:
    """RoPE: rotates pairs of features by an angle proportional to the position (arXiv 2104.09864).

    Feature i of the first half is paired with feature i of the second half, as in Hugging Face's
    Llama checkpoints. Computed in float32 or wider.

    Args:
      theta: base of the geometric series of wavelengths.
      rotary_dim: the number of leading features to rotate; 0 is all.
      factor: of the result, before it is rounded to the input's type.
      lengths_B: of each row's text, in place of `scaling.length`.
    """
    head_dim = x_BTNH.shape[-1]
    rotary_dim = rotary_dim or head_dim
    frequencies = _frequencies(rotary_dim, theta, scaling, lengths_B)
    rotated_factor = factor * (scaling.multiplier if scaling else 1.0)

    # The backward pass recomputes the angles, so that they are not saved for every layer.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def rotate(x_BTNH: Array, positions_BT: Array) -> Array:
        dtype = jnp.promote_types(x_BTNH.dtype, jnp.float32)
        angles_BT1h = positions_BT.astype(dtype)[..., None, None] * frequencies.astype(dtype)
        cos_BT1h = rotated_factor * jnp.cos(angles_BT1h)
        sin_BT1h = rotated_factor * jnp.sin(angles_BT1h)
        cos_BT1H = jnp.concatenate((cos_BT1h, cos_BT1h), axis=-1)
        sin_BT1H = jnp.concatenate((-sin_BT1h, sin_BT1h), axis=-1)
        # Whole heads with exchanged halves: XLA for TPUs would write separate halves to memory.
        first_BTNh, second_BTNh = jnp.split(x_BTNH, 2, axis=-1)
        partner_BTNH = jnp.concatenate((second_BTNh, first_BTNh), axis=-1).astype(dtype)
        rotated_BTNH = x_BTNH.astype(dtype) * cos_BT1H + partner_BTNH * sin_BT1H
        return rotated_BTNH.astype(x_BTNH.dtype)

    if rotary_dim == head_dim:
        return rotate(x_BTNH, positions_BT)
    rest = x_BTNH[..., rotary_dim:]
    if factor != 1:
        rest = (factor * rest.astype(jnp.promote_types(rest.dtype, jnp.float32))).astype(rest.dtype)
    return jnp.concatenate((rotate(x_BTNH[..., :rotary_dim], positions_BT), rest), axis=-1)


_BLOCK_BYTES = 2 * 2**20
"""Bytes of a kernel's block in float32: a fraction of VMEM."""


def rotary_on_tpu(
    x_BTNH: Array,
    positions_BT: Array,
    *,
    theta: float,
    scaling: RopeScaling | None = None,
    rotary_dim: int = LANES,
    factor: float = 1.0,
    interpret: bool = False,
) -> Array:
    """`rotary` as a Pallas kernel, for heads of `LANES` features and T a multiple of `LANES`.

    It reads and writes each value once, forward and backward. XLA for TPUs writes the halves of all
    heads to memory first, 4 % of its estimated time for a layer of Llama 2 7B. Like every Pallas
    kernel it needs all mesh axes manual. Partly rotated heads fall back to `rotary`.
    """
    if rotary_dim != LANES:
        return rotary(
            x_BTNH,
            positions_BT,
            theta=theta,
            scaling=scaling,
            rotary_dim=rotary_dim,
            factor=factor,
        )
    rotated_factor = factor * (scaling.multiplier if scaling else 1.0)
    frequencies_h = _frequencies(LANES, theta, scaling).astype(np.float32)

    def tables(positions_BT: Array) -> tuple[Array, Array]:
        angles_BTh = positions_BT.astype(jnp.float32)[..., None] * frequencies_h
        cos_BTh = rotated_factor * jnp.cos(angles_BTh)
        sin_BTh = rotated_factor * jnp.sin(angles_BTh)
        cos_BTH = jnp.concatenate((cos_BTh, cos_BTh), axis=-1)
        return cos_BTH, jnp.concatenate((-sin_BTh, sin_BTh), axis=-1)

    @jax.custom_vjp
    def rotate(x_BNTH: Array, positions_BT: Array) -> Array:
        return _rotate(x_BNTH, *tables(positions_BT), interpret)

    def forward(x_BNTH: Array, positions_BT: Array) -> tuple[Array, Array]:
        return rotate(x_BNTH, positions_BT), positions_BT

    def backward(positions_BT: Array, dy_BNTH: Array) -> tuple[Array, None]:
        cos_BTH, sin_BTH = tables(positions_BT)
        return _rotate(dy_BNTH, cos_BTH, -sin_BTH, interpret), None

    rotate.defvjp(forward, backward)
    # Heads before time, as the attention kernel needs them: the matmuls write them in this layout.
    return jnp.swapaxes(rotate(jnp.swapaxes(x_BTNH, 1, 2), positions_BT), 1, 2)


def _rotate(x_BNTH: Array, cos_BTH: Array, sin_BTH: Array, interpret: bool) -> Array:
    """x * cos + (x with its halves exchanged) * sin."""
    # Imported here: half a second, and only a TPU needs it.
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


def _frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None, lengths_B: Array | None = None
) -> Any:
    """Radians per position for each pair of features: [h] in float64; with `lengths_B` and a
    scaling by the length of the text, [B, 1, 1, h]."""
    frequencies = theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind in ("longrope", "dynamic"):
        if lengths_B is None:
            return _frequencies_for(np.array(scaling.length), frequencies, scaling)
        lengths_B111 = lengths_B.astype(float)[:, None, None, None]
        return _frequencies_for(lengths_B111, frequencies, scaling)
    if scaling.kind == "llama3":
        rotations = scaling.original_context * frequencies / (2 * math.pi)
        span = scaling.high_turns - scaling.low_turns
        keep = np.clip((rotations - scaling.low_turns) / span, 0, 1)
    else:
        keep = 1 - _yarn_ramp(rotary_dim, theta, scaling)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _frequencies_for(length: Any, frequencies_h: np.ndarray, scaling: RopeScaling) -> Any:
    """Frequencies for texts of a length, an array of NumPy or JAX."""
    xp, beyond = length.__array_namespace__(), length / scaling.original_context
    if scaling.kind == "longrope":
        factors = np.array(scaling.long_factors), np.array(scaling.short_factors)
        return xp.where(beyond > 1, *(frequencies_h / each for each in factors))
    # Theta times growth ** (R / (R - 2)), with R rotated features.
    growth = scaling.factor * xp.maximum(beyond, 1) - (scaling.factor - 1)
    num_pairs = len(frequencies_h)
    return frequencies_h * growth ** (-np.arange(num_pairs) / (num_pairs - 1))


def _yarn_ramp(rotary_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """YaRN's ramp: 0 for pairs that keep their frequency, 1 for scaled pairs."""

    def pair_with(rotations: float) -> float:
        waves = scaling.original_context / (rotations * 2 * math.pi)
        return rotary_dim * math.log(waves) / (2 * math.log(theta))

    first, last = pair_with(scaling.high_turns), pair_with(scaling.low_turns)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    span = last - first or 0.001
    return np.clip((np.arange(rotary_dim // 2) - first) / span, 0, 1)
