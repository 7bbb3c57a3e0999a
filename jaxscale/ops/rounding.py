"""Stochastic rounding to bfloat16."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxscale.ops.random_bits import places


def round_stochastically(x: Array, step: Array) -> Array:
    """Stochastic rounding to one of the two neighbours in bfloat16, the nearer more probably.

    Rounding to nearest loses small updates, below half of a number's last bit, in every step;
    stochastic rounding keeps them on average (Gupta et al., arXiv 1502.02551). The random bits are
    a hash of the array index and the step: no memory traffic, independent of the sharding.

    Args:
      x: any floating type; wider ones are rounded to float32 first. Infinities and NaNs are kept.
      step: integer scalar that selects the random bits.
    """
    wide = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(wide, jnp.uint32)
    seed = _mixed(step.astype(jnp.uint32) + jnp.uint32(1))
    noise = _mixed(seed + places(x.shape)) >> 16
    # Added to the magnitude's bits: a carry moves to the next number away from zero.
    rounded = (bits + noise) & jnp.uint32(0xFFFF0000)
    rounded = jnp.where(jnp.isfinite(wide), rounded, bits)
    return jax.lax.bitcast_convert_type(rounded, jnp.float32).astype(jnp.bfloat16)


def _mixed(x: Array) -> Array:
    """A 32-bit hash, the finalizer of MurmurHash3 (Appleby): every result bit depends on every bit
    of x."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
