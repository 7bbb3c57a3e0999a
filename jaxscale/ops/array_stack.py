"""Arrays stacked along leading dimensions: in-place reads, writes and additions at an index, for
loops.

Indices count from 0; a negative index reads the first entry (`FROM_ZERO`). For negative indices JAX
would trace a comparison and an addition each, which was half of ring attention's jaxpr.
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
    """Replaces the entry at an index."""

    def one(x: jax.Array, value: jax.Array) -> jax.Array:
        value = value.reshape((*(1,) * len(index), *value.shape))
        return jax.lax.dynamic_update_slice(x, value, _start(x, index), **FROM_ZERO)

    return jax.tree.map(one, stack, entry)


def add(total: Tree, grads: Tree) -> Tree:
    """A running sum in the type of `total`; None is an empty sum."""
    if total is None:
        return grads
    return jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), total, grads)


def add_at(total: Tree, index: Index, grads: Tree) -> Tree:
    """Adds to the entry at an index of the first dimension, in the type of `total`."""
    return jax.tree.map(lambda x, grad: x.at[index].add(grad.astype(x.dtype)), total, grads)


def add_rows(total: Tree, begin: Index, rows: Tree) -> Tree:
    """Adds `rows` to as many entries, from `begin`."""

    def one(total: jax.Array, grad: jax.Array) -> jax.Array:
        before = jax.lax.dynamic_slice_in_dim(total, begin, len(grad), **FROM_ZERO)
        after = before + grad.astype(total.dtype)
        return jax.lax.dynamic_update_slice_in_dim(total, after, begin, axis=0, **FROM_ZERO)

    return jax.tree.map(one, total, rows)


def put_rows(stack: Tree, begin: Index, rows: Tree) -> Tree:
    """Replaces as many entries as there are `rows`, from `begin`."""
    return jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, begin, axis=0, **FROM_ZERO),
        stack,
        rows,
    )


def after(index: Index, tree: Tree) -> jax.Array:
    """Makes an index depend on arrays, so that users of the index run after them.

    XLA removes barriers before it schedules kernels, so a data dependence is needed: one element of
    each array. The barrier here prevents fusion of these elements into users of the index.
    """

    def sign(x: jax.Array) -> jax.Array:
        width = 8 * x.dtype.itemsize
        bits = jax.lax.bitcast_convert_type(x[(0,) * x.ndim], jnp.dtype(f"uint{width}"))
        return (bits >> (width - 1)).astype(jnp.int32)

    # Always 0: the second bit of a number shifted left by two. XLA does not simplify this away.
    known = sum(map(sign, jax.tree.leaves(tree)), jnp.zeros((), jnp.int32)) << 2 & 2
    return jax.lax.optimization_barrier(jnp.asarray(index, jnp.int32) + known)


def _start(x: jax.Array, index: Sequence[Index]) -> list[jax.Array]:
    return [jnp.asarray(i, jnp.int32) for i in (*index, *(0,) * (x.ndim - len(index)))]
