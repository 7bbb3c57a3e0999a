"""Tiles of the grouped matmul's kernels, and results of several tiles in each dimension."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops.experts import grouped_kernels
from jaxscale.ops.experts.grouped_kernels import (
    ProgramOrder,
    kernel_rows,
    kernel_weight_gradient,
    tile_places,
)

SIZES = ([0, 5, 0, 11, 1], [40, 0, 0, 0, 0], [0] * 5, [8, 8, 8, 8, 8], [0, 0, 0, 1, 33])


@pytest.mark.parametrize("height", [1, 16])
def test_every_row_is_in_one_tile_of_its_group(height):
    """The rows after the last group are one more group."""
    rows = 40
    find = jax.jit(lambda sizes: tile_places(sizes, rows, height))
    for sizes in SIZES:
        group = np.full(rows, -1)
        for number, first, end in np.asarray(find(jnp.array(sizes, jnp.int32))):
            mine = slice(first, min(first + height, end))
            assert np.all(group[mine] == -1)
            group[mine] = number
        used = sum(sizes)
        np.testing.assert_array_equal(group[:used], np.repeat(np.arange(5), sizes))
        assert np.all(group[used:] == 5)


@pytest.mark.parametrize("grid", [(5, 3), (37, 4)], ids=str)
def test_every_tile_has_one_program_and_neighbours_share_rows(grid):
    """A panel's programs take its columns one by one."""
    order = ProgramOrder(*grid, panel=16)
    row, column = map(np.asarray, order.place(jnp.arange(grid[0] * grid[1])))
    assert len({*zip(row.tolist(), column.tolist())}) == grid[0] * grid[1]
    assert np.all((row < grid[0]) & (column < grid[1]))
    panel = row // 16
    assert np.all(np.diff(panel) >= 0)
    assert all(np.all(np.diff(column[panel == one]) >= 0) for one in range(panel[-1] + 1))


@pytest.mark.proof
@pytest.mark.parametrize("sizes", [[3, 0, 50, 17], [0, 0, 90, 0]], ids=str)
def test_results_of_several_tiles_are_those_of_one_matmul_a_row(sizes):
    """Odd numbers of features; in float64, whose tiles are 64 x 64 x 16 here."""
    rows, inputs, features = 90, 70, 81
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(rows, inputs)), rng.normal(size=(rows, features))
    w = rng.normal(size=(4, inputs, features))
    used, group = sum(sizes), np.repeat(np.arange(4), sizes)
    how = {"expected": 400, "result": jnp.float64, "interpret": True}

    @jax.jit
    def run(x, w, dy, sizes):
        y = kernel_rows(x, w, sizes, transposed=False, **how)
        dx = kernel_rows(dy, w, sizes, transposed=True, **how)
        return y, dx, kernel_weight_gradient(x, dy, sizes, **how)

    y, dx, dw = run(x, w, dy, jnp.array(sizes, jnp.int32))
    x, dy = (np.where(np.arange(rows)[:, None] < used, a, 0) for a in (x, dy))
    group = np.append(group, np.zeros(rows - used, int))
    np.testing.assert_allclose(y, np.einsum("rd,rdf->rf", x, w[group]), atol=1e-10)
    np.testing.assert_allclose(dx, np.einsum("rf,rdf->rd", dy, w[group]), atol=1e-10)
    mine = np.arange(4)[:, None] == group
    np.testing.assert_allclose(dw, np.einsum("er,rd,rf->edf", mine, x, dy), atol=1e-10)


def test_a_gradient_has_the_type_that_is_asked_for():
    """Sums of bfloat16 rows in float32, not rounded in between."""
    rows = jnp.full((3, 1), 1 + 2**-7, jnp.bfloat16)
    found = kernel_weight_gradient(
        rows, rows, jnp.array([3]), expected=3, result=jnp.float32, interpret=True
    )
    assert found.dtype == jnp.float32
    assert found[0, 0, 0] == 3 * (1 + 2**-7) ** 2


def test_a_device_before_ampere_is_refused(monkeypatch):
    old = types.SimpleNamespace(compute_capability=75)
    monkeypatch.setattr(grouped_kernels.triton, "get_gpu_info", lambda: old)
    with pytest.raises(ValueError, match=r"compute capability 8.0 .* 7.5; set model.capacity"):
        grouped_kernels._tiles(jnp.dtype(jnp.float16), (64, 64), interpret=False)
