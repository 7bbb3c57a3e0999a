"""Slices of the head: each pipeline rank has a part of the columns, "vocab", of its parameters.

Of the consecutive columns of a rank of tensor, each pipeline rank has an equal slice, the last one
padded with zeros. At rest the head is as in any layout. For use in a `shard_map` in which pipeline,
data, fsdp and expert are manual.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.sharding.blocks import ArrayLayout, blocks_over, map_manually, sharded_dim
from jaxscale.sharding.resolve import is_axes
from jaxscale.sharding.rules import Axes
from jaxscale.sharding.zero import Zero

Tree = Any
COLUMNS = "vocab"


def gather_slices(zero: Zero, head: Tree, axes: Tree) -> Tree:
    """The head's parameters in the compute type, of the columns this rank's slice.

    Args:
      head: parameters at rest.
      axes: their logical axes.
    """
    ranks, blocks = zero.sizes["pipeline"], zero.sizes["context"]

    def own_slice(axes: Axes, x: jax.Array) -> jax.Array:
        dim, features = axes.index(COLUMNS), sharded_dim(axes)
        share = -(-x.shape[dim] // ranks)
        missing = share * ranks - x.shape[dim]
        x = jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)])
        if features is None or "outer_embed" not in axes:
            begin = share * jax.lax.axis_index("pipeline")
            return jax.lax.dynamic_slice_in_dim(x, begin, share, dim)
        # At rest context divides the features before the pipeline does: each block separately.
        shape = list(x.shape)
        x = x.reshape(*shape[:features], blocks, -1, *shape[features + 1 :])
        split = dim + (dim > features)
        x = jax.lax.all_to_all(x, "pipeline", split, features + 1, tiled=True)
        shape[features], shape[dim] = ranks * shape[features], share
        return x.reshape(shape)

    def one(axes: Axes, x: jax.Array) -> jax.Array:
        if COLUMNS not in axes:
            return zero.gather(x, axes)
        weight = _within_rank(zero).gather(x, _without_pipeline(axes))
        form = ArrayLayout(zero.replicated_rules)
        return map_manually(own_slice, axes, weight, form, form, zero.sizes)

    return jax.tree.map(one, axes, head, is_leaf=is_axes)


def slice_shapes(zero: Zero, head: Tree, axes: Tree) -> Tree:
    """The shapes of the head's parameters at rest, with the columns of a slice."""
    tensor = zero.sizes["tensor"]

    def one(axes: Axes, x: jax.Array) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        if COLUMNS in axes:
            dim = _columns_dim(zero, axes)
            shape[dim] = tensor * -(-shape[dim] // (tensor * zero.sizes["pipeline"]))
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    return jax.tree.map(one, axes, head, is_leaf=is_axes)


def finish_slices(zero: Zero, grads: Tree, axes: Tree, head: Tree) -> Tree:
    """`Zero.finish` for the gradients of `gather_slices`: as of the parameters at rest.

    Args:
      axes: logical, of the parameters.
      head: parameters at rest.
    """

    def one(axes: Axes, grad: jax.Array, param: jax.Array) -> jax.Array:
        if COLUMNS not in axes:
            return zero.finish(grad, axes)
        columns = param.shape[_columns_dim(zero, axes)] // zero.sizes["tensor"]

        def all_slices(axes: Axes, x: jax.Array) -> jax.Array:
            dim, features = axes.index(COLUMNS), sharded_dim(axes)
            if features is None or "outer_embed" not in axes:
                x = jax.lax.all_gather(x, "pipeline", axis=dim, tiled=True)
            else:
                x = jax.lax.all_to_all(x, "pipeline", features, dim, tiled=True)
            return jax.lax.slice_in_dim(x, 0, columns, axis=dim)

        form = ArrayLayout(zero.state_rules, blocked=True)
        whole = map_manually(all_slices, axes, grad, form, form, zero.sizes)
        return _within_rank(zero).finish(whole, _without_pipeline(axes))

    return jax.tree.map(one, axes, grads, head, is_leaf=is_axes)


def _within_rank(zero: Zero) -> Zero:
    """The same collectives, without those over the pipeline."""
    return dataclasses.replace(zero, sizes={**zero.sizes, "pipeline": 1})


def _without_pipeline(axes: Axes) -> Axes:
    return tuple("embed" if name == "outer_embed" else name for name in axes)


def _columns_dim(zero: Zero, axes: Axes) -> int:
    """The dimension of the columns inside the `shard_map` (`sharding.blocks`)."""
    dim, features = axes.index(COLUMNS), sharded_dim(axes)
    blocked = blocks_over(zero.state_rules, zero.sizes) is not None
    return dim + (blocked and features is not None and features < dim)
