"""Placement of a run's state: logical axes, ZeRO stage, and the sharding of every array."""

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jaxscale.config import Config
from jaxscale.config.layout import Layout
from jaxscale.sharding.host_arrays import StateArray, choose_host_arrays, most_host_bytes
from jaxscale.sharding.resolve import (
    is_axes,
    layer_rules,
    leaf_name,
    resolve,
    resolve_tree,
    spread_outer,
    whole_kv_heads,
)
from jaxscale.sharding.rules import WEIGHTS, Axes, Rules
from jaxscale.sharding.specs import replicated
from jaxscale.sharding.zero import Zero
from jaxscale.training.optimizer import owner_and_moment, state_axes
from jaxscale.training.step import TrainState
from jaxscale.training.xla_options import has_sparse_cores, waits_for_gathers

log = logging.getLogger("jaxscale")

Tree = Any


def make_zero(
    config: Config, mesh: Mesh, axes: Tree, shapes: Tree, own: Rules, frozen: Tree
) -> Zero:
    """The ZeRO stage of the layout.

    Args:
      axes, shapes: of the parameters; the axes in canonical form.
      own: mesh axes of a model's custom logical axes.
      frozen: tree of the parameters with whether each is frozen.
    """
    layout, device_kind = config.layout, mesh.devices.flat[0].device_kind
    return Zero(
        layout.zero_stage,
        layout.sizes,
        _axes_at_rest(axes, shapes, layout, _width(axes, shapes)),
        jnp.dtype(config.model.compute_dtype),
        jnp.dtype(config.optimizer.accumulation_dtype),
        {**WEIGHTS, **own},
        has_sparse_cores(device_kind),
        waits_for_gathers(device_kind),
        jnp.dtype(config.optimizer.reduced_in),
        frozen=frozen if any(jax.tree.leaves(frozen)) else None,
    )


def place_state(
    layout: Layout,
    mesh: Mesh,
    zero: Zero,
    axes: Tree,
    optimizer: optax.GradientTransformation,
    begin: Callable[[Tree], TrainState],
    params: Tree,
    place_tables: Callable[[Tree], Tree],
) -> tuple[TrainState, TrainState]:
    """The logical axes of a state, and its shapes with the shardings between steps.

    Args:
      axes: of the parameters, in canonical form.
      begin: makes the state before the first step, from parameters.
      params: the parameters' shapes.
      place_tables: shardings of `TrainState.tables`.
    """
    shapes = jax.eval_shape(begin, params)
    said = functools.partial(_replicated_state, layout.pipeline > 1)
    # Optimizers read canonical names, such as "embed".
    moments = state_axes(optimizer, params, axes, said)
    moments = _axes_at_rest(moments, shapes.opt_state, layout, _width(axes, params))
    guard, tables, noise = (
        jax.tree.map(lambda leaf: (), x) for x in (shapes.guard, shapes.tables, shapes.noise)
    )
    shardings = TrainState(
        replicated(mesh),
        resolve_tree(zero.axes, zero.state_rules, mesh, params),
        resolve_tree(moments, zero.state_rules, mesh, shapes.opt_state),
        jax.tree.map(lambda leaf: replicated(mesh), shapes.guard),
        place_tables(shapes.tables),
        jax.tree.map(lambda leaf: replicated(mesh), shapes.noise),
    )
    if layout.offloads("optimizer"):
        shardings = shardings._replace(opt_state=_on_host(shardings.opt_state, shapes.opt_state))
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    state_axes_tree = TrainState((), zero.axes, moments, guard, tables, noise)
    return state_axes_tree, _rest_on_host(layout, state, state_axes_tree)


def state_arrays(state: TrainState, axes: TrainState) -> dict[tuple, StateArray]:
    """The parameters and moments of a state, by their paths in it.

    Args:
      state: shapes and shardings.
      axes: the logical axes of every array.
    """
    names = dict(jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes))
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        part = getattr(path[0], "name", "")
        if part == "params":
            named = leaf_name(path[1:]), ""
        else:
            named = owner_and_moment(path, state.params) if part == "opt_state" else None
        if named is not None:
            size, shard = (
                math.prod(shape) * leaf.dtype.itemsize
                for shape in (leaf.shape, leaf.sharding.shard_shape(leaf.shape))
            )
            found[path] = StateArray(*named, names[path], size, shard)
    return found


