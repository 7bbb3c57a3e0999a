"""Blocked array layout inside a step's `shard_map`: a dimension sharded over an automatic axis and
over manual axes.

Each row of tensor, or rank of context, uses a block of consecutive features of every weight. The
blocks divide the whole array, and the manual axes divide each block. The axis of the blocks is
automatic, so inside the `shard_map` the dimension is two, [blocks, features of a block]: with one,
the manual axes would divide the whole array first and give each rank other features. A layout has
rows of tensor or ranks of context, never both.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxscale.config.layout import AUTOMATIC_AXES
from jaxscale.sharding.resolve import automatic_axes, automatic_part, is_axes, resolve
from jaxscale.sharding.rules import Axes, Rules
from jaxscale.sharding.specs import manually, mesh_axes_of

Tree = Any
Sizes = Mapping[str, int]


class ArrayLayout(NamedTuple):
    """The layout of an array over the automatic axes."""

    rules: Rules
    blocked: bool = False  # the sharded dimension as [blocks, features of a block]


def sharded_dim(axes: Axes) -> int | None:
    """The dimension that ZeRO shards, if a stage shards the array."""
    return next((dim for dim, name in enumerate(axes) if name in ("embed", "outer_embed")), None)


def blocks_over(rules: Rules, sizes: Sizes) -> str | None:
    """The automatic axis whose ranks have a block of each array; None without blocks."""
    sharded = (axis for axis in rules["embed"] if axis in AUTOMATIC_AXES)
    return next((axis for axis in sharded if sizes.get(axis, 1) > 1), None)


def split_blocks(params: Tree, axes: Tree, rules: Rules, sizes: Sizes) -> Tree:
    """Converts arrays to the blocked layout inside the `shard_map`."""
    axis = blocks_over(rules, sizes)

    def reshaped(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        return *shape[:dim], sizes[axis or ""], -1, *shape[dim + 1 :]

    return _reshaped(axes, params, reshaped) if axis else params


def join_blocks(params: Tree, axes: Tree, rules: Rules, sizes: Sizes) -> Tree:
    """Converts arrays from the blocked layout inside the `shard_map`."""

    def reshaped(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        return *shape[:dim], -1, *shape[dim + 2 :]

    return _reshaped(axes, params, reshaped) if blocks_over(rules, sizes) else params


def blocked_spec(axes: Axes, rules: Rules, sizes: Sizes) -> PartitionSpec:
    """The spec of an array inside the `shard_map`, over all axes."""
    spec, dim = resolve(axes, rules, sizes), sharded_dim(axes)
    block = blocks_over(rules, sizes)
    if block is None or dim is None:
        return spec
    entry = tuple(axis for axis in mesh_axes_of(spec[dim]) if axis != block)
    return PartitionSpec(*spec[:dim], block, entry or None, *spec[dim + 1 :])


def map_manually(
    one: Callable,
    axes: Tree,
    tree: Tree,
    given: ArrayLayout,
    returned: ArrayLayout,
    sizes: Sizes,
    *,
    always: bool = False,
) -> Tree:
    """Maps `one(axes, array)` over a tree with every mesh axis manual.

    With automatic axes left, XLA's partitioner replicates an operand over them before a gather or
    scatter over the manual axes. XLA for CPUs also aborts the process at an all-reduce in 16 bits
    if an axis is automatic, even one of a single rank.

    Args:
      given, returned: layouts of the arguments and of the results of `one`.
      always: makes automatic axes of a single rank manual, too.
    """
    is_blocked = [form.blocked and blocks_over(form.rules, sizes) for form in (given, returned)]

    def each(axes, x):
        dim = sharded_dim(axes)
        if dim is None:
            return one(axes, x)
        # Each rank has one block.
        x = one(axes, jnp.squeeze(x, dim) if is_blocked[0] else x)
        return jnp.expand_dims(x, dim) if is_blocked[1] else x

    def local(tree):
        return jax.tree.map(each, axes, tree, is_leaf=is_axes)

    manual = automatic_axes(sizes)
    if not always and all(sizes[axis] == 1 for axis in manual):
        return local(tree)

    def specs(form: ArrayLayout) -> Tree:
        spec = blocked_spec if form.blocked else resolve
        return jax.tree.map(
            lambda axes: automatic_part(spec(axes, form.rules, sizes)), axes, is_leaf=is_axes
        )

    return manually(local, manual, (specs(given),), specs(returned))(tree)


def _reshaped(axes_tree: Tree, tree: Tree, shape_of: Callable) -> Tree:
    """Reshapes arrays to `shape_of(shape, sharded dimension)`."""

    def one(axes, x):
        dim = sharded_dim(axes)
        return x if dim is None else x.reshape(shape_of(x.shape, dim))

    return jax.tree.map(one, axes_tree, tree, is_leaf=is_axes)
