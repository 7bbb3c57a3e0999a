"""Pipeline executor: one scan over the ticks of a table, for any schedule.

For use in a `shard_map` in which pipeline, data and fsdp are manual. In a tick each rank does the
operation in its column of the table, then sends the result to its neighbours. The operation depends
on data: each of F, R, B, W and X is a loop of zero or one trips (`when`).

Buffers, in slots by the table's names: `inbox`, received and not read yet; `input`, from which R
recomputes; and for each layer of a chunk the arrays of `split`: `residual_b` from F to B,
`residual_w` from F to W, `cotangent` from B to W. With several segments in a micro-batch `memory`
and `memory_gradient` (`segments.py`). For models with several stacks, or layers with
shared arrays, `received` is the input stream of a chunk's forward pass, from F to W.

Messages are the union of all stacks' streams, with zeros for arrays that a stage's stack lacks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.batch import Batch
from jaxscale.models.protocol import (
    Model,
    Stream,
    Sums,
    enter_gradients,
    head_gradients,
    head_params,
    return_borrowed,
    split_stream,
)
from jaxscale.ops.array_stack import Index, add, add_rows, at, put
from jaxscale.pipeline.rank import Chunks, Columns, Rank, Row, State, when
from jaxscale.pipeline.segments import GRADIENT, MEMORY
from jaxscale.pipeline.stack_part import Remat, StackPart
from jaxscale.pipeline.stages import (
    EMBEDDING,
    GATHER,
    HEAD,
    OPERATIONS,
    REDUCE,
    PipelineStages,
)
from jaxscale.pipeline_schedules.operations import B, F, R, W, X
from jaxscale.sharding.zero import Zero

Tree = Any


def execute(
    model: Model,
    remat: Remat,
    zero: Zero,
    stages: PipelineStages,
    params: Tree,
    batches: Batch,
    columns: Columns,
    chunks: Chunks,
    *,
    row_major: bool = False,
) -> tuple[Sums, Tree]:
    """Runs a step's table: this rank's sums and gradients, summed over micro-batches, not ranks.

    Args:
      remat: applies the remat policy to a layer.
      params: of this rank, with layers in the order of `stages.layer_of_row`.
      batches: fields [micro-batches, batch, time].
      columns: of `stages.program`, [ticks, 1, 1] each.
      chunks: of `stages`, [1, chunks] each.
      row_major: whether buffers are constrained to row-major layout, for TPUs.
    """
    rank = Rank.of(model, zero, stages, params, batches, chunks, remat=remat, row_major=row_major)
    state = _run(rank, rank.initial_state(rank.accumulators(params)), columns)
    if state.pending is not None and rank.has_one_chunk:
        # After the last tick: one reduction a step. In the ticks, XLA for TPUs moved the reduction
        # out of the loops and carried two more sets of whole gradients through them (llama2_7b,
        # 1F1B on v5p: 31.0 GB of temporaries in place of 22.8). On GPUs a loop with a collective
        # cannot be in a CUDA graph, so that the host would read its condition in every tick.
        for part in rank.parts:
            state = _reduce(rank, state, 0, part)
    outer_grads = return_borrowed(model, state.grads["embed"], state.grads["head"])
    return state.sums, {**state.grads, **outer_grads}


def execute_forward(
    model: Model,
    zero: Zero,
    stages: PipelineStages,
    params: Tree,
    batches: Batch,
    columns: Columns,
    chunks: Chunks,
) -> Sums:
    """This rank's sums from forward passes only; arguments as in `execute`, with `columns` of
    `stages.forward_program`."""
    rank = Rank.of(model, zero, stages, params, batches, chunks)
    return _run(rank, rank.initial_state({}), columns).sums


def buffers(
    model: Model,
    remat: Remat,
    zero: Zero,
    stages: PipelineStages,
    params: Tree,
    batches: Batch,
    chunks: Chunks,
) -> dict[str, Tree]:
    """Empty buffers and accumulators of a rank, for their sizes."""
    rank = Rank.of(model, zero, stages, params, batches, chunks, remat=remat)
    state = rank.initial_state(rank.accumulators(params))
    weights = rank.only_chunk or state.weights
    return {**state.buffers, "weights": weights, "gradients": (state.pending, state.grads)}


def _run(rank: Rank, state: State, columns: Columns) -> State:
    """Scans over all ticks."""
    rows = {name: jnp.asarray(column).reshape(-1) for name, column in columns.items()}
    return jax.lax.scan(lambda state, row: (_tick(rank, state, row), None), state, rows)[0]


def _tick(rank: Rank, state: State, row: Row) -> State:
    """One tick: gather, operation, reduction, messages."""
    # Operations that the table lacks are not traced: every loop's condition is evaluated in every
    # tick, on GPUs without CUDA graphs by the host, which waits for the device.
    kinds = np.unique(rank.program.columns["kind"])
    operations = {
        F: functools.partial(_forward, rank),
        R: functools.partial(_recompute, rank),
        B: functools.partial(_input_gradient, rank),
        W: functools.partial(_weight_gradient, rank),
        X: functools.partial(_backward, rank),
    }
    if state.weights is not None:
        for part in rank.parts:
            gathers = rank.is_here(row, part, row["gather"] == 1)
            state = when(
                gathers,
                lambda s, p=part: _in_order(_gather(rank, s, row, p), row["gather"] == 1),
                state,
                rank.scope(GATHER, part),
            )
    for kind, operation in operations.items():
        if kind in kinds:
            mine = row["kind"] == kind
            state = when(mine, lambda s, run=operation: run(s, row), state, OPERATIONS[kind])
    if state.pending is not None and not rank.has_one_chunk:
        for part in rank.parts:
            reduces = rank.is_here(row, part, row["reduce"] == 1)
            begin = rank.first_row(row)
            state = when(
                reduces,
                lambda s, p=part, b=begin: _in_order(_reduce(rank, s, b, p), row["reduce"] == 1),
                state,
                rank.scope(REDUCE, part),
            )
    return _pass_on(rank, state, row)


def _forward(rank: Rank, state: State, row: Row) -> State:
    received = at(state.buffers["inbox"], row["inbox"])
    stream = rank.entered(received, row)
    if R in rank.program.columns["kind"]:
        # An F that saves residuals is an R without an `input` in the table (`make_program`).
        return _chunk_forward(rank, state, row, received, stream, saves_residuals=False)
    state = _chunk_forward(rank, state, row, received, stream, saves_residuals=True)
    return state if state.grads else _add_losses(rank, state, row)


def _add_losses(rank: Rank, state: State, row: Row) -> State:
    """Adds the losses in the last stage's F, for evaluation."""
    batch, last = rank.batch_of(row), rank.stages.table.order.stages - 1

    def losses(sums: Sums) -> Sums:
        found = rank.model.loss(rank.head, rank.own_stream(rank.parts[-1], state.made), batch)
        return {**sums, **add({name: sums[name] for name in found}, found)}

    return state._replace(sums=when(row["stage"] == last, losses, state.sums, HEAD))


