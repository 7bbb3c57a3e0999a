"""Matmuls of groups of rows, against one matmul a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops.experts.grouped_matmul import (
    IMPLEMENTATIONS,
    grouped_matmul,
    grouped_weight_gradient,
)

ROWS, GROUPS, D, F = 40, 5, 6, 7
INTERPRETED = {"kernels": {"interpret": True}}  # arguments of an implementation
SIZES = ([0, 5, 0, 11, 1], [17, 0, 0, 0, 0], [0, 0, 0, 0, 0], [8, 8, 8, 8, 8], [0, 1, 0, 0, 39])


@pytest.mark.proof
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_groups_of_any_size_are_multiplied_by_their_own_matrix(implementation):
    """Empty groups too, with rows after the last one that hold anything."""
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(ROWS, D)), rng.normal(size=(ROWS, F))
    w = rng.normal(size=(GROUPS, D, F))

    how = INTERPRETED.get(implementation, {})

    @jax.jit
    def run(x, w, dy, sizes):
        return (
            grouped_matmul(x, w, sizes, implementation, **how),
            grouped_matmul(x, w.swapaxes(1, 2), sizes, implementation, transposed=True, **how),
            grouped_weight_gradient(x, dy, sizes, implementation, **how),
        )

    for sizes in SIZES:
        used, group = sum(sizes), np.repeat(np.arange(GROUPS), sizes)
        x[used:], dy[used:] = (0, 0) if implementation == "ragged_dot" else (np.inf, np.nan)
        wanted = np.einsum("rd,rdf->rf", x[:used], w[group])
        gradient = np.zeros_like(w)
        np.add.at(gradient, group, np.einsum("rd,rf->rdf", x[:used], dy[:used]))
        y, transposed, dw = run(x, w, dy, jnp.array(sizes, jnp.int32))
        np.testing.assert_allclose(y[:used], wanted, atol=1e-12)
        np.testing.assert_allclose(transposed[:used], wanted, atol=1e-12)
        if implementation == "kernels":
            assert not np.any(y[used:])
            assert not np.any(transposed[used:])
        np.testing.assert_allclose(dw, gradient, atol=1e-12)
        x, dy = rng.normal(size=(ROWS, D)), rng.normal(size=(ROWS, F))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weight_gradients_of_long_groups_are_accumulated_in_float32(implementation):
    """4,096 rows of a bfloat16 one: a running sum in bfloat16 would stop at 256."""
    ones = jnp.ones((4096, 1), jnp.bfloat16)
    sizes = jnp.array([4096, 0], jnp.int32)
    how = INTERPRETED.get(implementation, {})
    assert grouped_weight_gradient(ones, ones, sizes, implementation, **how)[0, 0, 0] == 4096


def rounding(array, kind, axis):
    """The most by which an element errs: half a unit in the last place, or of the smallest number,
    whose scale moves the largest to the upper half of the range; in int8 half of a 127th of the
    largest along what is contracted."""
    largest = np.abs(array).max(initial=0)
    match kind:
        case "e4m3":
            return np.maximum(2.0**-4 * np.abs(array), 2.0**-10 / 224 * largest)
        case "e5m2":
            return np.maximum(2.0**-3 * np.abs(array), 2.0**-17 / 28672 * largest)
        case "int8":
            return np.broadcast_to(np.abs(array).max(axis, keepdims=True) / 254, array.shape)
    return np.zeros_like(array)


@pytest.mark.proof
@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "equal groups"])
@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [("float8", ("e4m3", "e5m2", "e4m3", "e5m2")), ("int8", ("int8", "int8", "", ""))],
)
def test_errors_of_8_bits_are_those_of_rounding(implementation, dtype, kinds):
    """All three matmuls, by the triangle inequality. What is after the last group has no part in
    the scales."""
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(ROWS, D)), 1e-6 * rng.normal(size=(ROWS, F))
    w = rng.normal(size=(GROUPS, D, F)) * np.exp(rng.normal(size=(GROUPS, 1, 1)))
    equal = implementation == "equal groups"
    which = IMPLEMENTATIONS[0] if equal else implementation
    how = INTERPRETED.get(which, {})

    @jax.jit
    def run(x, w, dy, sizes):
        sizes = None if equal else sizes
        return (
            grouped_matmul(x, w, sizes, which, dtype=dtype, **how),
            grouped_matmul(dy, w, sizes, which, transposed=True, dtype=dtype, **how),
            grouped_weight_gradient(x, dy, sizes, which, num_groups=GROUPS, dtype=dtype, **how),
        )

    for sizes in SIZES[3:4] if equal else SIZES:
        used, group = sum(sizes), np.repeat(np.arange(GROUPS), sizes)
        # XLA multiplies what is after the last group by zero.
        after = 0 if (dtype, implementation) == ("int8", "ragged_dot") else 1e30
        got_x, got_dy = (np.where(np.arange(ROWS)[:, None] < used, a, after) for a in (x, dy))
        y, dx, dw = run(got_x, w, got_dy, jnp.array(sizes, jnp.int32))
        # [rows, contracted, features] of each matmul, and how they are summed.
        mine = np.arange(GROUPS)[:, None] == group
        rows, of_rows = x[:used], dy[:used]
        each = [
            (y[:used], "rd,rdf->rf", rows, w[group], (kinds[0], kinds[0]), (1, 1)),
            (dx[:used], "rf,rdf->rd", of_rows, w[group], (kinds[1], kinds[0]), (1, 2)),
            (dw, "erd,rf->edf", mine[..., None] * rows, of_rows, (kinds[2], kinds[3]), (1, 0)),
        ]
        for got, sums, left, right, names, axes in each:
            errs = [rounding(a, name, axis) for a, name, axis in zip((left, right), names, axes)]
            sizes_of = np.abs(left), np.abs(right)
            wide, most = np.einsum(sums, left, right), np.einsum(sums, *sizes_of)
            bound = np.einsum(sums, sizes_of[0] + errs[0], sizes_of[1] + errs[1]) - most
            assert np.all(np.abs(got - wide) <= bound + 1e-6 * most)
            if names[0]:
                assert used == 0 or np.abs(got - wide).max() > 0


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"the grouped matmul = 'block'.*did you mean 'blocks'"):
        grouped_matmul(jnp.ones((2, 2)), jnp.ones((1, 2, 2)), jnp.array([2]), "block")
