"""Random bits as elementwise arithmetic, which XLA fuses with their consumers."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


@functools.partial(jax.jit, static_argnums=(1, 2))  # so that arrays of one shape share a trace
def random_bits(key: Array, count: int, shape: tuple[int, ...]) -> list[Array]:
    """uint32 [count, *shape], the same bits as `jax.random.bits`, in every layout.

    On CPUs JAX emits the generator's rounds as loops that read and write whole arrays in each
    iteration. Unrolled and fused with its consumers, the initialisation of 25 million parameters
    takes 0.09 s instead of 0.8 s on two cores. Other back ends get the same rounds as from JAX.

    Args:
      key: of `jax.random.key`. Generators other than JAX's default, and more than 2^32 elements,
        are left to JAX.
      count: the number of arrays, returned as a list so that none needs to be in memory.
    """
    size = math.prod(shape)
    if jax.random.key_impl(key) != "threefry2x32" or count * size > 2**32:
        return list(jax.random.bits(key, (count, *shape), jnp.uint32))
    words = jax.random.key_data(key)
    counters = [places(shape) + jnp.uint32(i * size) for i in range(count)]
    return [_threefry(words[0], words[1], jnp.uint32(0), counter) for counter in counters]


def _threefry(key0: Array, key1: Array, left: Array, right: Array) -> Array:
    """Threefry-2x32 with 20 rounds (Salmon et al., SC 2011, sections 3.3 and 4.2): the exclusive or
    of its two output words for a key and a counter of two words each."""
    keys = key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA)
    left, right = left + keys[0], right + keys[1]
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            left = left + right
            right = left ^ (right << distance | right >> (32 - distance))
        left = left + keys[(group + 1) % 3]
        right = right + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return left ^ right


def places(shape: tuple[int, ...]) -> Array:
    """The row-major index of each element modulo 2^32, uint32."""
    places = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        places = places * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(
            jnp.uint32, shape, dim
        )
    return places
