"""State of a pipeline rank: its layers of each stack, its buffers, and access to both.

For use in a `shard_map` in which pipeline, data and fsdp are manual.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout as DimensionOrder
from jax.experimental.layout import with_layout_constraint

from jaxscale.batch import Batch
from jaxscale.models.protocol import (
    Model,
    Remat,
    Stream,
    Sums,
    add_layer_sums,
    head_params,
    sum_shapes,
    zero_sums,
)
from jaxscale.ops.array_stack import Index, add_rows, at, put
from jaxscale.ops.storage.quantised_storage import stored_gradients, unpack_weights
from jaxscale.pipeline.buffer_slots import GRADIENT, MEMORY, OFFLOADED, TickProgram
from jaxscale.pipeline.layers.mirror import with_rows
from jaxscale.pipeline.layers.segments import segment_of
from jaxscale.pipeline.layers.stack_part import StackPart, StreamShapes, trace_stacks
from jaxscale.pipeline.stages import PipelineStages
from jaxscale.sharding.head_slices import gather_slices, slice_shapes
from jaxscale.sharding.host_memory import from_host, to_host
from jaxscale.sharding.resolve import constrain
from jaxscale.sharding.rules import ACTIVATIONS
from jaxscale.sharding.zero import Zero

Tree = Any
Row = Mapping[str, jax.Array]  # a rank's cell of every column, int32 scalars
Columns = Mapping[str, jax.Array | np.ndarray]
Chunks = Mapping[str, jax.Array | np.ndarray]


class State(NamedTuple):
    """A rank's carry of the scan over ticks."""

    made: Stream  # the result of this tick, for a neighbour
    made_paired: Stream | None  # that of a pair's second operation, if pairs are one operation
    made_parts: Stream | None  # those of all parts of a segment, if there are several
    buffers: dict[str, Tree]  # [slots, ...]
    weights: Tree  # gathered, of a chunk of each stack; None if ticks do not gather
    pending: Tree  # gradients of a chunk, not reduced yet; None without reductions
    grads: dict[str, Tree]  # accumulators
    sums: Sums


def _outer(model: Model, zero: Zero, params: Tree, slices: bool) -> tuple[Tree, Tree]:
    """Gathers the parameters of embedding and head, in the compute type.

    Args:
      slices: whether the rank needs its slice of the head only.
    """
    names = ("embed", "head")
    if slices:
        head = gather_slices(zero, head_params(model, params), head_params(model, zero.axes))
        return zero.gather(params["embed"], zero.axes["embed"]), head
    outer = zero.gather({name: params[name] for name in names}, {n: zero.axes[n] for n in names})
    return outer["embed"], head_params(model, outer)


