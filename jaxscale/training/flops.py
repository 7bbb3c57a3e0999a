"""FLOPs of a step for each token, the numerators of MFU and HFU; and the bytes that the traced
program of a model of one's own saves for its backward pass."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params  # pyright: ignore[reportPrivateImportUsage]

from jaxscale.batch import Batch
from jaxscale.config import Config
from jaxscale.config.layout import RematPolicy
from jaxscale.models.decoder import plain_kernels
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import Model, Stack, head_params, layer_function, split_stream
from jaxscale.ops.experts.dispatch import Dispatch
from jaxscale.ops.split_vjp import split_vjp
from jaxscale.sharding.resolve import weights_in_use
from jaxscale.training.remat import rematerialised

Tree = Any


class StepFlops(NamedTuple):
    """FLOPs of a token, forward and backward."""

    model: float  # what the model needs
    hardware: float  # with what is recomputed


class ForwardCost(NamedTuple):
    """What the forward pass of one example costs and saves."""

    layers: float  # FLOPs of all stacks
    head: float  # FLOPs
    recomputed: float  # FLOPs that the backward pass repeats, under a remat policy
    saved_bytes: float  # residuals of all layers, under that policy


def counted_kernels() -> Kernels:
    """Plain kernels in whose trace every matmul can be counted: those of experts are no loop over
    as many blocks of rows as there turn out to be."""
    return dataclasses.replace(plain_kernels(), dispatch=Dispatch(matmul="ragged_dot"))


def step_flops(config: Config, model: Model, recomputed: float = 0.0) -> StepFlops:
    """The FLOPs of a token in a step: by `ModelConfig`'s formulas, or as counted in the traced
    program of a model of one's own, where attention counts all keys, masked or not.

    Args:
      model: with `counted_kernels`, under `rematerialised_attention`.
      recomputed: in a pipeline whose schedule has recompute operations, the share of passes that
        are recomputed.
    """
    settings, seq_len = config.model, config.data.seq_len
    if settings.has_flops_formula:
        hardware = settings.hardware_flops_per_token(
            seq_len, remat=config.layout.remat, recomputed=recomputed
        )
        return StepFlops(settings.flops_per_token(seq_len), hardware)
    counted = forward_cost(model, example(config, model), config.layout.remat_policy)
    needed = 3 * (counted.layers + counted.head)
    repeated = recomputed * counted.layers if recomputed else counted.recomputed
    tokens = config.data.tokens_per_step / config.data.global_batch_size
    return StepFlops(needed / tokens, (needed + repeated) / tokens)


def example(config: Config, model: Model) -> Batch:
    """The shapes of one example of a run."""
    return example_of(model, config.data.seq_len, config.data.output_len)


def example_of(model: Model, seq_len: int, output_len: int) -> Batch:
    """The shapes of one example.

    Args:
      seq_len: tokens of a sequence; of an encoder's, where there is one.
      output_len: tokens that are predicted.
    """
    ints = jax.ShapeDtypeStruct((1, output_len), np.int32)
    floats = jax.ShapeDtypeStruct((1, output_len), np.float32)
    extras = {
        name: jax.ShapeDtypeStruct((1, length), dtype)
        for name, (length, dtype) in model.extras(seq_len).items()
    }
    return Batch(ints, ints, ints, ints, floats, extras or ())


def forward_cost(model: Model, batch: Batch, remat: RematPolicy) -> ForwardCost:
    """Counts the matmuls and the residuals of a model for a batch of these shapes."""
    params, layers, repeated, saved = gathered_params(model), 0.0, 0.0, 0.0
    stream: Tree = {}
    for stack, stream, arguments in layer_arguments(model, params, batch):  # noqa: B007
        for kind in range(stack.period):
            share = len(range(kind, stack.num_layers, stack.period))
            forward, again, kept = _layer_cost(stack, kind, arguments, remat)
            layers, repeated = layers + share * forward, repeated + share * again
            saved += share * kept
    head = count_flops(model.loss, head_params(model, params), stream, batch)
    return ForwardCost(layers, head, repeated, saved)


def gathered_params(model: Model) -> Tree:
    """The shapes of a model's parameters as layers read them, in the compute type."""
    return jax.eval_shape(
        lambda: weights_in_use(
            model.axes, model.init(jax.random.key(0)), model.settings.compute_dtype
        )
    )


def layer_arguments(
    model: Model, params: Tree, batch: Batch
) -> Iterator[tuple[Stack, Tree, tuple[Tree, Tree, Tree, Tree]]]:
    """Each stack, the shapes of its stream, and of the arguments of its `layer_function`."""
    stream, context = {}, (batch, jax.ShapeDtypeStruct((), np.int32))
    for stack in model.stacks:
        stream = jax.eval_shape(stack.enter, params["embed"], stream, batch)
        weights = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params[stack.name]
        )
        yield stack, stream, (weights, *split_stream(stack, stream), context)


def _layer_cost(
    stack: Stack, kind: int, arguments: tuple[Tree, Tree, Tree, Tree], remat: RematPolicy
) -> tuple[float, float, float]:
    """FLOPs of a layer's forward pass, those that its backward pass repeats, and the bytes that it
    reads."""
    layer = layer_function(stack, kind)

    def both(function, weights, x, shared, context):
        forward, backward = split_vjp(function)
        (y, loss), _, residuals = forward(weights, x, shared, context)
        return backward(weights, shared, context, residuals, (y, loss))

    saving, forward = rematerialised(layer, remat), count_flops(layer, *arguments)
    _, _, residuals = jax.eval_shape(split_vjp(saving)[0], *arguments)
    saved = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals))
    if remat.kind == "none":
        return forward, 0.0, float(saved)
    under = count_flops(functools.partial(both, saving), *arguments)
    if remat.kind == "save_all_but_attention":
        # The layer itself repeats its attention: without, two gradients of every matmul.
        plain = 3 * forward
    else:
        plain = count_flops(functools.partial(both, layer), *arguments)
    return forward, under - plain, float(saved)


def count_flops(function: Any, *arguments: Tree) -> float:
    """Two per multiply-add of every matmul in a traced function. Bodies of scans count as often as
    they run, those of other loops once."""
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr: Any) -> float:
    return sum(map(_equation_flops, jaxpr.eqns))


def _equation_flops(eqn: Any) -> float:
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        inner = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
        return 2.0 * inner * math.prod(eqn.outvars[0].aval.shape)
    if eqn.primitive.name == "ragged_dot_general":  # of groups of rows: each row has one matrix
        return 2.0 * eqn.invars[0].aval.size * eqn.outvars[0].aval.shape[-1]
    inside = [_count(getattr(one, "jaxpr", one)) for one in jaxprs_in_params(eqn.params)]
    if eqn.primitive.name == "cond":
        return max(inside, default=0.0)
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    return times * sum(inside)
