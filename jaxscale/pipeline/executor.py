"""The executor: one scan over the ticks of a table, for any schedule.

For use in a `shard_map` in which pipeline, data and fsdp are manual. In a tick each rank does the
one operation that its column of the table names, then sends the result to its neighbours. Which
operation that is depends on data: each kind is a loop of zero or one trips (`when`). A conditional
would copy the buffers that it carries, every tick; loops update them in place.

Buffers, by the table's names, in slots: `inbox`, received and not read yet; `input`, what R
recomputes from; and for each layer of a chunk the arrays of `split`: `residual_b` from F to B,
`residual_w` from F to W, `cotangent` from B to W. Where a model has several stacks, or layers that
share arrays, `received` is the stream that a chunk's forward pass began with, from F to W.

What ranks send each other is the union of all stacks' streams, zeros where a stage's stack has no
such array.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout as DimensionOrder
from jax.experimental.layout import with_layout_constraint

from jaxscale.batch import Batch
from jaxscale.models.protocol import (
    LayerFunction,
    Model,
    Stack,
    Stream,
    Sums,
    add_layer_sums,
    head_gradients,
    head_params,
    layer_function,
    return_borrowed,
    split_stream,
    sum_shapes,
    zero_sums,
)
from jaxscale.ops.stacked import Index, add, add_rows, at, put
from jaxscale.pipeline.backward_split import Split, forward_only, split
from jaxscale.pipeline.buffer_slots import TickProgram
from jaxscale.pipeline.stages import (
    EMBEDDING,
    GATHER,
    HEAD,
    KIND,
    LAYERS,
    OPERATIONS,
    REDUCE,
    PipelineStages,
)
from jaxscale.pipeline_schedules.operations import B, F, R, W, X
from jaxscale.sharding.resolve import ACTIVATIONS, constrain, is_axes
from jaxscale.sharding.zero import Zero

Tree = Any
Row = Mapping[str, jax.Array]  # a rank's cell of every column, int32 scalars
Columns = Mapping[str, jax.Array | np.ndarray]
Chunks = Mapping[str, jax.Array | np.ndarray]
Remat = Callable[[LayerFunction], LayerFunction]


class _State(NamedTuple):
    """What a rank carries from tick to tick."""

    made: Stream  # the result of this tick, for the rank before or after
    buffers: dict[str, Tree]  # [slots, ...]
    weights: Tree  # of a chunk of each stack, gathered; None where nothing is to be gathered
    pending: Tree  # their gradients, not reduced yet; None where nothing is to be reduced
    grads: dict[str, Tree]  # accumulators
    sums: Sums


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
    """Runs a step's table: the sums of this rank, and its gradients, summed over micro-batches and
    not yet over ranks.

    Args:
      remat: puts a layer under a remat policy.
      params: of this rank, the layers of a stack stacked as `stages` says.
      batches: fields [micro-batches, batch, time].
      columns: of `stages.program`, [ticks, 1, 1] each.
      chunks: of `stages`, [1, chunks] each.
      row_major: whether to ask for buffers in the order of their dimensions; a TPU's compiler
        would choose an order for each loop, and copy the buffers from one to the other.
    """
    rank = _Rank.of(model, zero, stages, stages.program, remat, params, batches, chunks, row_major)
    state = rank.run(rank.begin(rank.accumulators(params)), columns)
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
    """The sums of this rank, from forward passes only. The arguments are those of `execute`, with
    `columns` of `stages.forward_program`."""
    program = stages.forward_program
    rank = _Rank.of(model, zero, stages, program, None, params, batches, chunks, False)
    return rank.run(rank.begin({}), columns).sums


def buffers(
    model: Model,
    remat: Remat,
    zero: Zero,
    stages: PipelineStages,
    params: Tree,
    batches: Batch,
    chunks: Chunks,
) -> dict[str, Tree]:
    """The buffers and sums that a rank carries between ticks, empty: for their sizes."""
    rank = _Rank.of(model, zero, stages, stages.program, remat, params, batches, chunks, False)
    state = rank.begin(rank.accumulators(params))
    return {**state.buffers, "weights": state.weights, "gradients": (state.pending, state.grads)}


def _outer(model: Model, zero: Zero, params: Tree) -> tuple[Tree, Tree]:
    """The parameters of embedding and head, gathered, in the compute type."""
    names = ("embed", "head")
    outer = zero.gather({name: params[name] for name in names}, {n: zero.axes[n] for n in names})
    return outer["embed"], head_params(model, outer)


class _StackPart(NamedTuple):
    """A stack of the model on one rank."""

    number: int
    stack: Stack
    kinds: tuple[Split, ...]  # the operations of each kind of layer
    layers: Tree  # parameters, [chunks * capacity, ...]

    @property
    def name(self) -> str:
        return self.stack.name


@dataclass(frozen=True)
class _Rank:
    """The operations of one rank, each from a state and a row to the next state."""

    model: Model
    zero: Zero
    program: TickProgram
    stages: PipelineStages
    parts: tuple[_StackPart, ...]
    embed: Tree  # gathered
    head: Tree  # gathered
    stream: dict[str, jax.ShapeDtypeStruct]  # of all stacks
    batches: Batch
    chunks: Mapping[str, jax.Array]  # [chunks] each
    row_major: bool

    @classmethod
    def of(
        cls,
        model: Model,
        zero: Zero,
        stages: PipelineStages,
        program: TickProgram,
        remat: Remat | None,
        params: Tree,
        batches: Batch,
        chunks: Chunks,
        row_major: bool,
    ) -> "_Rank":
        """Traces a layer of each stack, and gathers the parameters outside the layers.

        Args:
          remat: None for forward passes only.
        """
        embed, head = _outer(model, zero, params)
        first, stream, union, parts = at(batches, 0), {}, {}, []
        for number, stack in enumerate(model.stacks):
            stream = jax.eval_shape(stack.enter, embed, stream, first)
            union = _union(union, stream)
            layers = params[stack.name]
            axes = zero.layer_axes(stack.name)
            layer = jax.eval_shape(lambda x, a=axes: zero.gather(at(x, 0), a), layers)
            context = first, jax.ShapeDtypeStruct((), jnp.int32)
            kinds = tuple(
                split(remat(one), layer, *split_stream(stack, stream), context)
                if remat
                else forward_only(one)
                for one in (layer_function(stack, kind) for kind in range(stack.period))
            )
            _check_alike(stack, kinds)
            parts.append(_StackPart(number, stack, kinds, layers))
        held = {name: jnp.asarray(values[0]) for name, values in chunks.items()}
        return cls(
            model,
            zero,
            program,
            stages,
            tuple(parts),
            embed,
            head,
            union,
            batches,
            held,
            row_major,
        )

    @property
    def keeps_received(self) -> bool:
        """Whether backward passes read the stream that the forward pass began with."""
        return len(self.parts) > 1 or any(part.stack.shared for part in self.parts)

    def accumulators(self, params: Tree) -> dict[str, Tree]:
        """Zeros to sum the gradients in."""
        model, zero, axes = self.model, self.zero, self.zero.axes
        return {
            **{part.name: zero.zeros(part.layers, axes[part.name]) for part in self.parts},
            "embed": zero.zeros(params["embed"], axes["embed"]),
            "head": zero.zeros(head_params(model, params), head_params(model, axes)),
        }

    def run(self, state: _State, columns: Columns) -> _State:
        """All ticks."""
        rows = {name: jnp.asarray(column).reshape(-1) for name, column in columns.items()}
        return jax.lax.scan(lambda state, row: (self.tick(state, row), None), state, rows)[0]

    def begin(self, grads: dict[str, Tree]) -> _State:
        """Empty buffers; `grads` are the accumulators, and {} where there are no gradients."""
        zero, slots = self.zero, self.program.slots

        def streams(slots: int) -> Stream:
            rules = {**zero.rules, **ACTIVATIONS, "slots": ()}
            return {
                name: constrain(
                    jnp.zeros((slots, *x.shape), x.dtype),
                    ("slots", *self._stream_axes(name)),
                    zero.sizes,
                    rules,
                )
                for name, x in self.stream.items()
            }

        def of_layers(name: str, kept: str) -> Tree:
            def of_stack(part: _StackPart) -> list[jax.Array]:
                shape = slots[name], self.stages.capacity(part.number)
                return [
                    jnp.zeros((*shape, *s.shape), s.dtype) for s in getattr(part.kinds[0], kept)
                ]

            return {part.name: of_stack(part) for part in self.parts}

        chunk = {p.name: jax.eval_shape(lambda p=p: self._gathered(p, 0)) for p in self.parts}
        axes = {part.name: zero.axes[part.name] for part in self.parts}
        found = {
            "inbox": streams(slots["inbox"] + 1),  # the last one is never read
            "input": streams(slots["input"]),
            "residual_b": of_layers("residual_b", "kept_b"),
            "residual_w": of_layers("residual_w", "kept_w"),
            "cotangent": of_layers("cotangent", "saved"),
        }
        if self.keeps_received and grads:
            found["received"] = streams(slots["residual_w"])
        return _State(
            made={name: jnp.zeros(x.shape, x.dtype) for name, x in self.stream.items()},
            buffers=found,
            weights=self._placed_zeros(chunk, axes) if zero.gathers else None,
            pending=zero.accumulators(chunk, axes) if zero.reduces and grads else None,
            grads=grads,
            sums=zero_sums(self.model, zero.loss_dtype),
        )

    def _stream_axes(self, name: str) -> tuple[str, ...]:
        return next(
            axes[name]
            for part in self.parts
            for axes in (part.stack.carried, part.stack.shared)
            if name in axes
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
            for part in self.parts:
                gathers = self._here(row, part, row["gather"] == 1)
                state = when(
                    gathers,
                    lambda s, p=part: self.gather(s, row, p),
                    state,
                    self._scope(GATHER, part),
                )
        for kind, operation in operations.items():
            if kind in kinds:
                mine = row["kind"] == kind
                state = when(mine, lambda s, run=operation: run(s, row), state, OPERATIONS[kind])
        if state.pending is not None:
            for part in self.parts:
                reduces = self._here(row, part, row["reduce"] == 1)
                state = when(
                    reduces,
                    lambda s, p=part: self.reduce(s, row, p),
                    state,
                    self._scope(REDUCE, part),
                )
        return self.pass_on(state, row)

    def forward(self, state: _State, row: Row) -> _State:
        received = at(state.buffers["inbox"], row["inbox"])
        stream = self._entered(received, row)
        if R in self.program.columns["kind"]:
            return self._chunk_forward(state, row, received, stream, saves_residuals=False)
        state = self._chunk_forward(state, row, received, stream, saves_residuals=True)
        return state if state.grads else self.add_losses(state, row)

    def add_losses(self, state: _State, row: Row) -> _State:
        """Without a backward pass, the losses are computed in the last stage's F."""
        batch, last = at(self.batches, row["microbatch"]), self.stages.table.order.stages - 1

        def losses(sums: Sums) -> Sums:
            found = self.model.loss(self.head, self._of(self.parts[-1], state.made), batch)
            return {**sums, **add({name: sums[name] for name in found}, found)}

        return state._replace(sums=when(row["stage"] == last, losses, state.sums, HEAD))

    def recompute(self, state: _State, row: Row) -> _State:
        """From the input that its F saved; or the F itself, where it saves its residuals."""
        made, kept = state.made, at(state.buffers["input"], row["input"])
        columns, first = self.program.columns, row["input"] < 0
        some_save = ((columns["kind"] == R) & (columns["input"] < 0)).any()

        def begin() -> Stream:
            received = at(state.buffers["inbox"], row["inbox"])
            return received if self.keeps_received else self._entered(received, row)

        received = jax.lax.cond(first, begin, lambda: kept) if some_save else kept
        stream = self._entered(received, row) if self.keeps_received else received
        state = self._chunk_forward(
            state, row, received, stream, saves_residuals=True, again=~first
        )
        if some_save:
            made = jax.tree.map(lambda new, old: jnp.where(first, new, old), state.made, made)
        return state._replace(made=made)

    def input_gradient(self, state: _State, row: Row) -> _State:
        return self._chunk_backward(state, row, fused=False)

    def backward(self, state: _State, row: Row) -> _State:
        return self._chunk_backward(state, row, fused=True)

    def weight_gradient(self, state: _State, row: Row) -> _State:
        batch = at(self.batches, row["microbatch"])
        shared = self._shared(state, row)
        for part in self.parts:

            def one(index, kind, state, part=part):
                kept, saved = (
                    self._read(state, row, name, part, index)
                    for name in ("residual_w", "cotangent")
                )
                context = batch, self._layer(row, index)
                dweights = part.kinds[kind].weight_gradient(shared[part.name], context, kept, saved)
                return self._add(state, row, part, index, dweights)

            state = self._each(row, part, one, state)
        # W makes nothing to send. Without this dependence on it, the ranks might exchange messages
        # in the middle of a tick: those with a W before it, the others after their operation.
        summed = state.grads if state.pending is None else state.pending
        sums = [summed[part.name] for part in self.parts]
        smallest = min(jax.tree.leaves(sums), key=lambda x: x.size)
        made, _ = jax.lax.optimization_barrier((state.made, smallest))
        return state._replace(made=made)

    def gather(self, state: _State, row: Row, part: _StackPart) -> _State:
        weights = {**state.weights, part.name: self._gathered(part, self._begin(row))}
        return state._replace(weights=weights)

    def reduce(self, state: _State, row: Row, part: _StackPart) -> _State:
        pending, name = state.pending[part.name], part.name
        shards = self.zero.reduce(pending, self.zero.axes[name])
        # Where a rank has one chunk, a TPU's compiler would move a reduction whose result is only
        # accumulated out of both loops, and carry two more sets of unsharded gradients in them.
        shards = jax.lax.optimization_barrier(shards)
        grads = {**state.grads, name: add_rows(state.grads[name], self._begin(row), shards)}
        zeros = jax.tree.map(jnp.zeros_like, pending)
        return state._replace(grads=grads, pending={**state.pending, name: zeros})

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

    def _entered(self, received: Stream, row: Row) -> Stream:
        """The stream that a chunk's layers begin with: what was received or, in the first stage of
        a stack, what enters it."""
        batch = at(self.batches, row["microbatch"])

        def enter(part: _StackPart, stream: Stream) -> Stream:
            before = self._of(self.parts[part.number - 1], stream) if part.number else {}
            return self._full(part.stack.enter(self.embed, before, batch))

        for part in self.parts:
            begins = row["stage"] == self.stages.first_stage(part.number)
            received = jax.lax.cond(
                begins, lambda s=received, p=part: enter(p, s), lambda s=received: s
            )
        return received

    def _chunk_forward(
        self,
        state: _State,
        row: Row,
        received: Stream,
        stream: Stream,
        saves_residuals: bool,
        again: jax.Array | bool = False,
    ) -> _State:
        """A chunk, forward.

        Args:
          stream: what enters its layers.
          saves_residuals: otherwise it saves what R recomputes them from.
          again: whether this repeats a forward pass, whose sums have been counted.
        """
        batch = at(self.batches, row["microbatch"])
        begins = received if self.keeps_received else stream
        if "received" in state.buffers and saves_residuals:
            kept = put(state.buffers["received"], received, row["residual_w"])
            state = state._replace(buffers={**state.buffers, "received": kept})
        for part in self.parts:
            x, shared = split_stream(part.stack, self._of(part, stream))

            def one(index, kind, carry, part=part, shared=shared):
                state, x = carry
                context = batch, self._layer(row, index)
                weights = self._weights(state, row, part, index)
                (x, loss), sums, kept_b, kept_w = part.kinds[kind].forward(
                    weights, x, shared, context
                )
                state = self._count(state, part, context[1], loss, sums, again)
                if not saves_residuals:
                    # In every layer: on a CPU (jaxlib 0.12) a loop over layers that does not write
                    # its buffers takes more than three times as long.
                    inputs = put(state.buffers["input"], begins, row["input"])
                    state = state._replace(buffers={**state.buffers, "input": inputs})
                else:
                    state = self._write(state, row, "residual_b", part, index, kept_b)
                    state = self._write(state, row, "residual_w", part, index, kept_w)
                return state, x

            state, x = self._each(row, part, one, (state, x))
            stream = {**stream, **x}
        return state._replace(made=stream)

    def _chunk_backward(self, state: _State, row: Row, fused: bool) -> _State:
        """A chunk, backward from the gradient in the inbox; in the last stage, from the gradient of
        the loss, whose input is in the inbox: the output of the stage's own forward pass."""
        batch, last = at(self.batches, row["microbatch"]), self.stages.table.order.stages - 1

        def head_pass(carry):
            stream, sums, grads = carry
            losses, dhead, dstream = head_gradients(
                self.model, self.zero.widen(self.head), self._of(self.parts[-1], stream), batch
            )
            dhead = self.zero.reduce(dhead, head_params(self.model, self.zero.axes))
            added = add({name: sums[name] for name in losses}, losses)
            return self._full(dstream), {**sums, **added}, add(grads, dhead)

        inbox = at(state.buffers["inbox"], row["inbox"])
        dstream, sums, head = when(
            row["stage"] == last, head_pass, (inbox, state.sums, state.grads["head"]), HEAD
        )
        state = state._replace(sums=sums, grads={**state.grads, "head": head})
        shared = self._shared(state, row)
        for part in reversed(self.parts):

            def one(index, kind, carry, part=part):
                state, dx, dshared = carry
                weights = self._weights(state, row, part, index)
                kept_b, kept_w = (
                    self._read(state, row, name, part, index)
                    for name in ("residual_b", "residual_w")
                )
                split, here = part.kinds[kind], shared[part.name]
                context = batch, self._layer(row, index)
                dx, more, saved = split.input_gradient(weights, here, context, kept_b, kept_w, dx)
                dshared = add(dshared, more)
                if not fused:
                    return self._write(state, row, "cotangent", part, index, saved), dx, dshared
                dweights = split.weight_gradient(here, context, kept_w, saved)
                return self._add(state, row, part, index, dweights), dx, dshared

            dx, dshared = split_stream(part.stack, self._of(part, dstream))
            carry = state, dx, self.zero.widen(dshared)
            state, dx, dshared = self._each(row, part, one, carry, downward=True)
            dstream = self._cast({**dstream, **dx, **dshared})
        return self._enter_backward(state, row, dstream)

    def _enter_backward(self, state: _State, row: Row, dstream: Stream) -> _State:
        """The gradients of what enters a stack, in its first stage."""
        batch, dembed = at(self.batches, row["microbatch"]), state.grads["embed"]
        for part in self.parts:

            def entering(carry, part=part):
                grads, dstream = carry
                before = {}
                if part.number:
                    received = at(state.buffers["received"], row["residual_w"])
                    before = self._of(self.parts[part.number - 1], received)
                _, pullback = jax.vjp(
                    lambda embed, stream, p=part: p.stack.enter(embed, stream, batch),
                    self.zero.widen(self.embed),
                    before,
                )
                more, dbefore = pullback(self._of(part, dstream))
                grads = add(grads, self.zero.reduce(more, self.zero.axes["embed"]))
                return grads, self._full(dbefore) if part.number else dstream

            begins = row["stage"] == self.stages.first_stage(part.number)
            if part.number:
                dembed, dstream = when(begins, entering, (dembed, dstream), EMBEDDING)
            else:
                dembed = when(
                    begins, lambda g, d=dstream, e=entering: e((g, d))[0], dembed, EMBEDDING
                )
        return state._replace(made=dstream, grads={**state.grads, "embed": dembed})

    def _count(
        self,
        state: _State,
        part: _StackPart,
        index: jax.Array,
        loss: jax.Array | None,
        others: Sums,
        again: jax.Array | bool,
    ) -> _State:
        """The sums with those of a layer, once for each micro-batch."""
        if not part.stack.sums:
            return state
        own = {name: state.sums[name] for name in sum_shapes(part.stack)}
        more = add_layer_sums(part.stack, own, index, loss, others)
        more = jax.tree.map(lambda new, old: jnp.where(again, old, new), more, own)
        return state._replace(sums={**state.sums, **more})

    def _shared(self, state: _State, row: Row) -> dict[str, Stream]:
        """For each stack what its layers share, in a backward pass."""
        if not any(part.stack.shared for part in self.parts):
            return {part.name: {} for part in self.parts}
        received = at(state.buffers["received"], row["residual_w"])
        stream = self._entered(received, row)
        return {part.name: {n: stream[n] for n in part.stack.shared} for part in self.parts}

    def _of(self, part: _StackPart, stream: Stream) -> Stream:
        """A stack's own arrays of the union."""
        return {name: stream[name] for name in (*part.stack.carried, *part.stack.shared)}

    def _full(self, stream: Stream) -> Stream:
        """The union of all stacks' arrays, with zeros for those that are not in `stream`."""
        return self._cast(
            {
                name: stream[name] if name in stream else jnp.zeros(x.shape, x.dtype)
                for name, x in self.stream.items()
            }
        )

    def _cast(self, stream: Stream) -> Stream:
        return {name: x.astype(self.stream[name].dtype) for name, x in stream.items()}

    def _here(self, row: Row, part: _StackPart, condition: jax.Array) -> jax.Array:
        """The condition, where the row's chunk is of this stack."""
        if len(self.parts) == 1:
            return condition
        return condition & (self.chunks["stack"][row["chunk"]] == part.number)

    def _scope(self, name: str, part: _StackPart) -> str:
        return self.stages.scope(name, part.number)

    def _each(
        self, row: Row, part: _StackPart, one: Callable, carry: Tree, downward: bool = False
    ) -> Tree:
        """`one(index, kind, carry)` for each layer of the row's chunk, if it is of this stack."""
        period, count = part.stack.period, self.chunks["count"][row["chunk"]]
        if len(self.parts) > 1:
            count = jnp.where(self.chunks["stack"][row["chunk"]] == part.number, count, 0)

        def one_period(number, carry):
            for kind in reversed(range(period)) if downward else range(period):
                index = number * period + kind
                if self.stages.whole_periods(part.number):
                    carry = one(index, kind, carry)
                else:
                    body = functools.partial(one, index, kind)
                    carry = when(index < count, body, carry, KIND)
            return carry

        def body(i, carry):
            if period == 1:
                return one(count - 1 - i if downward else i, 0, carry)
            return one_period(periods - 1 - i if downward else i, carry)

        periods = count if period == 1 else -(-count // period)
        with jax.named_scope(self._scope(LAYERS, part)):
            return jax.lax.fori_loop(0, periods, body, carry)

    def _layer(self, row: Row, index: jax.Array) -> jax.Array:
        """A layer's index in its stack, from that in its chunk."""
        return self.chunks["first"][row["chunk"]] + index

    def _begin(self, row: Row) -> Index:
        """The first row of the chunk among its stack's rows on this rank."""
        if len(self.parts) == 1:
            return row["chunk"] * self.stages.capacity()
        return self.chunks["begin"][row["chunk"]]

    def _weights(self, state: _State, row: Row, part: _StackPart, index: jax.Array) -> Tree:
        """One layer of the chunk, gathered."""
        if state.weights is not None:
            return at(state.weights[part.name], index)
        shards = at(part.layers, self._begin(row) + index)
        return self.zero.gather(shards, self.zero.layer_axes(part.name))

    def _gathered(self, part: _StackPart, begin: Index) -> Tree:
        size = self.stages.capacity(part.number)
        shards = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, begin, size), part.layers)
        return self.zero.gather(shards, self.zero.axes[part.name])

    def _placed_zeros(self, shapes: Tree, axes: Tree) -> Tree:
        return jax.tree.map(
            lambda axes, x: constrain(
                jnp.zeros(x.shape, x.dtype), axes, self.zero.sizes, self.zero.rules
            ),
            axes,
            shapes,
            is_leaf=is_axes,
        )

    def _add(
        self, state: _State, row: Row, part: _StackPart, index: jax.Array, dweights: Tree
    ) -> _State:
        """Adds a layer's gradients to their accumulators."""
        name = part.name
        if state.pending is not None:
            rows = jax.tree.map(lambda grad: grad[None], dweights)
            pending = add_rows(state.pending[name], index, rows)
            return state._replace(pending={**state.pending, name: pending})
        grads = self.zero.reduce(dweights, self.zero.layer_axes(name))
        rows = jax.tree.map(lambda grad: grad[None], grads)
        summed = add_rows(state.grads[name], self._begin(row) + index, rows)
        return state._replace(grads={**state.grads, name: summed})

    def _read(
        self, state: _State, row: Row, name: str, part: _StackPart, index: jax.Array
    ) -> list[jax.Array]:
        return [
            self._in_order(at(buffer, row[name], index))
            for buffer in state.buffers[name][part.name]
        ]

    def _write(
        self,
        state: _State,
        row: Row,
        name: str,
        part: _StackPart,
        index: jax.Array,
        values: list[jax.Array],
    ) -> _State:
        written = [
            put(buffer, self._in_order(value), row[name], index)
            for buffer, value in zip(state.buffers[name][part.name], values, strict=True)
        ]
        buffers = {**state.buffers[name], part.name: written}
        return state._replace(buffers={**state.buffers, name: buffers})

    def _in_order(self, x: jax.Array) -> jax.Array:
        return (
            with_layout_constraint(x, DimensionOrder(major_to_minor=tuple(range(x.ndim))))
            if self.row_major
            else x
        )


def _union(
    union: dict[str, jax.ShapeDtypeStruct], stream: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Both streams' arrays.

    Raises:
      ValueError: they have arrays of one name and different shapes or types.
    """
    for name in union.keys() & stream.keys():
        one, other = union[name], stream[name]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"two stacks have arrays {name!r} in their streams, {one.shape} {one.dtype} and "
                f"{other.shape} {other.dtype}; in a pipeline, which sends both, give them two names"
            )
    return {**union, **stream}


def _check_alike(stack: Stack, kinds: Sequence[Split]) -> None:
    """Refuses kinds of layers that keep arrays of other shapes: they share buffers.

    Raises:
      ValueError: they do.
    """
    shapes = [(kind.kept_b, kind.kept_w, kind.saved) for kind in kinds]
    if any(one != shapes[0] for one in shapes):
        raise ValueError(
            f"the layers of stack {stack.name!r} save arrays of different shapes for the backward "
            "pass, which a pipeline has no buffers for; set layout.pipeline = 1, or layout.remat "
            "= 'full'"
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
