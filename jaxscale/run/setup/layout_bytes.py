"""Bytes of a layout on a device, from its arrays and the traced step; without the planner."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.formatting import table
from jaxscale.sharding.host_arrays import choose_host_arrays
from jaxscale.sharding.resolve import resolve
from jaxscale.sharding.rules import Axes, Rules
from jaxscale.training.engine import Engine
from jaxscale.training.state_placement import state_arrays


def gradient_bytes(engine: Engine, rules: Rules) -> int:
    """Bytes on a device of the gradients of trained parameters."""
    zero, params, axes = engine.zero, engine.abstract_state.params, engine.state_axes.params
    width = zero.accumulation_dtype.itemsize
    each = jax.tree.map(
        lambda x, names: leaf_bytes(x, names, rules, zero.sizes, width), params, axes
    )
    return sum(zero.trained(each, zero.frozen))


def buffer_bytes(engine: Engine) -> dict[str, int]:
    """Buffer -> bytes that a pipeline rank keeps between ticks."""
    return {name: _size(tree) for name, tree in engine.pipeline_buffers().items()}


def _size(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def host_array_table(engine: Engine) -> list[str]:
    """The table of the arrays that `layout.offload_bytes` can move, in order; nothing without."""
    wanted, total = engine.layout.offload_bytes, 0
    if not wanted:
        return []
    rows = [("", "bytes", "sum of bytes")]
    arrays = state_arrays(engine.abstract_state, engine.state_axes).values()
    for one, is_moved in choose_host_arrays(arrays, wanted):
        total += one.device_bytes
        rows.append((one.name + " *" * is_moved, f"{one.device_bytes}", f"{total}"))
    return ["layout.offload_bytes moves to host memory\n" + table(rows)]


def tree_bytes(
    abstract: Any, axes: Any, rules: Rules, sizes: Mapping[str, int], width: int | None = None
) -> int:
    """Bytes on one device of a tree of arrays; `width` replaces the bytes of an element, unless it
    is of quantised bytes."""
    each = jax.tree.map(
        lambda leaf, axes: leaf_bytes(leaf, axes, rules, sizes, width), abstract, axes
    )
    return sum(jax.tree.leaves(each))


def leaf_bytes(
    leaf: Any, axes: Axes, rules: Rules, sizes: Mapping[str, int], width: int | None = None
) -> int:
    shards = math.prod(
        sizes[name]
        for entry in resolve(axes, rules, sizes)
        for name in (entry if isinstance(entry, tuple) else (entry,))
        if name
    )
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        width = None
    return leaf.size * (width or leaf.dtype.itemsize) // shards
