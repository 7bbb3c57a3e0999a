"""Bytes of a layout on a device, as its arrays and the traced step tell; without the planner."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxscale.batch import Batch
from jaxscale.config.layout import RematPolicy
from jaxscale.models.decoder import plain_kernels
from jaxscale.models.protocol import Model, layer_function
from jaxscale.ops.attention.attention import attention
from jaxscale.ops.split_vjp import split_vjp
from jaxscale.sharding.resolve import resolve
from jaxscale.sharding.rules import Axes, Rules
from jaxscale.training.engine import Engine
from jaxscale.training.remat import rematerialised, rematerialised_attention
from jaxscale.training.state_placement import state_bytes
from jaxscale.training.tracing.abstract_model import (
    example,
    find_model,
    gathered_params,
    layer_arguments,
)


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
    # Of one device, with attention that does not save its scores, as every kernel's.
    attend = functools.partial(attention, implementation="blockwise")
    kernels = dataclasses.replace(plain_kernels(), attend=attend)
    kernels = rematerialised_attention(kernels, layout.remat_policy)
    model = find_model(config.model)(config.model, kernels)
    one, policy = example(config, model), layout.remat_policy
    saved = _saved_bytes(model, one, policy)
    if policy.kind != "none":  # a layer at work has what it recomputes, too
        everything = _saved_bytes(model, one, RematPolicy("none", ()))
        saved += (everything - saved) / sum(stack.num_layers for stack in model.stacks)
    passes = 1 if layout.accumulation == "layered" else layout.microbatches
    ranks = layout.batch_shards * layout.context * layout.tensor
    examples = config.data.global_batch_size / (ranks * passes)
    return between, grads + round(saved * examples)


def _saved_bytes(model: Model, batch: Batch, remat: RematPolicy) -> float:
    """Of all layers' residuals under a policy, for a batch of these shapes."""
    total = 0.0
    for stack, _, arguments in layer_arguments(model, gathered_params(model), batch):
        for kind in range(stack.period):
            layer = rematerialised(layer_function(stack, kind), remat)
            _, _, residuals = jax.eval_shape(split_vjp(layer)[0], *arguments)
            saved = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals))
            total += saved * len(range(kind, stack.num_layers, stack.period))
    return total


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
