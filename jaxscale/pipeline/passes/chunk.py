"""Operations of a pipeline rank on one chunk and micro-batch: F, R, B, W and X.

Each is a function of the rank, its state and the row of the table, and returns the state, with the
message for a neighbour in `made`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.models.protocol import (
    Stream,
    Sums,
    enter_gradients,
    head_gradients,
    head_params,
    split_stream,
)
from jaxscale.ops.array_stack import add, at, put
from jaxscale.pipeline.buffer_slots import GRADIENT, MEMORY
from jaxscale.pipeline.passes.layer_loops import each_layer
from jaxscale.pipeline.rank import Rank, Row, State, when
from jaxscale.pipeline.stages import EMBEDDING, HEAD
from jaxscale.pipeline_schedules.operations import R, W

Tree = Any
Each = Callable[..., Tree]  # `each_layer`, or a loop in its place


def run_forward(rank: Rank, state: State, row: Row, each: Each = each_layer) -> State:
    received = at(state.buffers["inbox"], row["inbox"])
    stream = rank.entered(received, row)
    if R in rank.program.columns["kind"]:
        # An F that saves residuals is an R without an `input` in the table (`make_program`).
        return _chunk_forward(rank, state, row, received, stream, each, saves_residuals=False)
    state = _chunk_forward(rank, state, row, received, stream, each, saves_residuals=True)
    return state if state.grads else _add_losses(rank, state, row)


def _add_losses(rank: Rank, state: State, row: Row) -> State:
    """Adds the losses in the last stage's F, for evaluation."""
    batch, last = rank.batch_of(row), rank.stages.table.order.stages - 1

    def losses(sums: Sums) -> Sums:
        found = rank.model.loss(rank.head, rank.own_stream(rank.parts[-1], state.made), batch)
        return {**sums, **add({name: sums[name] for name in found}, found)}

    return state._replace(sums=when(row["stage"] == last, losses, state.sums, HEAD))


def run_recompute(rank: Rank, state: State, row: Row, each: Each = each_layer) -> State:
    """R: recomputes from the input saved by F; without an `input`, an F that saves residuals."""
    kept = at(state.buffers["input"], row["input"])
    columns, first = rank.program.columns, row["input"] < 0
    some_save = ((columns["kind"] == R) & (columns["input"] < 0)).any()

    def begin() -> Stream:
        received = at(state.buffers["inbox"], row["inbox"])
        return received if rank.keeps_received else rank.entered(received, row)

    received = jax.lax.cond(first, begin, lambda: kept) if some_save else kept
    stream = rank.entered(received, row) if rank.keeps_received else received
    return _chunk_forward(
        rank, state, row, received, stream, each, saves_residuals=True, again=~first
    )


def run_input_gradient(rank: Rank, state: State, row: Row) -> State:
    return chunk_backward(rank, state, row, fused=False)


def run_backward(rank: Rank, state: State, row: Row) -> State:
    return chunk_backward(rank, state, row, fused=True)


def run_weight_gradient(rank: Rank, state: State, row: Row) -> State:
    batch = rank.batch_of(row)
    shared = rank.shared(state, row)
    for part in rank.parts:

        def one(index, kind, state, part=part):
            kept, saved = (
                rank.read(state, row, name, part, index) for name in ("residual_w", "cotangent")
            )
            context = batch, rank.layer_index(row, index)
            dweights = part.kinds[kind].weight_gradient(shared[part.name], context, kept, saved)
            return rank.add_gradients(state, row, part, index, dweights)

        state = each_layer(rank, row, part, one, state)
    # W is the only operation that does not write the message itself.
    return rewrite_message(state, row["kind"] == W)


def rewrite_message(state: State, is_running: jax.Array) -> State:
    """Rewrites the message, unchanged, so that a send waits for an operation.

    The operations and sends of a tick all write or read the message, so every rank reaches their
    collectives in the same order.

    Args:
      is_running: true whenever the operation runs, which the compiler cannot know.
    """
    # XLA:CPU (jaxlib 0.12) starts a send while a loop that shares no buffer with it is running. It
    # drops an `optimization_barrier` before it schedules. Two ranks of a tensor group then paired
    # different collectives.
    made = jax.tree.map(lambda x: jnp.where(is_running, x, jnp.zeros_like(x)), state.made)
    return state._replace(made=made)


