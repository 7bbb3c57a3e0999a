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
SIZES = ([0, 5, 0, 11, 1], [17, 0, 0, 0, 0], [0, 0, 0, 0, 0], [8, 8, 8, 8, 8], [0, 1, 0, 0, 39])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_groups_of_any_size_are_multiplied_by_their_own_matrix(implementation):
    """Empty groups too, with rows after the last one that hold anything."""
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(ROWS, D)), rng.normal(size=(ROWS, F))
    w = rng.normal(size=(GROUPS, D, F))

    @jax.jit
    def run(x, w, dy, sizes):
        return (
            grouped_matmul(x, w, sizes, implementation),
            grouped_matmul(x, w.swapaxes(1, 2), sizes, implementation, transposed=True),
            grouped_weight_gradient(x, dy, sizes, implementation),
        )

    for sizes in SIZES:
        used, group = sum(sizes), np.repeat(np.arange(GROUPS), sizes)
        x[used:], dy[used:] = (1e30, 1e30) if implementation == "blocks" else (0, 0)
        wanted = np.einsum("rd,rdf->rf", x[:used], w[group])
        gradient = np.zeros_like(w)
        np.add.at(gradient, group, np.einsum("rd,rf->rdf", x[:used], dy[:used]))
        y, transposed, dw = run(x, w, dy, jnp.array(sizes, jnp.int32))
        np.testing.assert_allclose(y[:used], wanted, atol=1e-12)
        np.testing.assert_allclose(transposed[:used], wanted, atol=1e-12)
        np.testing.assert_allclose(dw, gradient, atol=1e-12)
        x, dy = rng.normal(size=(ROWS, D)), rng.normal(size=(ROWS, F))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weight_gradients_of_long_groups_are_accumulated_in_float32(implementation):
    """4,096 rows of a bfloat16 one: a running sum in bfloat16 would stop at 256."""
    ones = jnp.ones((4096, 1), jnp.bfloat16)
    sizes = jnp.array([4096, 0], jnp.int32)
    assert grouped_weight_gradient(ones, ones, sizes, implementation)[0, 0, 0] == 4096


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"the grouped matmul = 'block'.*did you mean 'blocks'"):
        grouped_matmul(jnp.ones((2, 2)), jnp.ones((1, 2, 2)), jnp.array([2]), "block")
