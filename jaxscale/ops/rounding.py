"""Rounding to bfloat16 that is right on average."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxscale.ops.random_bits import places


def round_stochastically(x: Array, step: Array) -> Array:
    """Rounds to one of the two neighbours in bfloat16, the nearer one more probably.

    What is added to a narrow number step by step is lost by rounding to the nearest where it is
    less than half of the number's last bit; here it is kept on average (Gupta et al., arXiv
    1502.02551). The random bits are a hash of the place in the array and the step: they cost no
    memory traffic, and do not depend on how the array is sharded.

    Args:
      x: any floating type; wider ones are rounded to float32 first. What is not finite stays so.
      step: integer scalar; another one has other random bits.
    """
    wide = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(wide, jnp.uint32)
    seed = _mixed(step.astype(jnp.uint32) + jnp.uint32(1))
    noise = _mixed(seed + places(x.shape)) >> 16
    # In the magnitude, so that a carry goes to the next number away from zero.
    rounded = (bits + noise) & jnp.uint32(0xFFFF0000)
    rounded = jnp.where(jnp.isfinite(wide), rounded, bits)
    return jax.lax.bitcast_convert_type(rounded, jnp.float32).astype(jnp.bfloat16)


def _mixed(x: Array) -> Array:
    """A hash of 32 bits in which each bit of the result depends on every bit of x: the last steps
    of MurmurHash3 (Appleby)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
