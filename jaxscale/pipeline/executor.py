"""The executor: one scan over the ticks of a table, for any schedule.

For use in a `shard_map` in which pipeline, data and fsdp are manual. In a tick each rank does the
one operation that its column of the table names, then sends the result to its neighbours. Which
operation that is depends on data: each kind is a loop of zero or one trips (`when`). A conditional
would copy the buffers that it carries, every tick; loops update them in place.

Buffers, by the table's names, in slots: `inbox`, received and not read yet; `input`, what R
recomputes from; and for each layer of a chunk the arrays of `split`: `residual_b` from F to B,
`residual_w` from F to W, `cotangent` from B to W.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout as DimensionOrder
from jax.experimental.layout import with_layout_constraint

from jaxscale.batch import Batch
from jaxscale.models.decoder import STREAM, Decoder
from jaxscale.ops.stacked import Index, add, add_rows, at, put
from jaxscale.pipeline.backward_split import Split, keep_nothing, split
from jaxscale.pipeline.buffer_slots import TickProgram
from jaxscale.pipeline.stages import (
    EMBEDDING,
    GATHER,
    HEAD,
    LAYERS,
    OPERATIONS,
    REDUCE,
    PipelineStages,
)
from jaxscale.pipeline_schedules.operations import B, F, R, W, X
from jaxscale.sharding.resolve import ACTIVATIONS, WEIGHTS, constrain, is_axes
from jaxscale.sharding.zero import Zero

Tree = Any
Sums = tuple[jax.Array, jax.Array]
Row = Mapping[str, jax.Array]  # a rank's cell of every column, int32 scalars
Columns = Mapping[str, jax.Array | np.ndarray]
Counts = jax.Array | np.ndarray


class _State(NamedTuple):
    """What a rank carries from tick to tick."""

    made: jax.Array  # the result of this tick, for the rank before or after
    buffers: dict[str, Tree]  # [slots, ...]
    weights: Tree  # of a chunk, gathered; None where nothing is to be gathered
    pending: Tree  # gradients of a chunk, not reduced yet; None where nothing is to be reduced
    grads: dict[str, Tree]  # accumulators
    sums: Sums


def execute(
    model: Decoder,
    block: Callable,
    zero: Zero,
    stages: PipelineStages,
    params: Tree,
    batches: Batch,
    columns: Columns,
    counts: Counts,
    *,
    row_major: bool = False,
) -> tuple[Sums, Tree]:
    """Runs a step's table: the loss sums of this rank, and its gradients, summed over micro-batches
    and not yet over ranks.

    Args:
      block: the model's, under a remat policy.
      params: of this rank, its layers stacked as `stages` says.
      batches: fields [micro-batches, batch, time].
      columns: of `stages.program`, [ticks, 1, 1] each.
      counts: [1, chunks], layers of this rank's chunks.
      row_major: whether to ask for buffers in the order of their dimensions; a TPU's compiler
        would choose an order for each loop, and copy the buffers from one to the other.
    """
    rank = _Rank.of(model, zero, stages, stages.program, block, params, batches, counts, row_major)
    state = rank.run(rank.begin(rank.accumulators(params)), columns)
    grads = state.grads
    outer_grads = model.outer_grads(grads["embed"], grads["head"])
    return state.sums, {**outer_grads, "layers": grads["layers"]}


def execute_forward(
    model: Decoder,
    zero: Zero,
    stages: PipelineStages,
    params: Tree,
    batches: Batch,
    columns: Columns,
    counts: Counts,
) -> Sums:
    """The loss sums of this rank, from forward passes only. The arguments are those of `execute`,
    with `columns` of `stages.forward_program`."""
    program = stages.forward_program
    rank = _Rank.of(model, zero, stages, program, None, params, batches, counts, False)
    return rank.run(rank.begin({}), columns).sums


def buffers(
    model: Decoder,
    block: Callable,
    zero: Zero,
    stages: PipelineStages,
    params: Tree,
    batches: Batch,
    counts: Counts,
) -> dict[str, Tree]:
    """The buffers and sums that a rank carries between ticks, empty: for their sizes."""
    rank = _Rank.of(model, zero, stages, stages.program, block, params, batches, counts, False)
    state = rank.begin(rank.accumulators(params))
    return {**state.buffers, "weights": state.weights, "gradients": (state.pending, state.grads)}


def _outer(model: Decoder, zero: Zero, params: Tree) -> tuple[Tree, Tree]:
    """The parameters of embedding and head, gathered, in the compute type."""
    names = ("embed", "head")
    outer = zero.gather({name: params[name] for name in names}, {n: zero.axes[n] for n in names})
    return outer["embed"], model.head_params(outer)


@dataclass(frozen=True)
class _Rank:
    """The operations of one rank, each from a state and a row to the next state."""

    model: Decoder
    zero: Zero
    program: TickProgram
    stages: PipelineStages
    parts: Split  # of a layer
    layers: Tree  # parameters, [chunks * capacity, ...]
    embed: Tree  # gathered
    head: Tree  # gathered
    x: jax.ShapeDtypeStruct  # the activations between layers
    batches: Batch
    counts: jax.Array
    row_major: bool

    @classmethod
    def of(
        cls,
        model: Decoder,
        zero: Zero,
        stages: PipelineStages,
        program: TickProgram,
        block: Callable | None,
        params: Tree,
        batches: Batch,
        counts: Counts,
        row_major: bool,
    ) -> "_Rank":
        """Traces a layer, and gathers the parameters outside the layers.

        Args:
          block: None for forward passes only.
        """
        embed, head = _outer(model, zero, params)
        first = at(batches, 0)
        x = jax.eval_shape(model.embed, embed, first)
        layer = jax.eval_shape(lambda: zero.gather(at(params["layers"], 0), zero.layer_axes))
        parts = split(block, layer, x, first) if block else keep_nothing(model.block)
        return cls(
            model,
            zero,
            program,
            stages,
            parts,
            params["layers"],
            embed,
            head,
            x,
            batches,
            jnp.asarray(counts[0]),
            row_major,
        )

    def accumulators(self, params: Tree) -> dict[str, Tree]:
        """Zeros to sum the gradients in."""
        model, zero, axes = self.model, self.zero, self.zero.axes
        return {
            "layers": zero.zeros(params["layers"], axes["layers"]),
            "embed": zero.zeros(params["embed"], axes["embed"]),
            "head": zero.zeros(model.head_params(params), model.head_params(axes)),
        }

    def run(self, state: _State, columns: Columns) -> _State:
        """All ticks."""
        rows = {name: jnp.asarray(column).reshape(-1) for name, column in columns.items()}
        return jax.lax.scan(lambda state, row: (self.tick(state, row), None), state, rows)[0]

    def begin(self, grads: dict[str, Tree]) -> _State:
        """Empty buffers; `grads` are the accumulators, and {} where there are no gradients."""
        zero, slots, capacity = self.zero, self.program.slots, self.stages.capacity
        x = self.x

        def stream(slots: int) -> jax.Array:
            rules = {**ACTIVATIONS, "slots": ()}
            zeros = jnp.zeros((slots, *x.shape), x.dtype)
            return constrain(zeros, ("slots", *STREAM), zero.sizes, rules)

        def of_layers(name: str, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
            return [jnp.zeros((slots[name], capacity, *s.shape), s.dtype) for s in shapes]

        chunk, axes = jax.eval_shape(lambda: self._gathered(0)), zero.axes["layers"]
        return _State(
            made=jnp.zeros(x.shape, x.dtype),
            buffers={
                "inbox": stream(slots["inbox"] + 1),  # the last one is never read
                "input": stream(slots["input"]),
                "residual_b": of_layers("residual_b", self.parts.kept_b),
                "residual_w": of_layers("residual_w", self.parts.kept_w),
                "cotangent": of_layers("cotangent", self.parts.saved),
            },
            weights=self._placed_zeros(chunk) if zero.gathers else None,
            pending=zero.accumulators(chunk, axes) if zero.reduces and grads else None,
            grads=grads,
            sums=(jnp.zeros((), zero.loss_dtype), jnp.zeros((), zero.loss_dtype)),
        )

    def tick(self, state: _State, row: Row) -> _State:
        """One tick."""
        kinds = np.unique(self.program.columns["kind"])
        operations = {
            F: self.forward,
            R: self.recompute,
            B: self.input_gradient,
            W: self.weight_gradient,
            X: self.backward,
        }
        if state.weights is not None:
            gathers = row["gather"] == 1
            state = when(gathers, lambda state: self.gather(state, row), state, GATHER)
        for kind, operation in operations.items():
            if kind in kinds:
                mine = row["kind"] == kind
                state = when(mine, lambda s, run=operation: run(s, row), state, OPERATIONS[kind])
        if state.pending is not None:
            reduces = row["reduce"] == 1
            state = when(reduces, lambda state: self.reduce(state, row), state, REDUCE)
        return self.pass_on(state, row)

    def forward(self, state: _State, row: Row) -> _State:
        x = self._pass_input(state, row)
        if R in self.program.columns["kind"]:
            return self._chunk_forward(state, row, x, saves_residuals=False)
        state = self._chunk_forward(state, row, x, saves_residuals=True)
        return state if state.grads else self.add_losses(state, row)

    def add_losses(self, state: _State, row: Row) -> _State:
        """Without a backward pass, the losses are computed in the last stage's F."""
        batch, last = at(self.batches, row["microbatch"]), self.stages.table.order.stages - 1

        def losses(sums: Sums) -> Sums:
            return add(sums, self.model.loss(self.head, state.made, batch))

        return state._replace(sums=when(row["stage"] == last, losses, state.sums, HEAD))

    def recompute(self, state: _State, row: Row) -> _State:
        """From the input that its F saved; or the F itself, where it saves its residuals."""
        made, x = state.made, at(state.buffers["input"], row["input"])
        columns, first = self.program.columns, row["input"] < 0
        some_save = ((columns["kind"] == R) & (columns["input"] < 0)).any()
        if some_save:
            x = jax.lax.cond(first, lambda: self._pass_input(state, row), lambda: x)
        state = self._chunk_forward(state, row, x, saves_residuals=True)
        return state._replace(made=jnp.where(first, state.made, made) if some_save else made)

    def input_gradient(self, state: _State, row: Row) -> _State:
        return self._chunk_backward(state, row, fused=False)

    def backward(self, state: _State, row: Row) -> _State:
        return self._chunk_backward(state, row, fused=True)

    def weight_gradient(self, state: _State, row: Row) -> _State:
        batch = at(self.batches, row["microbatch"])

        def one(index, state):
            kept, saved = (
                self._read(state, row, name, index) for name in ("residual_w", "cotangent")
            )
            return self._add(state, row, index, self.parts.weight_gradient(batch, kept, saved))

        state = self._each(row, one, state)
        # W makes nothing to send. Without this dependence on it, the ranks might exchange messages
        # in the middle of a tick: those with a W before it, the others after their operation.
        sums = state.grads["layers"] if state.pending is None else state.pending
        smallest = min(jax.tree.leaves(sums), key=lambda x: x.size)
        made, _ = jax.lax.optimization_barrier((state.made, smallest))
        return state._replace(made=made)

    def gather(self, state: _State, row: Row) -> _State:
        return state._replace(weights=self._gathered(row["chunk"]))

    def reduce(self, state: _State, row: Row) -> _State:
        shards = self.zero.reduce(state.pending, self.zero.axes["layers"])
        # Where a rank has one chunk, a TPU's compiler would move a reduction whose result is only
        # accumulated out of both loops, and carry two more sets of unsharded gradients in them.
        shards = jax.lax.optimization_barrier(shards)
        begin = row["chunk"] * self.stages.capacity
        grads = {**state.grads, "layers": add_rows(state.grads["layers"], begin, shards)}
        return state._replace(grads=grads, pending=jax.tree.map(jnp.zeros_like, state.pending))

    def pass_on(self, state: _State, row: Row) -> _State:
        """Sends the tick's result to both neighbours; each stores it in the slot of its table."""
        columns, inbox = self.program.columns, state.buffers["inbox"]
        ranks, nowhere = columns["kind"].shape[1], self.program.slots["inbox"]
        for name, hop in (("from_left", 1), ("from_right", -1), ("from_self", 0)):
            receivers = np.flatnonzero((columns[name] != nowhere).any(axis=(0, 2)))
            if not len(receivers):
                continue
            pairs = [((r - hop) % ranks, r) for r in receivers.tolist()]
            received = jax.lax.ppermute(state.made, "pipeline", pairs) if hop else state.made
            inbox = put(inbox, received, row[name])
        return state._replace(buffers={**state.buffers, "inbox": inbox})

    def _pass_input(self, state: _State, row: Row) -> jax.Array:
        """The input of a forward pass: embedded tokens in the first stage, else from the inbox."""
        received = at(state.buffers["inbox"], row["inbox"])
        return jax.lax.cond(
            row["stage"] == 0,
            lambda: self.model.embed(self.embed, at(self.batches, row["microbatch"])),
            lambda: received,
        )

    def _chunk_forward(
        self, state: _State, row: Row, x: jax.Array, saves_residuals: bool
    ) -> _State:
        """A chunk, forward from x.

        Args:
          saves_residuals: otherwise it saves x, from which R recomputes them.
        """
        batch, first = at(self.batches, row["microbatch"]), x

        def one(index, carry):
            state, x = carry
            x, kept_b, kept_w = self.parts.forward(self._weights(state, row, index), x, batch)
            if not saves_residuals:
                # In every layer: on a CPU (jaxlib 0.12) a loop over layers that does not write its
                # buffers takes more than three times as long.
                inputs = put(state.buffers["input"], first, row["input"])
                state = state._replace(buffers={**state.buffers, "input": inputs})
            else:
                state = self._write(state, row, "residual_b", index, kept_b)
                state = self._write(state, row, "residual_w", index, kept_w)
            return state, x

        state, x = self._each(row, one, (state, x))
        return state._replace(made=x)

    def _chunk_backward(self, state: _State, row: Row, fused: bool) -> _State:
        """A chunk, backward from the gradient in the inbox; in the last stage, from the gradient of
        the loss, whose input is in the inbox: the output of the stage's own forward pass."""
        batch, last = at(self.batches, row["microbatch"]), self.stages.table.order.stages - 1
        count = self.counts[row["chunk"]]

        def head_pass(carry):
            y, sums, grads = carry
            losses, pullback = jax.vjp(
                lambda head, y: self.model.loss(head, y, batch), self.zero.widen(self.head), y
            )
            dhead, dy = pullback((jnp.ones_like(losses[0]), jnp.zeros_like(losses[1])))
            dhead = self.zero.reduce(dhead, self.model.head_params(self.zero.axes))
            return dy, add(sums, losses), add(grads, dhead)

        received = at(state.buffers["inbox"], row["inbox"])
        dy, sums, head = when(
            row["stage"] == last, head_pass, (received, state.sums, state.grads["head"]), HEAD
        )

        def one(i, carry):
            state, dy = carry
            index = count - 1 - i
            weights = self._weights(state, row, index)
            kept_b = self._read(state, row, "residual_b", index)
            kept_w = self._read(state, row, "residual_w", index)
            dx, saved = self.parts.input_gradient(weights, batch, kept_b, kept_w, dy)
            if not fused:
                return self._write(state, row, "cotangent", index, saved), dx
            dweights = self.parts.weight_gradient(batch, kept_w, saved)
            return self._add(state, row, index, dweights), dx

        def of_embedding(grads):
            embed = self.zero.widen(self.embed)
            _, pullback = jax.vjp(lambda embed: self.model.embed(embed, batch), embed)
            return add(grads, self.zero.reduce(pullback(dx)[0], self.zero.axes["embed"]))

        state = state._replace(sums=sums, grads={**state.grads, "head": head})
        state, dx = self._each(row, one, (state, dy))
        embed = when(row["stage"] == 0, of_embedding, state.grads["embed"], EMBEDDING)
        return state._replace(made=dx, grads={**state.grads, "embed": embed})

    @jax.named_scope(LAYERS)
    def _each(self, row: Row, one: Callable, carry: Tree) -> Tree:
        """For each layer of the row's chunk."""
        return jax.lax.fori_loop(0, self.counts[row["chunk"]], one, carry)

    def _weights(self, state: _State, row: Row, index: jax.Array) -> Tree:
        """One layer of the chunk, gathered."""
        if state.weights is not None:
            return at(state.weights, index)
        shards = at(self.layers, row["chunk"] * self.stages.capacity + index)
        return self.zero.gather(shards, self.zero.layer_axes)

    def _gathered(self, chunk: Index) -> Tree:
        size = self.stages.capacity
        shards = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, chunk * size, size), self.layers
        )
        return self.zero.gather(shards, self.zero.axes["layers"])

    def _placed_zeros(self, shapes: Tree) -> Tree:
        return jax.tree.map(
            lambda axes, x: constrain(jnp.zeros(x.shape, x.dtype), axes, self.zero.sizes, WEIGHTS),
            self.zero.axes["layers"],
            shapes,
            is_leaf=is_axes,
        )

    def _add(self, state: _State, row: Row, index: jax.Array, dweights: Tree) -> _State:
        """Adds a layer's gradients to their accumulators."""
        if state.pending is not None:
            rows = jax.tree.map(lambda grad: grad[None], dweights)
            return state._replace(pending=add_rows(state.pending, index, rows))
        grads = self.zero.reduce(dweights, self.zero.layer_axes)
        rows = jax.tree.map(lambda grad: grad[None], grads)
        begin = row["chunk"] * self.stages.capacity + index
        grads = {**state.grads, "layers": add_rows(state.grads["layers"], begin, rows)}
        return state._replace(grads=grads)

    def _read(self, state: _State, row: Row, name: str, index: jax.Array) -> list[jax.Array]:
        return [self._in_order(at(buffer, row[name], index)) for buffer in state.buffers[name]]

    def _write(
        self, state: _State, row: Row, name: str, index: jax.Array, values: list[jax.Array]
    ) -> _State:
        buffers = [
            put(buffer, self._in_order(value), row[name], index)
            for buffer, value in zip(state.buffers[name], values, strict=True)
        ]
        return state._replace(buffers={**state.buffers, name: buffers})

    def _in_order(self, x: jax.Array) -> jax.Array:
        return (
            with_layout_constraint(x, DimensionOrder(major_to_minor=tuple(range(x.ndim))))
            if self.row_major
            else x
        )


def when(condition: jax.Array, function: Callable[[Tree], Tree], state: Tree, scope: str) -> Tree:
    """`function(state)` where the condition holds, else `state`; in place, and of the same types.

    Args:
      scope: its name in the compiled program.
    """
    trips = condition.astype(jnp.int32)
    with jax.named_scope(scope):
        return jax.lax.while_loop(
            lambda carry: carry[0] < trips,
            lambda carry: (carry[0] + 1, function(carry[1])),
            (jnp.zeros((), jnp.int32), state),
        )[1]
