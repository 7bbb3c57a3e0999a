"""RMSNorm and LayerNorm over the last dimensions.

Shapes: B batch, T time, D features; any leading dimensions are allowed.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

# The backward pass recomputes the statistics from the input: JAX would otherwise save three float32
# arrays of the input's size for each norm.
_recompute = functools.partial(jax.checkpoint, prevent_cse=False)


def rms_norm(
    x_BTD: Array, scale_D: Array, *, eps: float = 1e-5, offset: float = 0.0, num_dims: int = 1
) -> Array:
    """RMSNorm: divides by the root mean square and scales (arXiv 1910.07467).

    Statistics are in float32 or wider; the result has the type of `x_BTD`. Only the arguments are
    saved for the backward pass.

    Args:
      offset: added to the scale.
      num_dims: number of last dimensions normalised together; those of `scale_D`.
    """

    @_recompute
    def norm(x_BTD: Array, scale_D: Array) -> Array:
        wide_BTD = x_BTD.astype(_statistics_dtype(x_BTD))
        scale = scale_D.astype(wide_BTD.dtype) + offset if offset else scale_D
        return (_unit(wide_BTD, eps, num_dims) * scale).astype(x_BTD.dtype)

    return norm(x_BTD, scale_D)


def layer_norm(x_BTD: Array, scale_D: Array, bias_D: Array, *, eps: float = 1e-5) -> Array:
    """LayerNorm: subtracts the mean, divides by the standard deviation, scales and shifts (arXiv
    1607.06450).

    Types as in `rms_norm`.
    """

    @_recompute
    def norm(x_BTD: Array, scale_D: Array, bias_D: Array) -> Array:
        wide_BTD = x_BTD.astype(_statistics_dtype(x_BTD))
        centred_BTD = wide_BTD - jnp.mean(wide_BTD, axis=-1, keepdims=True)
        return (_unit(centred_BTD, eps) * scale_D + bias_D).astype(x_BTD.dtype)

    return norm(x_BTD, scale_D, bias_D)


def _unit(x_BTD: Array, eps: float, num_dims: int = 1) -> Array:
    axes = tuple(range(-num_dims, 0))
    return x_BTD * jax.lax.rsqrt(jnp.mean(jnp.square(x_BTD), axis=axes, keepdims=True) + eps)


def _statistics_dtype(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)
