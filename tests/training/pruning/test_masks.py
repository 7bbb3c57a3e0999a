"""Masks have exact counts, divide ties by index, and are the same for every sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale.compiled import collectives, hlo
from jaxscale.training.pruning.masks import (
    all_but_lowest,
    largest_of_groups,
    live_weights,
    magnitude_keys,
)

# Shapes, dimensions of a matrix, zeros of each; the second is a stack of stacks, with many ties.
ARRAYS = (((4, 16, 8, 4), (1, 2, 3), 300), ((4, 2, 8, 16), (2, 3), 57))
SHARDINGS = (
    PartitionSpec("layers", "rows", "columns"),
    PartitionSpec(None, None, "rows", "layers"),
)


@functools.cache
def mesh():
    sizes, names = (2, 2, 2), ("layers", "rows", "columns")
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * 3)


def arrays():
    rng = np.random.default_rng(0)
    made = [rng.normal(size=shape).astype(np.float32) for shape, _, _ in ARRAYS]
    made[0][0, :3] = 0  # more zeros than are pruned in the first layer's rows
    made[1] = np.round(made[1] * 2)
    made[1][1, 1] = -0.0
    return made


def prune(*xs, active=True):
    dims, counts = zip(*[(dims, jnp.int32(count)) for _, dims, count in ARRAYS])
    return all_but_lowest([magnitude_keys(x) for x in xs], counts, dims, jnp.array(active))


def by_sort(x, dims, count):
    """The lowest `count` of each matrix by a stable sort."""
    first = x.ndim - len(dims)
    flat = np.abs(x).reshape(-1, int(np.prod(x.shape[first:])))
    kept = np.ones(flat.shape, bool)
    for row, order in zip(kept, np.argsort(flat, axis=1, kind="stable")):
        row[order[:count]] = False
    return kept.reshape(x.shape)


def test_counts_are_exact_for_every_sharding_with_ties_by_index():
    xs = arrays()
    wanted = [by_sort(x, dims, count) for x, (_, dims, count) in zip(xs, ARRAYS)]
    wanted[1][1, 1] = True  # a matrix of zeros has nothing to prune
    for spec in SHARDINGS:
        placed = jax.device_put(xs, NamedSharding(mesh(), spec))
        for x, got, kept in zip(xs, jax.jit(prune)(*placed), wanted):
            np.testing.assert_array_equal(got & (x != 0), kept & (x != 0))
            np.testing.assert_array_equal(got | (x == 0), kept | (x == 0))


def test_nothing_is_pruned_between_prunings():
    assert all(
        np.all(kept) for kept in jax.jit(prune, static_argnames="active")(*arrays(), active=False)
    )


@pytest.mark.parametrize(("kept", "group"), [(2, 4), (1, 4), (4, 8)])
def test_groups_of_inputs_are_masked_without_communication(kept, group):
    x = np.round(np.random.default_rng(1).normal(size=(2, 64, 8)) * 4)  # with ties

    def mask(x):
        return largest_of_groups(magnitude_keys(x), 1, kept, group)

    groups = np.abs(x).reshape(2, 64 // group, group, 8)
    order = np.argsort(groups, axis=2, kind="stable")
    wanted = np.zeros(groups.shape, bool)
    np.put_along_axis(wanted, order[:, :, group - kept :], True, axis=2)
    for spec in (PartitionSpec(None, ("rows", "columns")), PartitionSpec("layers", None, "rows")):
        sharding = NamedSharding(mesh(), spec)
        placed = jax.device_put(x, sharding)
        compiled = jax.jit(mask, out_shardings=sharding).lower(placed).compile()
        program = hlo.parse_hlo(compiled.as_text() or "")
        assert not list(collectives.collectives(program, dict(mesh().shape)))
        np.testing.assert_array_equal(compiled(placed), wanted.reshape(x.shape))


def test_zeros_are_pruned_but_in_matrices_of_zeros():
    x = jnp.array([[[0.0, 1.0], [2.0, -0.0]], [[0.0, 0.0], [-0.0, 0.0]]])
    live = live_weights(x, (1, 2))
    np.testing.assert_array_equal(live, [[[False, True], [True, False]], [[True] * 2] * 2])


def test_keys_order_magnitudes_and_only_zeros_are_zero():
    x = jnp.array([0.0, -0.0, 1e-300, -1.0, 1.5, 3e38], jnp.float64)
    keys = np.asarray(magnitude_keys(x)).astype(np.int64)
    assert keys[0] == keys[1] == 0
    assert np.all(np.diff(keys[1:]) > 0)