def _chunk_forward(
    rank: Rank,
    state: State,
    row: Row,
    received: Stream,
    stream: Stream,
    each: Each,
    saves_residuals: bool,
    again: jax.Array | bool = False,
) -> State:
    """Forward pass of a chunk.

    Args:
      stream: the input of its layers.
      each: the loop over its layers.
      saves_residuals: False saves the input, for R.
      again: whether this repeats a forward pass, whose sums are counted already.
    """
    batch = rank.batch_of(row)
    begins = received if rank.keeps_received else stream
    first = (row["segment"] == 0) & jnp.logical_not(again)
    if "received" in state.buffers and saves_residuals:
        kept = put(state.buffers["received"], received, row["residual_w"])
        state = state._replace(buffers={**state.buffers, "received": kept})
    for part in rank.parts:
        x, shared = split_stream(part.stack, rank.own_stream(part, stream))

        def one(index, kind, carry, row=row, part=part, shared=shared):
            state, x = carry
            context = batch, rank.layer_index(row, index)
            weights = rank.layer_weights(state, row, part, index)
            split = part.kinds[kind]
            past = rank.read_memory(state, row, MEMORY, part, index, first)
            (y, loss), sums, residuals_b, residuals_w = split.forward(
                weights, {**x, **past}, shared, context
            )
            x, past = ({name: y[name] for name in names} for names in (x, past))
            state = rank.write(state, row, MEMORY, part, index, past)
            state = rank.count_sums(state, part, context[1], loss, sums, again)
            if not saves_residuals:
                # Written in every layer: with XLA:CPU (jaxlib 0.12) a loop over layers that does
                # not write its buffers takes more than three times as long.
                inputs = put(state.buffers["input"], begins, row["input"])
                state = state._replace(buffers={**state.buffers, "input": inputs})
            else:
                state = rank.write(state, row, "residual_b", part, index, residuals_b)
                state = rank.write(state, row, "residual_w", part, index, residuals_w)
            return state, x

        state, x = each(rank, row, part, one, (state, x))
        stream = {**stream, **x}
    return state._replace(made=stream)


def chunk_backward(
    rank: Rank, state: State, row: Row, fused: bool, each: Each = each_layer
) -> State:
    """Backward pass of a chunk from the gradient in the inbox. In the last stage the inbox has the
    output of the stage's forward pass, from which the head computes loss and gradient; or, if the
    head is sliced, that gradient (`sliced_head`)."""
    batch, last = rank.batch_of(row), rank.stages.table.order.stages - 1

    def head_pass(carry):
        stream, sums, grads = carry
        losses, dhead, dstream = head_gradients(
            rank.model, rank.zero.widen(rank.head), rank.own_stream(rank.parts[-1], stream), batch
        )
        dhead = rank.zero.reduce(dhead, head_params(rank.model, rank.zero.axes))
        added = add({name: sums[name] for name in losses}, losses)
        return rank.full_stream(dstream), {**sums, **added}, add(grads, dhead)

    dstream = at(state.buffers["inbox"], row["inbox"])
    if not rank.stages.slices_head:
        # The head's forward pass is in B, too: loss and gradients are computed in one pass over
        # the logits (`ops.loss`).
        carry = dstream, state.sums, state.grads["head"]
        dstream, sums, head = when(row["stage"] == last, head_pass, carry, HEAD)
        state = state._replace(sums=sums, grads={**state.grads, "head": head})
    shared = rank.shared(state, row)
    latest = row["segment"] == rank.stages.num_parts - 1
    for part in reversed(rank.parts):

        def one(index, kind, carry, part=part):
            state, dx, dshared = carry
            weights = rank.layer_weights(state, row, part, index)
            residuals_b, residuals_w = (
                rank.read(state, row, name, part, index) for name in ("residual_b", "residual_w")
            )
            split, here = part.kinds[kind], shared[part.name]
            context = batch, rank.layer_index(row, index)
            past = rank.read(state, row, MEMORY, part, index)
            dpast = rank.read_memory(state, row, GRADIENT, part, index, latest)
            dy, more, saved = split.input_gradient(
                weights, here, context, residuals_b, residuals_w, {**dx, **dpast}, past
            )
            dx, dpast = ({name: dy[name] for name in names} for names in (dx, dpast))
            state = rank.write(state, row, GRADIENT, part, index, dpast)
            dshared = add(dshared, more)
            if not fused:
                return rank.write(state, row, "cotangent", part, index, saved), dx, dshared
            dweights = split.weight_gradient(here, context, residuals_w, saved)
            return rank.add_gradients(state, row, part, index, dweights), dx, dshared

        dx, dshared = split_stream(part.stack, rank.own_stream(part, dstream))
        carry = state, dx, rank.zero.widen(dshared)
        state, dx, dshared = each(rank, row, part, one, carry, downward=True)
        dstream = rank.cast_stream({**dstream, **dx, **dshared})
    return _enter_backward(rank, state, row, dstream)


def _enter_backward(rank: Rank, state: State, row: Row, dstream: Stream) -> State:
    """Backward pass of `Stack.enter`, in a stack's first stage."""
    batch, dembed = rank.entering_batch(row), (state.grads["embed"], state.grads["vectors"])
    for part in rank.parts:

        def entering(carry, part=part):
            (grads, dvectors), dstream = carry
            before = {}
            if part.number:
                received = at(state.buffers["received"], row["residual_w"])
                before = rank.own_stream(rank.parts[part.number - 1], received)
            own = rank.own_stream(part, dstream)
            widened = rank.zero.widen(rank.embed)
            more, dbefore, rows = enter_gradients(part.stack, widened, before, batch, own)
            grads = add(grads, rank.zero.reduce(more, rank.zero.axes["embed"]))
            rows = add(at(dvectors, row["microbatch"]), rows)
            grads = grads, put(dvectors, rows, row["microbatch"])
            return grads, rank.full_stream(dbefore) if part.number else dstream

        begins = row["stage"] == rank.stages.first_stage(part.number)
        if part.number:
            dembed, dstream = when(begins, entering, (dembed, dstream), EMBEDDING)
        else:
            dembed = when(begins, lambda g, d=dstream, e=entering: e((g, d))[0], dembed, EMBEDDING)
    grads = {**state.grads, "embed": dembed[0], "vectors": dembed[1]}
    return state._replace(made=dstream, grads=grads)
