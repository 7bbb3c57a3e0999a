"""The model's stacks on a pipeline rank: the operations of a layer, and its parameters.

For use in a `shard_map` in which pipeline, data and fsdp are manual.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.batch import Batch
from jaxscale.models.protocol import (
    Model,
    Remat,
    Stack,
    layer_functions,
    no_remat,
    split_stream,
)
from jaxscale.ops.array_stack import at
from jaxscale.ops.storage.quantised_storage import unpack_weights
from jaxscale.pipeline.backward_split import Split, forward_only, split
from jaxscale.pipeline.layers.mirror import add_mirror
from jaxscale.pipeline.layers.segments import memory_shapes, segment_of
from jaxscale.pipeline.stages import PipelineStages
from jaxscale.sharding.zero import Zero

Tree = Any
StreamShapes = dict[str, jax.ShapeDtypeStruct]


class StackPart(NamedTuple):
    """A stack of the model on one rank."""

    number: int
    stack: Stack
    kinds: tuple[Split, ...]  # the operations of a layer, for each index % period
    layers: Tree  # parameters at rest or gathered and kept, [chunks * capacity, ...]; with two
    # directions in the compute type, with the mirrored rank's after its own
    memory: Mapping[str, jax.ShapeDtypeStruct]  # of a layer, for whole rows; {} without segments

    @property
    def name(self) -> str:
        return self.stack.name


def trace_stacks(
    model: Model,
    zero: Zero,
    stages: PipelineStages,
    params: Tree,
    embed: Tree,
    batches: Batch,
    remat: Remat | None,
) -> tuple[tuple[StackPart, ...], StreamShapes]:
    """Traces a layer of each stack; also the union of their streams.

    Args:
      params: of this rank.
      embed: the embedding's, gathered.
      batches: fields [micro-batches, batch, time].
      remat: as in `Rank.of`.
    """
    count = stages.num_parts
    rows = at(batches, 0)
    first = segment_of(rows, 0, count, zero.sizes["context"])
    stream, union, parts = {}, {}, []
    for number, stack in enumerate(model.stacks):
        stream = jax.eval_shape(stack.enter, embed, stream, first)
        union = _union(union, stream)
        layers = params[stack.name]
        axes = zero.layer_axes(stack.name)
        layer = jax.eval_shape(
            lambda x, a=axes, s=stack: unpack_weights(zero.gather(at(x, 0), a), s.stored), layers
        )
        if stages.table.order.directions > 1:
            layers = add_mirror(zero, layers, zero.axes[stack.name])
        if zero.keeps:
            layers = zero.gather(layers, zero.axes[stack.name])
        context = first._replace(vectors=()), jax.ShapeDtypeStruct((), jnp.int32)
        memory = memory_shapes(stack, rows, count)
        x, shared = split_stream(stack, stream)
        kinds = tuple(
            split(one, layer, {**x, **memory}, shared, context, tuple(memory))
            if remat
            else forward_only(one)
            for one in layer_functions(stack, remat or no_remat)
        )
        _check_same_shapes(stack, kinds)
        parts.append(StackPart(number, stack, kinds, layers, memory))
    return tuple(parts), union


def _union(union: StreamShapes, stream: StreamShapes) -> StreamShapes:
    """The arrays of both streams.

    Raises:
      ValueError: arrays of one name have different shapes or types.
    """
    for name in union.keys() & stream.keys():
        one, other = union[name], stream[name]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"two stacks have an array {name!r} in their streams, {one.shape} {one.dtype} and "
                f"{other.shape} {other.dtype}; a pipeline sends both: give them different names"
            )
    return {**union, **stream}


def _check_same_shapes(stack: Stack, kinds: Sequence[Split]) -> None:
    """Refuses layers of one stack with residuals of different shapes, since they share buffers.

    Raises:
      ValueError: the shapes differ.
    """
    shapes = [(kind.residuals_b, kind.residuals_w, kind.saved) for kind in kinds]
    if any(one != shapes[0] for one in shapes):
        raise ValueError(
            f"the layers of stack {stack.name!r} save arrays of different shapes for the backward "
            "pass, which a pipeline has no buffers for; set layout.pipeline = 1, or layout.remat "
            "= 'full'"
        )
