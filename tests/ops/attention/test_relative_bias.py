"""T5's relative position bias: its buckets, and biases laid out along diagonals."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops.attention import relative_bias
from tests.ops.attention.test_attention import arguments, blockwise, differentiated


def published_bucket(relative, causal, num_buckets, max_distance):
    """The bucket of one distance, `key place - query place`, by the formula of T5's code."""
    offset = 0
    if causal:
        distance = max(-relative, 0)
    else:
        num_buckets //= 2
        offset = num_buckets if relative > 0 else 0
        distance = abs(relative)
    exact = num_buckets // 2
    if distance < exact:
        return offset + distance
    grown = math.log(distance / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    # A whole number, as for powers of two, may come out a rounding error below it.
    return offset + min(exact + int(grown + 1e-9), num_buckets - 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (32, 100), (8, 20), (64, 999)]
)
def test_buckets_are_t5s(causal, num_buckets, max_distance):
    relative = np.arange(-1100, 1101)
    got = relative_bias.relative_buckets(
        jnp.asarray(relative), num_buckets, causal=causal, max_distance=max_distance
    )
    wanted = [published_bucket(int(r), causal, num_buckets, max_distance) for r in relative]
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.proof
@pytest.mark.parametrize(("t", "s"), [(5, 5), (3, 7), (6, 2), (1, 4), (4, 1)])
def test_a_line_is_the_diagonals_of_a_block(t, s):
    line = jnp.arange(2.0 * (t + s)).reshape(2, t + s)
    block = relative_bias.spread_line(line, t, s)
    i, j = np.indices((t, s))
    np.testing.assert_array_equal(block, np.asarray(line)[:, (j - i) % (t + s)])
    _, pullback = jax.vjp(lambda line: relative_bias.spread_line(line, t, s), line)
    cotangent = jnp.sin(jnp.arange(2.0 * t * s)).reshape(2, t, s)
    np.testing.assert_allclose(
        relative_bias.sum_diagonals(cotangent), pullback(cotangent)[0], atol=1e-14
    )


def test_no_array_holds_the_biases_of_all_queries_and_keys():
    """Nor of all queries and a block of keys: 96 places in blocks of 16."""
    args = arguments(96, 4, 2, buckets=8)
    text = str(jax.make_jaxpr(differentiated(blockwise))(*args))
    assert "[2,2,16,16]" in text  # K, G, t, s
    for shape in ("96,96]", "96,16]", "16,96]"):
        assert shape not in text.replace(" ", "")
