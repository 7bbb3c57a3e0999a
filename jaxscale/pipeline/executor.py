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
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.batch import Batch
from jaxscale.models.protocol import (
    Model,
    Remat,
    Stream,
    Sums,
    head_params,
    return_borrowed,
)
from jaxscale.ops.array_stack import Index, add_rows, after, at, put, put_rows
from jaxscale.pipeline.buffer_slots import of_part
from jaxscale.pipeline.layers.mirror import fold_mirror
from jaxscale.pipeline.layers.stack_part import StackPart
from jaxscale.pipeline.passes.chunk import (
    chunk_backward,
    rewrite_message,
    run_backward,
    run_forward,
    run_input_gradient,
    run_recompute,
    run_weight_gradient,
)
from jaxscale.pipeline.passes.layer_loops import each_pair
from jaxscale.pipeline.passes.sliced_head import run_sliced_heads
from jaxscale.pipeline.rank import Chunks, Columns, Rank, Row, State, repeat, when
from jaxscale.pipeline.stages import (
    GATHER,
    OPERATIONS,
    PAIR,
    REDUCE,
    PipelineStages,
)
from jaxscale.pipeline_schedules.operations import NOP, B, F, R, W, X
from jaxscale.sharding.head_slices import finish_slices
from jaxscale.sharding.zero import Zero

Tree = Any
READ = ("inbox", "input", "residual_b", "residual_w", "cotangent")
"""The columns with the slots that operations read."""


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
    offload: bool = False,
) -> tuple[Sums, Tree, Tree]:
    """Runs a step's table: this rank's sums, gradients summed over micro-batches and ranks, and the
    gradients of `batches.vectors`.

    Args:
      remat: applies the remat policy to a layer.
      params: of this rank, with layers in the order of `stages.layer_of_row`.
      batches: fields [micro-batches, batch, time].
      columns: of `stages`, [ticks, 1, lanes] each.
      chunks: of `stages`, [1, chunks] each.
      row_major: whether buffers are constrained to row-major layout, for TPUs.
      offload: whether `residual_b` and `residual_w` are in host memory (`Rank.on_host`).
    """
    rank = Rank.of(
        model,
        zero,
        stages,
        params,
        batches,
        chunks,
        remat=remat,
        row_major=row_major,
        offload=offload,
    )
    state = _run(rank, rank.initial_state(rank.accumulators(params)), columns)
    if state.pending is not None and stages.has_one_chunk:
        # After the last tick: one reduction a step. In the ticks, XLA for TPUs moved the reduction
        # out of the loops and carried two more sets of whole gradients through them (llama2_7b,
        # 1F1B on v5p: 31.0 GB of temporaries in place of 22.8). On GPUs a loop with a collective
        # cannot be in a CUDA graph, so that the host would read its condition in every tick.
        for part in rank.parts:
            state = _reduce(rank, state, 0, part)
    grads = dict(state.grads)
    # Only a stack's first stage has a part of them.
    dvectors = jax.lax.psum(grads.pop("vectors"), "pipeline")
    if stages.table.order.directions > 1:
        grads = {**grads, **fold_mirror({part.name: grads[part.name] for part in rank.parts})}
    return state.sums, _finish(rank, params, grads), dvectors


def _finish(rank: Rank, params: Tree, grads: dict[str, Tree]) -> Tree:
    """Sums gradients over ranks, and adds those of arrays that the head borrows to the
    embedding's."""
    model, zero, axes = rank.model, rank.zero, rank.zero.axes
    if not rank.stages.slices_head:
        outer_grads = return_borrowed(model, grads["embed"], grads["head"])
        return zero.finish({**grads, **outer_grads}, axes)
    others = {name: grad for name, grad in grads.items() if name != "head"}
    done = zero.finish(others, {name: axes[name] for name in others})
    head = finish_slices(zero, grads["head"], head_params(model, axes), head_params(model, params))
    return {**done, **return_borrowed(model, done["embed"], head)}


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
    found = {
        **state.buffers,
        "weights": rank.only_chunk or state.weights,
        "gradients": (state.pending, state.grads),
    }
    if stages.table.order.directions > 1:
        found["weights of two directions"] = {part.name: part.layers for part in rank.parts}
    return found


def _run(rank: Rank, state: State, columns: Columns) -> State:
    """Scans over all ticks."""
    cells = {name: jnp.squeeze(jnp.asarray(column), 1) for name, column in columns.items()}
    return jax.lax.scan(lambda state, cells: (_tick(rank, state, cells), None), state, cells)[0]


