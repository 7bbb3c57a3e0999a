"""Arrays stacked along leading dimensions: read, replace or add to the entry at one index, in place
inside a loop.

Indices count from 0; one below 0 reads the first entry (`FROM_ZERO`). JAX would compare each with 0
and add the length to it, which was half of what was traced of ring attention.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any
Index = int | jax.Array
FROM_ZERO = {"allow_negative_indices": False}


def at(stack: Tree, *index: Index) -> Tree:
    """The entry at an index of the leading dimensions of every array."""

    def one(x: jax.Array) -> jax.Array:
        if len(index) == 1:
            return jax.lax.dynamic_index_in_dim(x, index[0], keepdims=False, **FROM_ZERO)
        rest = x.shape[len(index) :]
        sizes = (*(1,) * len(index), *rest)
        start = _start(x, index)
        return jax.lax.dynamic_slice(x, start, sizes, **FROM_ZERO).reshape(rest)

    return jax.tree.map(one, stack)


def put(stack: Tree, entry: Tree, *index: Index) -> Tree:
    """The stack with another entry at an index."""

    def one(x: jax.Array, value: jax.Array) -> jax.Array:
        value = value.reshape((*(1,) * len(index), *value.shape))
        return jax.lax.dynamic_update_slice(x, value, _start(x, index), **FROM_ZERO)

    return jax.tree.map(one, stack, entry)


def add(total: Tree, grads: Tree) -> Tree:
    """A running sum in the type of `total`; None is an empty one."""
    if total is None:
        return grads
    return jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), total, grads)


def add_at(total: Tree, index: Index, grads: Tree) -> Tree:
    """Adds to the entry at an index of the first dimension, in the type of `total`."""
    return jax.tree.map(lambda x, grad: x.at[index].add(grad.astype(x.dtype)), total, grads)


def add_rows(total: Tree, begin: Index, rows: Tree) -> Tree:
    """Adds to the entries from `begin` on, as many as `rows` has."""

    def one(total: jax.Array, grad: jax.Array) -> jax.Array:
        before = jax.lax.dynamic_slice_in_dim(total, begin, len(grad), **FROM_ZERO)
        after = before + grad.astype(total.dtype)
        return jax.lax.dynamic_update_slice_in_dim(total, after, begin, axis=0, **FROM_ZERO)

    return jax.tree.map(one, total, rows)


def after(index: Index, tree: Tree) -> jax.Array:
    """An index that is known once the arrays are, from an element of each.

    XLA removes barriers before it decides in which order kernels run: what needs constants alone
    could run at any time. The barrier here keeps the elements out of what the index is used in.
    """

    def sign(x: jax.Array) -> jax.Array:
        width = 8 * x.dtype.itemsize
        bits = jax.lax.bitcast_convert_type(x[(0,) * x.ndim], jnp.dtype(f"uint{width}"))
        return (bits >> (width - 1)).astype(jnp.int32)

    # The second bit of a sum of signs shifted by two is 0, which no compiler looks for.
    known = sum(map(sign, jax.tree.leaves(tree)), jnp.zeros((), jnp.int32)) << 2 & 2
    return jax.lax.optimization_barrier(jnp.asarray(index, jnp.int32) + known)


def _start(x: jax.Array, index: Sequence[Index]) -> list[jax.Array]:
    return [jnp.asarray(i, jnp.int32) for i in (*index, *(0,) * (x.ndim - len(index)))]
