"""Normalisation over the last dimension.

Shapes: B batch, T time, D features; any leading dimensions do.
"""

import jax
import jax.numpy as jnp
from jax import Array


def rms_norm(x_BTD: Array, scale_D: Array, *, eps: float = 1e-5) -> Array:
    """Divides by the root mean square and scales (arXiv 1910.07467).

    Statistics are in float32, or in the input's type where that is wider; the result has the
    type of `x_BTD`.
    """
    wide_BTD = x_BTD.astype(_statistics_dtype(x_BTD))
    inverse_BT1 = jax.lax.rsqrt(jnp.mean(jnp.square(wide_BTD), axis=-1, keepdims=True) + eps)
    return (wide_BTD * inverse_BT1 * scale_D).astype(x_BTD.dtype)


def layer_norm(x_BTD: Array, scale_D: Array, bias_D: Array, *, eps: float = 1e-5) -> Array:
    """Subtracts the mean, divides by the standard deviation, scales and shifts (arXiv 1607.06450).

    Types as in `rms_norm`.
    """
    wide_BTD = x_BTD.astype(_statistics_dtype(x_BTD))
    centred_BTD = wide_BTD - jnp.mean(wide_BTD, axis=-1, keepdims=True)
    inverse_BT1 = jax.lax.rsqrt(jnp.mean(jnp.square(centred_BTD), axis=-1, keepdims=True) + eps)
    return (centred_BTD * inverse_BT1 * scale_D + bias_D).astype(x_BTD.dtype)


def _statistics_dtype(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)
