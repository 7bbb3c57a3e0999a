"""Entries of stacked arrays at one index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops.array_stack import add, add_at, add_rows, after, at, put

STACK = {
    "a": jnp.arange(24.0).reshape(2, 3, 4),
    "b": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
}


@pytest.mark.proof
def test_an_entry_is_read_and_replaced():
    for index in ((1,), (1, 2), (jnp.array(0), 1)):
        entry = at(STACK, *index)
        place = tuple(int(i) for i in index)
        for name, stack in STACK.items():
            np.testing.assert_array_equal(entry[name], stack[place])
            doubled = put(STACK, {key: 2 * value for key, value in entry.items()}, *index)
            np.testing.assert_array_equal(doubled[name], stack.at[place].multiply(2))


def test_an_index_that_waits_for_arrays_is_the_index():
    """Whatever they hold."""
    many = [-0.0, 0.0, -1.5, np.inf, -np.inf, np.nan, -np.nan]
    for dtype in (jnp.bfloat16, jnp.float32, jnp.float64):
        trees = [[np.full((1, 2), x, dtype), np.full(3, y, dtype)] for x in many for y in many]
        assert {int(jax.jit(after)(7, tree)) for tree in trees} == {7}
    assert int(after(3, [])) == 3


@pytest.mark.proof
def test_sums_are_in_the_type_of_the_total():
    grads = {name: jnp.ones_like(stack[0], jnp.float32) for name, stack in STACK.items()}
    rows = {name: grad[None] for name, grad in grads.items()}
    for summed in (add_at(STACK, 1, grads), add_rows(STACK, jnp.array(1), rows)):
        for name, stack in STACK.items():
            np.testing.assert_array_equal(summed[name], stack.at[1].add(1))
            assert summed[name].dtype == stack.dtype
    assert add(STACK, STACK)["b"].dtype == jnp.bfloat16
    assert add(None, grads) is grads