def _recompute(rank: Rank, state: State, row: Row) -> State:
    """R: recomputes from the input saved by F; without an `input`, an F that saves residuals."""
    kept = at(state.buffers["input"], row["input"])
    columns, first = rank.program.columns, row["input"] < 0
    some_save = ((columns["kind"] == R) & (columns["input"] < 0)).any()

    def begin() -> Stream:
        received = at(state.buffers["inbox"], row["inbox"])
        return received if rank.keeps_received else rank.entered(received, row)

    received = jax.lax.cond(first, begin, lambda: kept) if some_save else kept
    stream = rank.entered(received, row) if rank.keeps_received else received
    return _chunk_forward(rank, state, row, received, stream, saves_residuals=True, again=~first)


def _input_gradient(rank: Rank, state: State, row: Row) -> State:
    return _chunk_backward(rank, state, row, fused=False)


def _backward(rank: Rank, state: State, row: Row) -> State:
    return _chunk_backward(rank, state, row, fused=True)


def _weight_gradient(rank: Rank, state: State, row: Row) -> State:
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

        state = rank.each_layer(row, part, one, state)
    # W is the only operation that does not write the message itself.
    return _in_order(state, row["kind"] == W)


def _in_order(state: State, is_running: jax.Array) -> State:
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


def _gather(rank: Rank, state: State, row: Row, part: StackPart) -> State:
    weights = {**state.weights, part.name: rank.chunk_weights(part, rank.first_row(row))}
    return state._replace(weights=weights)


