"""Forward pass of a model without gradients, for evaluation and notebooks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.batch import Batch
from jaxscale.models.protocol import (
    Model,
    Params,
    Stack,
    Stream,
    layer_functions,
    split_stream,
)
from jaxscale.ops.array_stack import Index, at
from jaxscale.ops.storage.quantised_storage import unpack_weights

Gather = Callable[[Params, str], Params]
"""(shards, part) -> weights; `part` is "embed", or a stack's name with the shards of one layer."""


def forward(
    model: Model, params: Params, batch: Batch, gather: Gather = lambda shards, part: shards
) -> Stream:
    """The last stack's stream of one micro-batch."""
    embed, stream = gather(params["embed"], "embed"), {}
    for stack in model.stacks:
        stream = apply_stack(stack, embed, params[stack.name], stream, batch, gather)
    return stream


def apply_stack(
    stack: Stack,
    embed: Params,
    layers: Params,
    stream: Stream,
    batch: Batch,
    gather: Gather = lambda shards, part: shards,
) -> Stream:
    """Applies a stack to the stream of the stack before it ({} for the first).

    Args:
      embed: gathered.
      layers: the shards of the stack's layers.
    """
    x, shared = split_stream(stack, stack.enter(embed, stream, batch))
    batch = batch._replace(vectors=())  # as in training: only `enter` has them
    functions = layer_functions(stack)

    def one(x: Stream, layer: tuple[Params, Index], kind: int) -> Stream:
        shards, index = layer
        weights = unpack_weights(gather(shards, stack.name), stack.stored)
        return functions[kind](weights, x, shared, (batch, index))[0][0]

    x = scan_periods(one, x, (layers, jnp.arange(stack.num_layers)), stack.period)
    return {**x, **shared}


def scan_periods(
    function: Callable[[Any, Any, int], Any], carry: Any, layers: Any, period: int
) -> Any:
    """Scan over stacked layers: `carry = function(carry, layer, kind)` with kind = index % period.

    The scan's body is one period; layers after the last whole period follow unrolled.
    """

    def one_layer(carry: Any, layer: Any) -> tuple[Any, None]:
        return function(carry, layer, 0), None

    if period == 1:
        return jax.lax.scan(one_layer, carry, layers)[0]
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    whole = num_layers - num_layers % period

    def one_period(carry: Any, layers: Any) -> tuple[Any, None]:
        for kind in range(period):
            carry = function(carry, at(layers, kind), kind)
        return carry, None

    periods = jax.tree.map(lambda x: x[:whole].reshape(-1, period, *x.shape[1:]), layers)
    carry, _ = jax.lax.scan(one_period, carry, periods)
    for index in range(whole, num_layers):
        carry = function(carry, at(layers, index), index % period)
    return carry