def _rest_on_host(layout: Layout, state: TrainState, axes: TrainState) -> TrainState:
    """The state with the arrays of `layout.offload_bytes` in host memory.

    Raises:
      ValueError: more bytes than the arrays that can be there have.
    """
    if not layout.offload_bytes:
        return state
    arrays = state_arrays(state, axes)
    if layout.offload_bytes > (most := most_host_bytes(arrays.values())):
        raise ValueError(
            f"layout.offload_bytes = {layout.offload_bytes} is more than the {most} bytes of a "
            "device's moments and layers' weights that are matrices; set at most "
            f"layout.offload_bytes = {most}"
        )
    chosen = choose_host_arrays(arrays.values(), layout.offload_bytes)
    moved = {one for one, is_moved in chosen if is_moved}

    def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if arrays.get(path) not in moved:
            return leaf
        host = leaf.sharding.with_memory_kind("pinned_host")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host)

    return jax.tree_util.tree_map_with_path(place, state)


def state_bytes(state: TrainState) -> int:
    """Bytes of a state in a device's memory, without offloaded arrays.

    Args:
      state: shapes and shardings.
    """
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
        if x.sharding.memory_kind != "pinned_host"
    )


def apply_by_layer(
    mesh: Mesh,
    zero: Zero,
    function: Callable[[jax.Array], jax.Array],
    stack: jax.Array,
    names: Axes,
) -> jax.Array:
    """Applies a function to a stack resharded by layers, whole matrices on each rank, and reshards
    back: an all-to-all each way, instead of gathers between any two matmuls.
    """
    num_layers = stack.shape[names.index("layers")]
    at_rest = zero.state_rules
    # XLA (jax 0.12) replicates a stack whose dimension loses fsdp and expert in one step.
    partly = {**at_rest, "embed": tuple(axis for axis in at_rest["embed"] if axis != "expert")}
    steps = [at_rest, partly, *layer_rules(zero.sizes, num_layers, zero.rules)]
    path = [NamedSharding(mesh, resolve(names, one, mesh.shape)) for one in steps]
    for sharding in path:
        stack = jax.lax.with_sharding_constraint(stack, sharding)
    stack = function(stack)
    for sharding in reversed(path):
        stack = jax.lax.with_sharding_constraint(stack, sharding)
    return stack


def _axes_at_rest(axes: Tree, shapes: Tree, layout: Layout, width: int) -> Tree:
    """The axes of parameters, or of arrays that are sharded as they are, with the names that the
    layout gives to some dimensions.

    Args:
      width: a divisor of every "embed" dimension outside the layers.
    """
    return whole_kv_heads(spread_outer(axes, layout.sizes, width), shapes, layout.sizes)


def _width(axes: Tree, shapes: Tree) -> int:
    """The greatest common divisor of the parameters' "embed" dimensions outside the layers."""
    sizes = [
        leaf.shape[names.index("embed")]
        for part in ("embed", "head")
        for names, leaf in zip(
            jax.tree.leaves(axes[part], is_leaf=is_axes), jax.tree.leaves(shapes[part])
        )
        if "embed" in names
    ]
    return math.gcd(*sizes)


def _replicated_state(
    in_pipeline: bool, name: str, shape: tuple, param_shape: tuple, in_layers: bool
) -> None:
    """Logs that an array of an optimizer's state is replicated.

    Raises:
      ValueError: it may have a part for each layer, which a pipeline cannot shard.
    """
    if in_pipeline and in_layers:
        raise ValueError(
            f"the optimizer's {name} has shape {shape}, and its parameter {param_shape}: a "
            "pipeline shards only arrays of the parameter's shape by layers; set "
            "layout.pipeline = 1, or use another optimizer"
        )
    log.info(
        f"the optimizer's {name} {list(shape)} is replicated: its shape is not its parameter's, "
        f"{list(param_shape)}"
    )


def _on_host(shardings: Tree, abstract: Tree) -> Tree:
    """Shardings of the same shards in host memory; scalars are kept on the device, as the compiler
    requires."""
    return jax.tree.map(
        lambda sharding, leaf: sharding.with_memory_kind("pinned_host") if leaf.ndim else sharding,
        shardings,
        abstract,
    )