def _tick(rank: Rank, state: State, cells: Row) -> State:
    """One tick: the operation of each lane, then their messages."""
    columns = rank.program.columns
    kinds = np.moveaxis(columns["kind"], -1, 0)
    rows = [{name: cells[name][lane] for name in columns} for lane in range(len(kinds))]
    if rank.stages.slices_head and state.grads:
        state = run_sliced_heads(rank, state, cells)
    if state.made_paired is not None:
        state = _operate_jointly(rank, state, rows)
        assert state.made_paired is not None
        return _pass_on(rank, state, [state.made, state.made_paired], rows)
    messages = []
    for row, of_lane in zip(rows, kinds):
        state = _gather_chunk(rank, state, row)
        state = _operate(rank, state, row, np.unique(of_lane))
        state = _reduce_chunk(rank, state, row)
        messages.append(state.made)
    if state.made_parts is not None:  # in a schedule of one lane
        messages = [at(state.made_parts, part) for part in range(rank.stages.most_parts)]
    return _pass_on(rank, state, messages, rows)


def _operate_jointly(rank: Rank, state: State, rows: Sequence[Row]) -> State:
    """An operation, or a pair as one operation."""
    kinds = rank.program.columns["kind"]
    alone = rows[1]["kind"] == NOP
    for row in rows:
        state = _gather_chunk(rank, state, row)
    only = {**rows[0], "kind": jnp.where(alone, rows[0]["kind"], NOP)}
    state = _operate(rank, state, only, np.unique(kinds[..., 0][kinds[..., 1] == NOP]))
    for pair in rank.stages.joint_pairs:
        mine = (rows[0]["kind"] == pair[0]) & (rows[1]["kind"] == pair[1])
        state = when(
            mine,
            lambda s, p=pair: _pair(rank, s, [_tied(rank, s, row) for row in rows], p),
            state,
            PAIR,
        )
    for row in rows:
        state = _reduce_chunk(rank, state, row)
    return state


def _pair(rank: Rank, state: State, rows: Sequence[Row], kinds: tuple[int, int]) -> State:
    """A forward pass and a backward pass, of two micro-batches, in one loop over layers."""
    forward = run_recompute if kinds[0] == R else run_forward
    part, found = rank.parts[0], {}

    def around(_rank, _row, _part, one, carry):
        """In place of the forward pass's loop: the backward pass, with the loop of both."""
        before, x = carry

        def both(_rank, _row, _part, one_back, carry_back, downward):
            state, found["x"], others = each_pair(
                rank, rows, part, (one, x), (one_back, carry_back)
            )
            return state, *others

        state = chunk_backward(rank, before, rows[1], fused=kinds[1] == X, each=both)
        return state._replace(made_paired=state.made), found["x"]

    return forward(rank, state, rows[0], each=around)


def _operate(rank: Rank, state: State, row: Row, kinds: np.ndarray) -> State:
    """One operation.

    Args:
      kinds: of the lane's operations in any tick.
    """
    # Operations that the table lacks are not traced: every loop's condition is evaluated in every
    # tick, on GPUs without CUDA graphs by the host, which waits for the device.
    operations = {
        F: functools.partial(run_forward, rank),
        R: functools.partial(run_recompute, rank),
        B: functools.partial(run_input_gradient, rank),
        W: functools.partial(run_weight_gradient, rank),
        X: functools.partial(run_backward, rank),
    }
    for kind, operation in operations.items():
        if kind in kinds:
            mine = row["kind"] == kind
            trips = mine.astype(jnp.int32) * (row["parts"] if rank.stages.most_parts > 1 else 1)

            def run(state: State, trip: jax.Array, kind=kind, operation=operation) -> State:
                mine, part = _part_row(rank, row, kind, trip)
                return _keep_message(operation(state, _tied(rank, state, mine)), part)

            state = repeat(trips, run, state, OPERATIONS[kind])
    return state


def _part_row(rank: Rank, row: Row, kind: int, trip: jax.Array) -> tuple[Row, jax.Array]:
    """The row for one of the parts of its segment, and the part's number: a backward pass begins
    with the last."""
    if rank.stages.most_parts == 1:
        return row, trip
    part = row["parts"] - 1 - trip if kind in (B, X) else trip
    numbers = range(rank.stages.most_parts)
    slots = {name: jnp.stack([row[of_part(name, n)] for n in numbers])[part] for name in READ}
    return {**row, **slots, "segment": row["segment"] + part}, part