def _reduce(rank: Rank, state: State, begin: Index, part: StackPart) -> State:
    """Reduces the gradients of the chunk with first row `begin` in its stack."""
    pending, name = state.pending[part.name], part.name
    shards = rank.zero.reduce(pending, rank.zero.axes[name])
    grads = {**state.grads, name: add_rows(state.grads[name], begin, shards)}
    zeros = jax.tree.map(jnp.zeros_like, pending)
    return state._replace(grads=grads, pending={**state.pending, name: zeros})


def _pass_on(rank: Rank, state: State, row: Row) -> State:
    """Sends the tick's result to both neighbours, which store it in the slots of their table."""
    columns, inbox = rank.program.columns, state.buffers["inbox"]
    ranks, nowhere = columns["kind"].shape[1], rank.program.slots["inbox"]
    for name, hop in (("from_left", 1), ("from_right", -1), ("from_self", 0)):
        receivers = np.flatnonzero((columns[name] != nowhere).any(axis=(0, 2)))
        if not len(receivers):
            continue
        # Only pairs that the table uses at all: 1F1B has no message from the last rank to the
        # first. Unused messages of a tick go to the slot after the last, without a branch.
        pairs = [((r - hop) % ranks, r) for r in receivers.tolist()]
        received = jax.lax.ppermute(state.made, "pipeline", pairs) if hop else state.made
        inbox = put(inbox, received, row[name])
    return state._replace(buffers={**state.buffers, "inbox": inbox})


def _chunk_forward(
    rank: Rank,
    state: State,
    row: Row,
    received: Stream,
    stream: Stream,
    saves_residuals: bool,
    again: jax.Array | bool = False,
) -> State:
    """Forward pass of a chunk.

    Args:
      stream: the input of its layers.
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

        def one(index, kind, carry, part=part, shared=shared):
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

        state, x = rank.each_layer(row, part, one, (state, x))
        stream = {**stream, **x}
    return state._replace(made=stream)


def _chunk_backward(rank: Rank, state: State, row: Row, fused: bool) -> State:
    """Backward pass of a chunk from the gradient in the inbox. In the last stage the inbox has the
    output of the stage's forward pass, from which the head computes loss and gradient."""
    batch, last = rank.batch_of(row), rank.stages.table.order.stages - 1

    def head_pass(carry):
        stream, sums, grads = carry
        losses, dhead, dstream = head_gradients(
            rank.model, rank.zero.widen(rank.head), rank.own_stream(rank.parts[-1], stream), batch
        )
        dhead = rank.zero.reduce(dhead, head_params(rank.model, rank.zero.axes))
        added = add({name: sums[name] for name in losses}, losses)
        return rank.full_stream(dstream), {**sums, **added}, add(grads, dhead)

    inbox = at(state.buffers["inbox"], row["inbox"])
    # The head's forward pass is in B, too: loss and gradients are computed in one pass over the
    # logits (`ops.loss`).
    dstream, sums, head = when(
        row["stage"] == last, head_pass, (inbox, state.sums, state.grads["head"]), HEAD
    )
    state = state._replace(sums=sums, grads={**state.grads, "head": head})
    shared = rank.shared(state, row)
    latest = row["segment"] == rank.stages.table.order.sequence_chunks - 1
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
        state, dx, dshared = rank.each_layer(row, part, one, carry, downward=True)
        dstream = rank.cast_stream({**dstream, **dx, **dshared})
    return _enter_backward(rank, state, row, dstream)


def _enter_backward(rank: Rank, state: State, row: Row, dstream: Stream) -> State:
    """Backward pass of `Stack.enter`, in a stack's first stage."""
    batch, dembed = rank.batch_of(row), state.grads["embed"]
    for part in rank.parts:

        def entering(carry, part=part):
            grads, dstream = carry
            before = {}
            if part.number:
                received = at(state.buffers["received"], row["residual_w"])
                before = rank.own_stream(rank.parts[part.number - 1], received)
            own = rank.own_stream(part, dstream)
            widened = rank.zero.widen(rank.embed)
            more, dbefore = enter_gradients(part.stack, widened, before, batch, own)
            grads = add(grads, rank.zero.reduce(more, rank.zero.axes["embed"]))
            return grads, rank.full_stream(dbefore) if part.number else dstream

        begins = row["stage"] == rank.stages.first_stage(part.number)
        if part.number:
            dembed, dstream = when(begins, entering, (dembed, dstream), EMBEDDING)
        else:
            dembed = when(begins, lambda g, d=dstream, e=entering: e((g, d))[0], dembed, EMBEDDING)
    return state._replace(made=dstream, grads={**state.grads, "embed": dembed})
