"""Rounding that is right on average."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops.rounding import round_stochastically


@pytest.mark.proof
def test_each_number_becomes_a_neighbour_and_on_average_itself():
    """The mean of n roundings has a standard deviation of at most half the distance of the two
    neighbours over the root of n."""
    count = 4096
    random = np.random.default_rng(0)
    x = random.choice([-1, 1], 512) * np.exp(random.uniform(-60, 60, 512))
    x = jnp.asarray(x, jnp.float32)
    rounded = np.asarray(jax.vmap(lambda n: round_stochastically(x, n))(jnp.arange(count)))
    bits = np.asarray(x).view(np.uint32) & 0xFFFF0000
    below = bits.view(np.float32).astype(np.float64)
    above = (bits + 0x10000).view(np.float32).astype(np.float64)
    found = rounded.astype(np.float64)
    assert ((found == below) | (found == above)).all()
    error = np.abs(found.mean(axis=0) - np.asarray(x, np.float64))
    assert (error < 5 * np.abs(above - below) / 2 / np.sqrt(count)).all()
    # Of numbers in one step some are rounded up and others down, as their bits say.
    up = (found[0] == above).mean()
    assert 0.4 < up < 0.6


@pytest.mark.proof
def test_what_bfloat16_has_stays_as_it_is():
    x = jnp.array([0.0, -0.0, 1.0, -2.5, 1e-40, jnp.inf, -jnp.inf, jnp.nan], jnp.bfloat16)
    for step in range(64):
        same = round_stochastically(x.astype(jnp.float32), jnp.int32(step))
        np.testing.assert_array_equal(same.view(jnp.uint16), x.view(jnp.uint16))


@pytest.mark.proof
def test_wider_numbers_and_the_largest():
    x = jnp.array([jnp.finfo(jnp.bfloat16).max, 1.0], jnp.float32)
    assert round_stochastically(x, jnp.int32(3)).tolist() == x.tolist()
    assert round_stochastically(jnp.array(1 / 3, jnp.float64), jnp.int32(0)).dtype == jnp.bfloat16
