"""Random bits are those of `jax.random.bits`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops.random_bits import random_bits


@pytest.mark.proof(but=("rbg-shape3", "threefry2x32-shape3", "rbg-shape0"))
@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 5), (0, 4), (257, 129)])
@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
def test_bits_are_jaxs(shape, generator):
    key = jax.random.key(2**40 + 7, impl=generator)
    got = random_bits(key, 3, shape)
    assert {words.dtype for words in got} == {jnp.dtype(jnp.uint32)}
    np.testing.assert_array_equal(got, jax.random.bits(key, (3, *shape), jnp.uint32))


@pytest.mark.proof
def test_bits_of_many_keys_are_jaxs():
    keys = jax.random.split(jax.random.key(3), 4)
    got = jax.jit(jax.vmap(lambda key: jnp.stack(random_bits(key, 2, (6, 7)))))(keys)
    np.testing.assert_array_equal(
        got, jax.vmap(lambda key: jax.random.bits(key, (2, 6, 7), jnp.uint32))(keys)
    )


@pytest.mark.parametrize(("size", "ours"), [(2**32, True), (2**32 + 1, False)])
def test_more_places_than_a_word_counts_are_left_to_jax(size, ours):
    program = jax.make_jaxpr(lambda key: random_bits(key, 1, (size,)))(jax.random.key(0))
    assert ("random_bits[" not in str(program)) == ours, "JAX's primitive"
