"""Growth: the state of a larger model from the state of a trained one.

Layers that share weights get their own (M6-10T, arXiv 2110.03888), dense MLPs become experts
(CPM-2, arXiv 2106.10715), and layers and tokens are added. Every array is mapped by its logical
axes.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.config import Config
from jaxscale.models.protocol import Model, Stack
from jaxscale.pipeline.layer_placement import stack_of
from jaxscale.sharding.resolve import is_axes, leaf_name
from jaxscale.sharding.rules import Axes
from jaxscale.training.engine import Engine
from jaxscale.training.optimizer import moment_power
from jaxscale.training.step import TrainState

Tree = Any

BACK = ("out", "down", "out_bias", "down_bias")
"""The parameters of a layer that write into the residual stream: a layer with zeros in them returns
its input."""


class Rows(NamedTuple):
    """The layers of a stack after growth: the row before that each is copied from, and whether it
    is an additional layer."""

    source: tuple[int, ...]
    added: tuple[bool, ...]
    parts: int = 1  # layers that a shared one becomes


def unshared_config(config: Config) -> Config:
    """The config of a run after `model.unshare_at`: without shared weights and, with
    `model.unshare_clip`, with `optimizer.clip_norm` over the root of the group's size, by which the
    norm of the layers' gradients is smaller than that of their sum if they are equal."""
    model, optimizer = config.model, config.optimizer
    if model.unshare_clip:
        limit = optimizer.clip_norm / math.sqrt(model.share_layers)
        optimizer = dataclasses.replace(optimizer, clip_norm=limit)
    return dataclasses.replace(config, model=model.unshared(), optimizer=optimizer)


def grow_state(
    before: Engine, after: Engine, state: TrainState, new: dict[str, jax.Array] | None = None
) -> TrainState:
    """The state of the larger model, in its run's form; donates `state`.

    Moments: where a layer of a group of g gets its own weights, its first moments are the group's
    over g and the second over g squared, since the group's gradient was the sum of its layers'.
    Additional layers and experts have first moments of zero and the second moments of what they are
    copied from, so that their first updates are no larger than usual. Other new parameters and
    tokens have zeros. Counts are kept.

    Each array is made in its final sharding, one at a time.

    Args:
      new: parameters that the smaller model has no like of, by name.

    Raises:
      ValueError: an array cannot be grown to its new shape.
    """
    canonical = before.placement.to_canonical(state, donate=True)
    leaves = jax.tree_util.tree_leaves_with_path(canonical)
    found = {leaf_name(path): leaf for path, leaf in leaves}
    names = jax.tree.leaves(before.placement.axes, is_leaf=is_axes)
    axes = dict(zip(found, names, strict=True))
    rows, params = stack_rows(before.model, after.model), after.abstract_state.params
    given = new or {}

    def one(path: tuple, like: Any, names: Axes) -> jax.Array:
        name, power = leaf_name(path), moment_power(path, params)
        if name not in found and name.removeprefix("params/") in given:
            return jax.device_put(given[name.removeprefix("params/")], like.sharding)
        if name not in found:
            return jnp.zeros(like.shape, like.dtype, device=like.sharding)
        array, of = found[name], axes[name]
        stack = rows[stack_of(path, rows)] if "layers" in names else None
        if array.shape == like.shape and not (stack and any(stack.added)):
            return array
        zeroed = name.rsplit("/", 1)[-1] in BACK and not power
        made = _grown(name, array, of, names, stack, power, zeroed, like)
        made.block_until_ready()  # JAX allocates results at dispatch
        array.delete()
        return made

    wanted = after.placement.canonical
    state = jax.tree_util.tree_map_with_path(one, wanted, after.placement.axes)
    return after.placement.from_canonical(state, donate=True)


def stack_rows(before: Model, after: Model) -> dict[str, Rows]:
    """How the layers of each stack follow from those before; additional layers are spread evenly,
    each a copy of the layer before it.

    Raises:
      ValueError: a stack is not in the smaller model, or has fewer layers.
    """
    smaller = {stack.name: stack for stack in before.stacks}
    return {stack.name: _rows(stack, smaller.get(stack.name)) for stack in after.stacks}


def _rows(stack: Stack, before: Stack | None) -> Rows:
    if before is None:
        raise ValueError(
            f"the larger model has the stack {stack.name!r}, which the run lacks; leave "
            "model.dense_layers, model.expert_pattern and model.prediction_depth as they are"
        )
    layers, had = (one.num_layers * one.model_layers for one in (stack, before))
    if layers < had:
        raise ValueError(f"the stack {stack.name!r} would have {layers} layers, and has {had}")
    count = stack.num_layers
    source = np.arange(count) * before.num_layers // count
    if layers == had:
        parts = before.model_layers // stack.model_layers
        return Rows(tuple(source.tolist()), (False,) * count, parts)
    if stack.repeats * before.repeats > 1:
        raise ValueError(
            f"the stack {stack.name!r} would have {layers} layers in place of {had}, and layers "
            "that share weights; first grow with model.share_layers=1"
        )
    added = np.diff(source, prepend=-1) == 0
    return Rows(tuple(source.tolist()), tuple(added.tolist()))


def _grown(
    name: str,
    array: jax.Array,
    names: Axes,
    wanted: Axes,
    rows: Rows | None,
    power: int,
    zeroed: bool,
    like: Any,
) -> jax.Array:
    """One array of the larger state.

    Args:
      names, wanted: logical axes before and after.
      rows: of its stack.
      power: its `moment_power`.
      zeroed: whether additional layers have zeros in it.
    """
    experts = "experts" in wanted and "experts" not in names

    @functools.partial(jax.jit, out_shardings=like.sharding)
    def grow(x: jax.Array) -> jax.Array:
        if rows is not None:
            dim = names.index("layers")
            x = jnp.take(x, np.array(rows.source), axis=dim)
            if any(rows.added) and (zeroed or power == 1):
                kept = ~np.array(rows.added).reshape(-1, *(1,) * (x.ndim - 1 - dim))
                x = jnp.where(kept, x, jnp.zeros((), x.dtype))
            if power and rows.parts > 1:
                x = (x * float(rows.parts) ** -power).astype(x.dtype)
        if experts:
            x = jnp.expand_dims(x, wanted.index("experts"))
            x = jnp.zeros_like(x) if power == 1 else x
            x = jnp.broadcast_to(x, like.shape)
        if "vocab" in names:
            more = [max(0, new - old) for old, new in zip(x.shape, like.shape, strict=True)]
            x = jnp.pad(x, [(0, n if name == "vocab" else 0) for name, n in zip(names, more)])
        return x.astype(like.dtype)

    if jax.eval_shape(grow, array).shape != like.shape:
        raise ValueError(
            f"{name} has the shape {array.shape}, and would have {like.shape}, which is no growth "
            "of layers, experts or tokens; change model.num_layers, model.share_layers, "
            "model.num_experts or model.vocab_size only"
        )
    return grow(array)
