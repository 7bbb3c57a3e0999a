"""Lookups and updates of a table over eight ranks, against one NumPy array."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxscale.ops.tables import exchange
from jaxscale.sharding.specs import manually

RANKS, SHARE, WIDTH, IDS, RATE = 8, 12, 3, 20, 0.1
ROWS = RANKS * SHARE


def numpy_adagrad(rows, sums, ids, grads, rate=RATE, epsilon=1e-8):
    """Of rows that have a gradient, each once."""
    rows, sums = rows.copy(), sums.copy()
    for row in np.unique(ids[ids >= 0]):
        grad = grads[ids == row].sum(0)
        sums[row] += np.mean(grad**2)
        rows[row] -= rate * grad / (np.sqrt(sums[row]) + epsilon)
    return rows, sums


@functools.cache
def functions(num_ranks: int):
    """The lookup and the update over some of the devices, with one more result: the rounds."""
    axes = ("x", "y") if num_ranks > 1 else ()
    shape = {8: (2, 4), 1: (1, 1)}[num_ranks]
    mesh = Mesh(np.array(jax.devices()[:num_ranks]).reshape(shape), ("x", "y"))
    shards = exchange.TableShards(axes, num_ranks, ROWS // num_ranks)

    def local(rows, sums, ids, grads):
        rule = functools.partial(exchange.adagrad, rate=RATE)
        table = exchange.update(shards, (rows, sums), ids, grads, rule)
        return exchange.look_up(shards, rows, ids), *table

    spec = PartitionSpec(("x", "y"))
    return jax.jit(manually(local, ("x", "y"), (spec,) * 4, (spec,) * 3, mesh))


def ids_of(case: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    count = RANKS * IDS
    return {
        "random": lambda: rng.integers(0, ROWS, count),
        "duplicates": lambda: np.full(count, 17),
        "one shard": lambda: rng.integers(5 * SHARE, 6 * SHARE, count),
        "empty": lambda: np.full(count, -1),
        "some empty": lambda: np.where(rng.random(count) < 0.5, -1, rng.integers(0, ROWS, count)),
        "skewed": lambda: np.minimum(rng.zipf(1.3, count), ROWS) - 1,
        "last row": lambda: np.where(np.arange(count) == 3, ROWS - 1, -1),
    }[case]().astype(np.int32)


@pytest.mark.parametrize(
    "case", ["random", "duplicates", "one shard", "empty", "some empty", "skewed", "last row"]
)
@pytest.mark.parametrize("ranks", [1, 8])
def test_table_over_ranks_is_one_numpy_array(case, ranks):
    rng, ids = np.random.default_rng(1), ids_of(case)
    rows, grads = rng.normal(size=(ROWS, WIDTH)), rng.normal(size=(len(ids), WIDTH))
    sums = rng.random(ROWS)
    found, got_rows, got_sums = functions(ranks)(*map(jnp.asarray, (rows, sums, ids, grads)))
    np.testing.assert_array_equal(found, np.where(ids[:, None] >= 0, rows[ids], 0))
    wanted_rows, wanted_sums = numpy_adagrad(rows, sums, ids, grads)
    np.testing.assert_allclose(got_rows, wanted_rows, rtol=1e-12)
    np.testing.assert_allclose(got_sums, wanted_sums, rtol=1e-12)
    untouched = np.setdiff1d(np.arange(ROWS), ids)
    np.testing.assert_array_equal(got_rows[untouched], rows[untouched])


def test_memory_of_a_round_is_twice_the_mean_and_never_more_than_all_ids():
    shards = exchange.TableShards(("x",), 8, SHARE)
    assert shards.capacity(800) == 200
    assert shards.capacity(1) == 1
    assert exchange.TableShards((), 1, ROWS).capacity(64) == 64


def test_many_gradients_of_a_row_are_summed_in_float32():
    """In bfloat16 a sum of ones stops at 256."""
    ids = jnp.full(4096, 3, jnp.int32)
    ones = jnp.ones((4096, WIDTH), jnp.bfloat16)
    summed = exchange.sum_duplicates(exchange.distinct(ids, ROWS), ones)
    np.testing.assert_array_equal(summed[0], 4096)
