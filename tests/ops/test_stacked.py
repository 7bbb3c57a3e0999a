"""Entries of stacked arrays at one index."""

import jax.numpy as jnp
import numpy as np

from jaxscale.ops.stacked import add, add_at, add_rows, at, put

STACK = {
    "a": jnp.arange(24.0).reshape(2, 3, 4),
    "b": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
}


def test_an_entry_is_read_and_replaced():
    for index in ((1,), (1, 2), (jnp.array(0), 1)):
        entry = at(STACK, *index)
        place = tuple(int(i) for i in index)
        for name, stack in STACK.items():
            np.testing.assert_array_equal(entry[name], stack[place])
            doubled = put(STACK, {key: 2 * value for key, value in entry.items()}, *index)
            np.testing.assert_array_equal(doubled[name], stack.at[place].multiply(2))


def test_sums_are_in_the_type_of_the_total():
    grads = {name: jnp.ones_like(stack[0], jnp.float32) for name, stack in STACK.items()}
    rows = {name: grad[None] for name, grad in grads.items()}
    for summed in (add_at(STACK, 1, grads), add_rows(STACK, jnp.array(1), rows)):
        for name, stack in STACK.items():
            np.testing.assert_array_equal(summed[name], stack.at[1].add(1))
            assert summed[name].dtype == stack.dtype
    assert add(STACK, STACK)["b"].dtype == jnp.bfloat16
    assert add(None, grads) is grads
