"""Working copies of a second direction: each rank also runs the chunks of the mirrored rank.

A parameter is at rest on the rank of its stage in direction 0. Before the first tick one permute
over the pipeline makes a copy of the mirrored rank's rows, in the compute type; after the last one
permute returns the gradients of these rows. For use in a `shard_map` in which pipeline is manual.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.sharding.resolve import is_axes, weight_dtype
from jaxscale.sharding.zero import Zero

Tree = Any


def add_mirror(zero: Zero, layers: Tree, axes: Tree) -> Tree:
    """A rank's rows of a stack in the compute type, followed by those of the mirrored rank.

    Args:
      layers: parameters of the stack at rest, [rows, ...].
      axes: their logical axes.
    """

    def one(axes, rows):
        rows = rows.astype(weight_dtype(axes, rows.dtype, zero.compute_dtype))
        return jnp.concatenate([rows, _exchange(rows)])

    return jax.tree.map(one, axes, layers, is_leaf=is_axes)


def fold_mirror(grads: Tree) -> Tree:
    """Adds the gradients of the mirrored rows to those of the rank that has the rows at rest,
    [2 * rows, ...] to [rows, ...]."""

    def one(both):
        own, mirrored = jnp.split(both, 2)
        return own + _exchange(mirrored)

    return jax.tree.map(one, grads)


def with_rows(layers: Tree, times: int) -> Tree:
    """The shapes of stacked parameters with so many times the rows."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((times * x.shape[0], *x.shape[1:]), x.dtype), layers
    )


def _exchange(rows: jax.Array) -> jax.Array:
    """The mirrored rank's rows."""
    ranks = jax.lax.axis_size("pipeline")
    return jax.lax.ppermute(rows, "pipeline", [(r, ranks - 1 - r) for r in range(ranks)])