@dataclass(frozen=True)
class Rank:
    """One rank: values fixed during a step, and access to its `State`."""

    model: Model
    zero: Zero
    program: TickProgram
    stages: PipelineStages
    parts: tuple[StackPart, ...]
    embed: Tree  # gathered
    head: Tree  # gathered, or this rank's slice
    stream: StreamShapes  # of all stacks
    batches: Batch
    chunks: Mapping[str, jax.Array]  # [chunks] each
    row_major: bool
    offload: bool  # whether buffers of OFFLOADED are in host memory (`on_host`)
    only_chunk: Tree  # gathered before the first tick; None if ranks have several chunks

    @classmethod
    def of(
        cls,
        model: Model,
        zero: Zero,
        stages: PipelineStages,
        params: Tree,
        batches: Batch,
        chunks: Chunks,
        *,
        remat: Remat | None = None,
        row_major: bool = False,
        offload: bool = False,
    ) -> "Rank":
        """Traces a layer of each stack, and gathers the parameters outside the layers.

        Args:
          remat: applies the layout's policy; None is for the `forward_program`.
        """
        slices = stages.slices_head and remat is not None
        embed, head = _outer(model, zero, params, slices)
        parts, union = trace_stacks(model, zero, stages, params, embed, batches, remat)
        held = {name: jnp.asarray(values[0]) for name, values in chunks.items()}
        zero = zero.kept
        # Before the first tick: one gather a step, and no tick has a loop with a collective, which
        # XLA for GPUs cannot put into a CUDA graph (NCCL: NVIDIA/nccl#1986).
        only_chunk = None
        if zero.gathers and stages.has_one_chunk and not stages.by_layer:
            only_chunk = {p.name: zero.gather(p.layers, zero.axes[p.name]) for p in parts}
        return cls(
            model=model,
            zero=zero,
            program=stages.program if remat else stages.forward_program,
            stages=stages,
            parts=parts,
            embed=embed,
            head=head,
            stream=union,
            batches=batches,
            chunks=held,
            row_major=row_major,
            offload=offload,
            only_chunk=only_chunk,
        )

    @property
    def keeps_received(self) -> bool:
        """Whether backward passes read the stream received by the forward pass."""
        return len(self.parts) > 1 or any(part.stack.shared for part in self.parts)

    def accumulators(self, params: Tree) -> dict[str, Tree]:
        """Zeros for sums of gradients."""
        model, zero, axes = self.model, self.zero, self.zero.axes
        layers = {part.name: params[part.name] for part in self.parts}
        head, of_head = head_params(model, params), head_params(model, axes)
        if self.stages.slices_head:
            head = slice_shapes(zero, head, of_head)
        if self.stages.table.order.directions > 1:
            layers = with_rows(layers, 2)
        return {
            **{name: zero.zeros(rows, axes[name]) for name, rows in layers.items()},
            "embed": zero.zeros(params["embed"], axes["embed"]),
            "head": zero.zeros(head, of_head),
            "vectors": jax.tree.map(jnp.zeros_like, self.batches.vectors),
        }

    def initial_state(self, grads: dict[str, Tree]) -> State:
        """Empty buffers; `grads` are the accumulators, {} without gradients."""
        zero, slots = self.zero, self.program.slots

        def streams(slots: int) -> Stream:
            rules = {**zero.rules, **ACTIVATIONS, "slots": ()}
            empty = {name: jnp.zeros((slots, *x.shape), x.dtype) for name, x in self.stream.items()}
            return {
                name: constrain(x, ("slots", *self.stream_axes(name)), zero.sizes, rules)
                for name, x in empty.items()
            }

        def of_layers(name: str, kept: str) -> Tree:
            def of_stack(part: StackPart) -> list[jax.Array]:
                shape = slots[name], self.stages.capacity(part.number)
                values = getattr(part.kinds[0], kept)
                empty = [jnp.zeros((*shape, *s.shape), s.dtype) for s in values]
                return [to_host(x) if self.on_host(name, s) else x for x, s in zip(empty, values)]

            return {part.name: of_stack(part) for part in self.parts}

        found = {
            "inbox": streams(slots["inbox"] + 1),  # the last slot is written and never read
            "input": streams(slots["input"]),
            "residual_b": of_layers("residual_b", "residuals_b"),
            "residual_w": of_layers("residual_w", "residuals_w"),
            "cotangent": of_layers("cotangent", "saved"),
        }
        for name in (MEMORY, GRADIENT):
            found[name] = {part.name: self._empty_memory(part, name) for part in self.parts}
        if self.keeps_received and grads:
            found["received"] = streams(slots["residual_w"])
        weights, pending = self._chunk_arrays() if not self.stages.by_layer else (None, None)
        made = {name: jnp.zeros(x.shape, x.dtype) for name, x in self.stream.items()}
        return State(
            made=made,
            made_paired=made if grads and self.stages.joint_pairs else None,
            made_parts=self._no_messages() if self.stages.most_parts > 1 else None,
            buffers=found,
            weights=weights,
            pending=pending if grads else None,
            grads=grads,
            sums=zero_sums(self.model, zero.loss_dtype),
        )

    def _no_messages(self) -> Stream:
        """Zeros for the messages of a segment's parts."""
        count = self.stages.most_parts
        return {name: jnp.zeros((count, *x.shape), x.dtype) for name, x in self.stream.items()}

    def _empty_memory(self, part: StackPart, name: str) -> Stream:
        layers, slots = self.stages.capacity(part.number), self.program.slots
        return {
            key: jnp.zeros((slots[name], layers, *x.shape), x.dtype)
            for key, x in part.memory.items()
        }

    def _chunk_arrays(self) -> tuple[Tree, Tree]:
        """Arrays for the gathered weights of a chunk, if ticks gather them, and for the sums of its
        gradients, if they are reduced later."""
        zero, parts = self.zero, self.parts
        chunk = {p.name: jax.eval_shape(lambda p=p: self.chunk_weights(p, 0)) for p in parts}
        axes = {part.name: zero.axes[part.name] for part in parts}
        gathers = zero.gathers and not self.only_chunk
        held = with_rows(chunk, 1 + int(self.program.columns["weights"].max()))
        return (
            zero.empty_weights(held, axes) if gathers else None,
            zero.accumulators(chunk, axes) if zero.reduces else None,
        )

    def stream_axes(self, name: str) -> tuple[str, ...]:
        """Logical axes of an array of the stream."""
        return next(
            axes[name]
            for part in self.parts
            for axes in (part.stack.carried, part.stack.shared)
            if name in axes
        )

    def batch_of(self, row: Row) -> Batch:
        """The segment of the micro-batch of the row's operation, for layers and head."""
        return self.entering_batch(row)._replace(vectors=())

    def entering_batch(self, row: Row) -> Batch:
        """The same for `Stack.enter`."""
        count = self.stages.num_parts
        batch, ranks = at(self.batches, row["microbatch"]), self.zero.sizes["context"]
        return segment_of(batch, row["segment"], count, ranks)

    def entered(self, received: Stream, row: Row) -> Stream:
        """The input stream of a chunk's layers: the received stream or, in the first stage of a
        stack, the result of `Stack.enter`."""
        batch = self.entering_batch(row)

        def enter(part: StackPart, stream: Stream) -> Stream:
            before = self.own_stream(self.parts[part.number - 1], stream) if part.number else {}
            return self.full_stream(part.stack.enter(self.embed, before, batch))

        for part in self.parts:
            begins = row["stage"] == self.stages.first_stage(part.number)
            received = jax.lax.cond(
                begins, lambda s=received, p=part: enter(p, s), lambda s=received: s
            )
        return received

    def count_sums(
        self,
        state: State,
        part: StackPart,
        index: jax.Array,
        loss: jax.Array | None,
        others: Sums,
        again: jax.Array | bool,
    ) -> State:
        """Adds the sums of a layer, once per micro-batch."""
        if not part.stack.sums:
            return state
        own = {name: state.sums[name] for name in sum_shapes(part.stack)}
        more = add_layer_sums(part.stack, own, index, loss, others)
        more = jax.tree.map(lambda new, old: jnp.where(again, old, new), more, own)
        return state._replace(sums={**state.sums, **more})

    def shared(self, state: State, row: Row) -> dict[str, Stream]:
        """The shared arrays of each stack, for a backward pass."""
        if not any(part.stack.shared for part in self.parts):
            return {part.name: {} for part in self.parts}
        received = at(state.buffers["received"], row["residual_w"])
        stream = self.entered(received, row)
        return {part.name: {n: stream[n] for n in part.stack.shared} for part in self.parts}

    def own_stream(self, part: StackPart, stream: Stream) -> Stream:
        """A stack's arrays of the union of streams."""
        return {name: stream[name] for name in (*part.stack.carried, *part.stack.shared)}

    def full_stream(self, stream: Stream) -> Stream:
        """The union of all stacks' arrays, with zeros for arrays missing in `stream`."""
        return self.cast_stream(
            {
                name: stream[name] if name in stream else jnp.zeros(x.shape, x.dtype)
                for name, x in self.stream.items()
            }
        )

    def cast_stream(self, stream: Stream) -> Stream:
        return {name: x.astype(self.stream[name].dtype) for name, x in stream.items()}

    def is_here(self, row: Row, part: StackPart, condition: jax.Array) -> jax.Array:
        """The condition, and that the row's chunk is of this stack."""
        if len(self.stages.stacks) == 1:
            return condition
        return condition & (self.chunks["stack"][row["chunk"]] == part.number)

    def scope(self, name: str, part: StackPart) -> str:
        return self.stages.scope(name, part.number)

    def layer_index(self, row: Row, index: jax.Array) -> jax.Array:
        """A layer's index in its stack, from its index in the chunk."""
        return self.chunks["first"][row["chunk"]] + index

    def first_row(self, row: Row) -> Index:
        """The chunk's first row among its stack's rows on this rank."""
        if len(self.stages.stacks) == 1:
            return row["chunk"] * self.stages.capacity()
        return self.chunks["begin"][row["chunk"]]

    def layer_weights(self, state: State, row: Row, part: StackPart, index: jax.Array) -> Tree:
        """One layer of the chunk, gathered, as its block reads it."""
        return unpack_weights(self._gathered_layer(state, row, part, index), part.stack.stored)

    def _gathered_layer(self, state: State, row: Row, part: StackPart, index: jax.Array) -> Tree:
        if self.only_chunk is not None:
            return at(self.only_chunk[part.name], index)
        if state.weights is not None:
            return at(state.weights[part.name], self.first_gathered(row, part) + index)
        shards = at(part.layers, self.first_row(row) + index)
        return self.zero.gather(shards, self.zero.layer_axes(part.name))

    def first_gathered(self, row: Row, part: StackPart) -> Index:
        """The chunk's first row among gathered weights, which may be of several chunks."""
        several = self.program.columns["weights"].max() > 0
        return row["weights"] * self.stages.capacity(part.number) if several else 0

    def chunk_weights(self, part: StackPart, begin: Index) -> Tree:
        size = self.stages.capacity(part.number)
        shards = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, begin, size), part.layers)
        return self.zero.gather(shards, self.zero.axes[part.name])

    def add_gradients(
        self, state: State, row: Row, part: StackPart, index: jax.Array, dweights: Tree
    ) -> State:
        """Adds a layer's gradients to their accumulators."""
        name, dweights = part.name, stored_gradients(dweights, part.stack.stored)
        if state.pending is not None:
            rows = jax.tree.map(lambda grad: grad[None], dweights)
            pending = add_rows(state.pending[name], index, rows)
            return state._replace(pending={**state.pending, name: pending})
        grads = self.zero.reduce(dweights, self.zero.layer_axes(name))
        rows = jax.tree.map(lambda grad: grad[None], grads)
        summed = add_rows(state.grads[name], self.first_row(row) + index, rows)
        return state._replace(grads={**state.grads, name: summed})

    def read_memory(
        self, state: State, row: Row, name: str, part: StackPart, index: jax.Array, first: jax.Array
    ) -> Stream:
        """A layer's memory or its gradients, by the name of the buffer; zeros for the `first`
        segment that uses the slot; {} without segments."""
        kept = self.read(state, row, name, part, index)
        found = {key: jnp.where(first, jnp.zeros_like(x), x) for key, x in kept.items()}
        # Read once: XLA:CPU (jaxlib 0.12) copies a buffer that two kernels read and one updates.
        return jax.lax.optimization_barrier(found)

    def read(self, state: State, row: Row, name: str, part: StackPart, index: jax.Array) -> Tree:
        def one(buffer: jax.Array) -> jax.Array:
            value = at(buffer, row[name], index)
            return self._in_order(from_host(value) if self.on_host(name, value) else value)

        return jax.tree.map(one, state.buffers[name][part.name])

    def write(
        self,
        state: State,
        row: Row,
        name: str,
        part: StackPart,
        index: jax.Array,
        values: Tree,
    ) -> State:
        def one(buffer: jax.Array, value: jax.Array) -> jax.Array:
            value = self._in_order(value)
            value = to_host(value) if self.on_host(name, value) else value
            return put(buffer, value, row[name], index)

        written = jax.tree.map(one, state.buffers[name][part.name], values)
        buffers = {**state.buffers[name], part.name: written}
        return state._replace(buffers={**state.buffers, name: buffers})

    def on_host(self, name: str, value: jax.Array | jax.ShapeDtypeStruct) -> bool:
        """Whether a buffer has a layer's value in host memory.

        Args:
          value: of one layer.
        """
        # Not vectors: the compiler for TPUs (libtpu 0.0.50 and 0.0.52) aborts on their transfers to
        # and from [slots, layers, n], of which a tile spans several layers.
        return self.offload and name in OFFLOADED and value.ndim > 1

    def _in_order(self, x: jax.Array) -> jax.Array:
        # For TPUs: each loop over layers would choose a layout of the buffers that it carries, and
        # XLA would copy the buffers from one layout to the other between loops.
        return (
            with_layout_constraint(x, DimensionOrder(major_to_minor=tuple(range(x.ndim))))
            if self.row_major
            else x
        )


def when(condition: jax.Array, function: Callable[[Tree], Tree], state: Tree, scope: str) -> Tree:
    """`function(state)` if the condition is true, else `state`; in place, with the same types.

    Args:
      scope: the loop's name in the compiled program.
    """
    # A loop of zero or one trips. With `lax.cond` XLA copies the buffers that it carries in every
    # tick; a while loop updates them in place.
    return repeat(condition.astype(jnp.int32), lambda state, _: function(state), state, scope)


def repeat(
    trips: jax.Array, function: Callable[[Tree, jax.Array], Tree], state: Tree, scope: str
) -> Tree:
    """`function(state, trip)` so many times, as `when`."""
    with jax.named_scope(scope):
        return jax.lax.while_loop(
            lambda carry: carry[0] < trips,
            lambda carry: (carry[0] + 1, function(carry[1], carry[0])),
            (jnp.zeros((), jnp.int32), state),
        )[1]
