"""Rotary positions.

Shapes: B batch, T time, N heads, H head_dim, h pairs (H / 2).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

# Llama 3's frequency scaling: wavelengths that turned fewer than LOW times in the context that
# the model was first trained on are stretched, those that turned more than HIGH times are kept.
ORIGINAL_CONTEXT = 8192
LOW_TURNS = 1.0
HIGH_TURNS = 4.0


def rotary(x_BTNH: Array, positions_BT: Array, *, theta: float, scaling: float = 1.0) -> Array:
    """Turns pairs of features by an angle proportional to the position (arXiv 2104.09864).

    Feature i of the first half is paired with feature i of the second half, as in the Llama
    checkpoints of Hugging Face. Computed in float32, or in the input's type where that is wider.

    Args:
      theta: base of the geometric series of wavelengths.
      scaling: factor of Llama 3's frequency scaling (8 for Llama 3.1, 32 for 3.2); 1 is none.
    """
    frequencies_h = _frequencies(x_BTNH.shape[-1], theta, scaling)

    # The backward pass makes the angles again rather than keep them for every layer.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def turn(x_BTNH: Array, positions_BT: Array) -> Array:
        dtype = jnp.promote_types(x_BTNH.dtype, jnp.float32)
        angles_BT1h = positions_BT.astype(dtype)[..., None, None] * frequencies_h.astype(dtype)
        cos_BT1h, sin_BT1h = jnp.cos(angles_BT1h), jnp.sin(angles_BT1h)
        cos_BT1H = jnp.concatenate((cos_BT1h, cos_BT1h), axis=-1)
        sin_BT1H = jnp.concatenate((-sin_BT1h, sin_BT1h), axis=-1)
        # Whole heads, turned with their partners: a TPU would write halves to memory.
        first_BTNh, second_BTNh = jnp.split(x_BTNH, 2, axis=-1)
        partner_BTNH = jnp.concatenate((second_BTNh, first_BTNh), axis=-1).astype(dtype)
        turned_BTNH = x_BTNH.astype(dtype) * cos_BT1H + partner_BTNH * sin_BT1H
        return turned_BTNH.astype(x_BTNH.dtype)

    return turn(x_BTNH, positions_BT)


def _frequencies(head_dim: int, theta: float, scaling: float) -> np.ndarray:
    """Radians per position for each pair of features, in float64."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = ORIGINAL_CONTEXT * frequencies / (2 * math.pi)
    keep = np.clip((turns - LOW_TURNS) / (HIGH_TURNS - LOW_TURNS), 0, 1)
    return frequencies * (keep + (1 - keep) / scaling)
