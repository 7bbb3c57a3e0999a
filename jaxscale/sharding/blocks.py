"""Arrays inside a step's `shard_map` whose sharded dimension has blocks over an automatic axis.

Where tensor has rows, or there are ranks of context, each of them uses a block of consecutive
features of every weight. Such blocks are of the whole array, and the manual axes divide each. As
the axis of the blocks is automatic, an array inside the `shard_map` has this dimension apart, as
[blocks, features of a block]: the part over the manual axes alone would be of other features. There
are rows or ranks of context, never both.
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


class Form(NamedTuple):
    """How an array is laid out over the automatic axes."""

    rules: Rules
    apart: bool = False


def sharded_dim(axes: Axes) -> int | None:
    """The dimension that is sharded over fsdp, if a stage shards it."""
    return next((dim for dim, name in enumerate(axes) if name in ("embed", "outer_embed")), None)


def blocks_over(rules: Rules, sizes: Sizes) -> str | None:
    """The automatic axis that has a block of an array each."""
    sharded = (axis for axis in rules["embed"] if axis in AUTOMATIC_AXES)
    return next((axis for axis in sharded if sizes.get(axis, 1) > 1), None)


def split_blocks(params: Tree, axes: Tree, rules: Rules, sizes: Sizes) -> Tree:
    """Arrays as they are inside the `shard_map`."""
    axis = blocks_over(rules, sizes)

    def reshaped(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        return *shape[:dim], sizes[axis or ""], -1, *shape[dim + 1 :]

    return _reshaped(axes, params, reshaped) if axis else params


def join_blocks(params: Tree, axes: Tree, rules: Rules, sizes: Sizes) -> Tree:
    """Arrays from inside the `shard_map` as they are outside."""

    def reshaped(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        return *shape[:dim], -1, *shape[dim + 2 :]

    return _reshaped(axes, params, reshaped) if blocks_over(rules, sizes) else params


def apart_spec(axes: Axes, rules: Rules, sizes: Sizes) -> PartitionSpec:
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
    given: Form,
    returned: Form,
    sizes: Sizes,
    *,
    always: bool = False,
) -> Tree:
    """Maps `one(axes, array)` over a tree with every mesh axis manual.

    Otherwise XLA's partitioner would first replicate an operand over the axes that are still
    automatic, before a gather or a scatter over the manual ones; and XLA for CPUs ends the process
    over a sum in 16 bits where an axis is automatic, even one of a single rank.

    Args:
      given, returned: of the arrays that `one` takes and of those that it returns.
      always: makes automatic axes of a single rank manual, too.
    """
    is_apart = [form.apart and blocks_over(form.rules, sizes) for form in (given, returned)]

    def each(axes, x):
        dim = sharded_dim(axes)
        if dim is None:
            return one(axes, x)
        # Each rank has one block.
        x = one(axes, jnp.squeeze(x, dim) if is_apart[0] else x)
        return jnp.expand_dims(x, dim) if is_apart[1] else x

    def local(tree):
        return jax.tree.map(each, axes, tree, is_leaf=is_axes)

    manual = automatic_axes(sizes)
    if not always and all(sizes[axis] == 1 for axis in manual):
        return local(tree)

    def specs(form: Form) -> Tree:
        spec = apart_spec if form.apart else resolve
        return jax.tree.map(
            lambda axes: automatic_part(spec(axes, form.rules, sizes)), axes, is_leaf=is_axes
        )

    return manually(local, manual, (specs(given),), specs(returned))(tree)


def _reshaped(axes_tree: Tree, tree: Tree, shape_of: Callable) -> Tree:
    """Arrays with the sharded dimension as `shape_of(shape, dim)` has it."""

    def one(axes, x):
        dim = sharded_dim(axes)
        return x if dim is None else x.reshape(shape_of(x.shape, dim))

    return jax.tree.map(one, axes_tree, tree, is_leaf=is_axes)