def _keep_message(state: State, part: jax.Array) -> State:
    """Keeps the message of a part of a segment until the operation has made those of all."""
    if state.made_parts is None:
        return state
    return state._replace(made_parts=put(state.made_parts, state.made, part))


def _tied(rank: Rank, state: State, row: Row) -> Row:
    """The row, with slots that depend on the message, which the operation writes.

    In a chunk of one layer nothing that W reads changes in its loop. XLA would move its matmuls out
    of the loop of zero or one trips, into every tick (jax 0.12; `zb_v`, 4 ranks: three times the
    matmuls of W).
    """
    if min(rank.stages.layers) > 1:
        return row
    tie = after(0, state.made)
    return {**row, **{name: row[name] + tie for name in READ}}


def _gather_chunk(rank: Rank, state: State, row: Row) -> State:
    """Gathers the weights of the row's chunk, if the table says so."""
    if state.weights is not None:
        for part in rank.parts:
            gathers = rank.is_here(row, part, row["gather"] == 1)
            state = when(
                gathers,
                lambda s, p=part: rewrite_message(_gather(rank, s, row, p), row["gather"] == 1),
                state,
                rank.scope(GATHER, part),
            )
    return state


def _reduce_chunk(rank: Rank, state: State, row: Row) -> State:
    """Reduces the gradients of the row's chunk, if the table says so."""
    if state.pending is not None and not rank.stages.has_one_chunk:
        for part in rank.parts:
            reduces = rank.is_here(row, part, row["reduce"] == 1)
            begin = rank.first_row(row)
            state = when(
                reduces,
                lambda s, p=part, b=begin: rewrite_message(
                    _reduce(rank, s, b, p), row["reduce"] == 1
                ),
                state,
                rank.scope(REDUCE, part),
            )
    return state


def _gather(rank: Rank, state: State, row: Row, part: StackPart) -> State:
    gathered, begin = rank.chunk_weights(part, rank.first_row(row)), rank.first_gathered(row, part)
    if not isinstance(begin, int):
        gathered = put_rows(state.weights[part.name], begin, gathered)
    return state._replace(weights={**state.weights, part.name: gathered})


def _reduce(rank: Rank, state: State, begin: Index, part: StackPart) -> State:
    """Reduces the gradients of the chunk with first row `begin` in its stack."""
    pending, name = state.pending[part.name], part.name
    shards = rank.zero.reduce(pending, rank.zero.axes[name])
    grads = {**state.grads, name: add_rows(state.grads[name], begin, shards)}
    zeros = jax.tree.map(jnp.zeros_like, pending)
    return state._replace(grads=grads, pending={**state.pending, name: zeros})


def _pass_on(rank: Rank, state: State, messages: Sequence[Stream], rows: Sequence[Row]) -> State:
    """Sends the tick's results to both neighbours, which store them in the slots of their table.

    Args:
      messages: of each lane, or of each part of a segment.
      rows: of each lane.
    """
    columns, inbox = rank.program.columns, state.buffers["inbox"]
    parts = range(rank.stages.most_parts)
    # As one array, so that the sends wait for the operations of all lanes (`rewrite_message`).
    one_lane = len(messages) == 1
    made = messages[0] if one_lane else jax.tree.map(lambda *lanes: jnp.stack(lanes), *messages)
    ranks, nowhere = columns["kind"].shape[1], rank.program.slots["inbox"]
    for name, hop in (("from_left", 1), ("from_right", -1), ("from_self", 0)):
        names = [of_part(name, part) for part in parts]
        used = np.concatenate([columns[one] for one in names], axis=-1) != nowhere
        slots = [row[one] for one in names for row in rows]
        receivers = np.flatnonzero(used.any(axis=(0, 2)))
        if not len(receivers):
            continue
        # Only pairs that the table uses at all: 1F1B has no message from the last rank to the
        # first. Unused messages of a tick go to the slot after the last, without a branch.
        pairs = [((r - hop) % ranks, r) for r in receivers.tolist()]
        received = jax.lax.ppermute(made, "pipeline", pairs) if hop else made
        for lane in np.flatnonzero(used.any(axis=(0, 1))).tolist():
            message = received if one_lane else {key: x[lane] for key, x in received.items()}
            inbox = put(inbox, message, slots[lane])
    return state._replace(buffers={**state.buffers, "inbox": inbox})
