"""The parts of a pass beside the layers: what enters a stack, the embedding first, and the head.

Letters: G micro-batches.
"""

from typing import Any

import jax

from jaxscale.batch import Batch
from jaxscale.models.protocol import Model, Stack, Stream, Sums, head_gradients, head_params
from jaxscale.ops.stacked import add
from jaxscale.sharding.zero import Zero
from jaxscale.training.layer_scan import each

Tree = Any


def enter(stack: Stack, embed: Tree, stream: Stream, batch: Batch) -> Stream:
    """The stream that enters a stack, [G, ...]."""
    return each(lambda _, xs: (None, stack.enter(embed, *xs)), None, (stream, batch))[1]


def enter_backward(
    stack: Stack,
    zero: Zero,
    embed: Tree,
    stream: Stream,
    batch: Batch,
    dstream: Stream,
    total: Tree,
) -> tuple[Stream, Tree]:
    """The gradients of the stream before a stack, and those of the embedding added to `total`."""

    def one(total, xs):
        stream, batch, dstream = xs
        # The forward pass of the embedding's vjp is a lookup whose result is not used: XLA drops
        # it.
        entered, pullback = jax.vjp(
            lambda embed, stream: stack.enter(embed, stream, batch),
            zero.widen(embed),
            stream,
        )
        dstream = jax.tree.map(lambda d, x: d.astype(x.dtype), dstream, entered)
        dembed, dstream = pullback(dstream)
        return add(total, dembed), dstream

    if total is None:
        total = zero.running_sum(embed, zero.axes["embed"], batch)
    total, dstream = each(one, total, (stream, batch, dstream))
    return dstream, total


def gather_head(model: Model, zero: Zero, params: Tree, embed: Tree) -> Tree:
    """The weights of the head, gathered. What it borrows from the embedding is gathered again, or
    where gathered weights are kept, taken from `embed`."""
    if zero.keeps:
        head = zero.gather(params["head"], zero.axes["head"])
        return head_params(model, {"embed": embed, "head": head})
    return zero.gather(head_params(model, params), head_params(model, zero.axes))


def head_pass(
    model: Model, zero: Zero, head: Tree, batch: Batch, stream: Stream, sums: Sums
) -> tuple[Sums, Tree, Stream]:
    """The head, forward and backward: adds the losses to `sums`; the gradients of head and
    stream."""
    axes = head_params(model, zero.axes)

    def one(carry, xs):
        sums, total = carry
        stream, batch = xs
        losses, dhead, dstream = head_gradients(model, zero.widen(head), stream, batch)
        return ({**sums, **add({n: sums[n] for n in losses}, losses)}, add(total, dhead)), dstream

    carry = sums, zero.running_sum(head, axes, batch)
    (sums, total), dstream = each(one, carry, (stream, batch))
    return sums, zero.reduce(total, axes), dstream
