"""Bytes of a layout on a device, as its arrays and the traced step tell; without the planner."""

import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxscale.config import Config
from jaxscale.sharding.resolve import resolve
from jaxscale.sharding.rules import Axes, Rules
from jaxscale.training.engine import Engine
from jaxscale.training.state_placement import state_bytes
from jaxscale.training.tracing.traces import model_trace, saved_values


def traced_memory(engine: Engine) -> tuple[int, int]:
    """Bytes on a device: of the state, and of what a step adds to it, roughly.

    Those are gradients, and what a pass saves for its backward pass: the buffers of a pipeline's
    executor, else the residuals of the layers, all of which tensor is taken to divide.
    """
    zero, layout, config = engine.zero, engine.layout, engine.config
    between = state_bytes(engine.abstract_state)
    rules = zero.accumulator_rules(single_visit=layout.single_visit)
    grads = gradient_bytes(engine, rules)
    if engine.stages:
        return between, grads + sum(buffer_bytes(engine).values())
    saved = _saved_bytes(config, layout.remat)
    if layout.remat != "none":  # a layer at work has what it recomputes, too
        layers = sum(stack.num_layers for stack in engine.model.stacks)
        saved += (_saved_bytes(config, "none") - saved) / layers
    passes = 1 if layout.accumulation == "layered" else layout.microbatches
    ranks = layout.batch_shards * layout.context * layout.tensor
    examples = config.data.global_batch_size / (ranks * passes)
    return between, grads + round(saved * examples)


def _saved_bytes(config: Config, remat: str) -> float:
    """What all layers save of a sequence under a policy, on one device."""
    data, layers = config.data, model_trace(config.model).stack_layers
    saved = saved_values(config.model, data.seq_len, data.output_len, remat, piped=False)
    return sum(
        layers[one.name] * value.num_bytes * (one.rows * one.length if value.per == "row" else 1)
        for one in saved.stacks
        for value in one.values
    )


def gradient_bytes(engine: Engine, rules: Rules) -> int:
    """Bytes on a device of the gradients of all parameters but frozen ones."""
    zero, params, axes = engine.zero, engine.abstract_state.params, engine.state_axes.params
    width = zero.accumulation_dtype.itemsize
    each = jax.tree.map(
        lambda x, names: leaf_bytes(x, names, rules, zero.sizes, width), params, axes
    )
    return sum(zero.trained(each, zero.frozen))


def buffer_bytes(engine: Engine) -> dict[str, int]:
    """Bytes of what a rank of a pipeline holds between ticks, by name."""
    return {name: _size(tree) for name, tree in engine.pipeline_buffers().items()}


def _size(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def tree_bytes(
    abstract: Any, axes: Any, rules: Rules, sizes: Mapping[str, int], width: int | None = None
) -> int:
    """Bytes on one device of a tree of arrays; `width` replaces the bytes of an element."""
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
    return leaf.size * (width or leaf.dtype.itemsize) // shards
