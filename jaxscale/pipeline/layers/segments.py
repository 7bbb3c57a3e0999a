"""Segments of a micro-batch's sequences (Seq1F1B, arXiv 2406.03488), and a stage's memory: what its
layers leave to later segments (`Stack.memory`).

Both passes read and write a memory: the forward pass adds a segment's entries, the backward pass
takes the gradients that later segments have left to them, and leaves those of earlier ones.
"""

import jax
import jax.numpy as jnp

from jaxscale.batch import Batch, Within
from jaxscale.models.protocol import Stack
from jaxscale.ops.array_stack import FROM_ZERO

BY_TOKEN = ("tokens", "targets", "segments", "positions", "weights", "extras")
"""The fields of a batch with an entry for each token."""


def segment_of(batch: Batch, segment: jax.Array | int, count: int, ranks: int = 1) -> Batch:
    """One of `count` segments of whole rows, all of one length.

    Args:
      ranks: of context, which have their parts of all segments in order.
    """
    if count == 1:
        return batch

    def part(x: jax.Array) -> jax.Array:
        by_rank = x.reshape(x.shape[0], ranks, count, -1)
        found = jax.lax.dynamic_index_in_dim(by_rank, segment, 2, keepdims=False, **FROM_ZERO)
        return found.reshape(x.shape[0], -1)

    begin = jnp.asarray(segment * (batch.tokens.shape[1] // count), jnp.int32)
    fields = {name: jax.tree.map(part, getattr(batch, name)) for name in BY_TOKEN}
    return batch._replace(**fields, within=Within(begin, batch.segments))


def memory_shapes(stack: Stack, batch: Batch, count: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A layer's memory of whole rows; {} for one segment.

    Raises:
      ValueError: the stack's layers have no memory.
    """
    if count == 1:
        return {}
    memory = stack.memory()
    if not memory:
        raise ValueError(
            f"layout.sequence_chunks = {count}: the layers of stack {stack.name!r} declare no "
            "memory of earlier tokens (Stack.memory), without which sequences cannot be split; "
            "set layout.sequence_chunks = 1"
        )
    rows = batch.tokens.shape
    return {n: jax.ShapeDtypeStruct((*rows, *x.shape), x.dtype) for n, x in memory.items()}
