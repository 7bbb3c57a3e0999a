"""The pipeline of a run: its table, and the layers of each stage and rank. NumPy only."""

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxscale.config.layout import Layout
from jaxscale.pipeline.buffer_slots import HEAD_RANK, TickProgram, head_columns, make_program
from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.partition import (
    StackLayers,
    assign_stages,
    check_enough,
    check_layers,
    partition_layers,
    stack_shares,
    stage_costs,
)
from jaxscale.pipeline.simulator import Run, simulate
from jaxscale.pipeline.table import Ops, Table, compile_order, replay
from jaxscale.pipeline_schedules.operations import NOP, B, F, Order, R, W, X

OPERATIONS = {F: "pipeline_F", R: "pipeline_R", B: "pipeline_B", W: "pipeline_W", X: "pipeline_X"}
GATHER, REDUCE = "pipeline_gather", "pipeline_reduce"
HEAD, EMBEDDING = "pipeline_head", "pipeline_embedding"
PAIR, PAIRED_LAYERS, PAIR_ALONE = "pipeline_pair", "pipeline_pair_layers", "pipeline_pair_alone"
LAYERS, KIND = "pipeline_layers", "pipeline_kind"
"""Names, in a compiled program, of the executor's loops, with trip counts known from the table."""


@dataclass(frozen=True, eq=False)
class PipelineStages:
    """The operations and layers of every rank of the pipeline.

    A virtual stage has layers of one of the model's stacks. The parameters of a stack are stacked
    by rank, then by chunk, with each chunk padded to the stack's `capacity`.
    """

    table: Table
    program: TickProgram
    layers: tuple[int, ...]  # of each virtual stage
    head_cost: float = 0.0  # FLOPs of the head relative to a layer
    stacks: tuple[StackLayers, ...] = ()  # of the model
    stack_of_stage: tuple[int, ...] = ()  # the index of each virtual stage's stack
    by_layer: bool = False  # whether weights are gathered and gradients reduced by layer, not chunk
    slices_head: bool = False  # whether all ranks compute the head, each a slice
    segment_parts: tuple[int, ...] = ()  # of segments of several lengths (`Layout.segment_parts`)

    @functools.cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """The columns that the executor scans: int32 [ticks, ranks, ...]."""
        found = self.program.columns
        return found | head_columns(self.table, self.program) if self.slices_head else found

    @functools.cached_property
    def forward_program(self) -> TickProgram:
        """The forward operations only, for evaluation."""
        ops, needs = self.table.ops, self.table.needs
        kept = np.flatnonzero(ops.kind == F)
        index = np.full(len(ops.kind) + 1, -1)  # the last entry for a need of -1
        index[kept] = np.arange(len(kept))
        ops, needs, step = Ops(*(field[kept] for field in ops)), index[needs[kept]], index[kept]
        ops = ops._replace(paired=np.zeros_like(step))
        ends = replay(ops.rank, step, needs, np.ones(len(kept)))
        table = Table(self.table.order, ops, needs, step, ends.astype(np.int64) - 1)
        return make_program(table, self.segment_parts)

    @functools.cached_property
    def joint_pairs(self) -> tuple[tuple[int, int], ...]:
        """The kinds of overlapped pairs that are one operation, with one loop over the layers of
        both: of a forward and a backward pass, in a model of one stack. Otherwise, (): a pair is
        two operations, one after the other."""
        kinds = self.program.columns["kind"]
        if kinds.shape[-1] == 1:
            return ()
        found = {tuple(pair) for pair in kinds.reshape(-1, 2).tolist() if pair[1] != NOP}
        joint = found <= set(itertools.product((F, R), (B, X)))
        can = joint and len(self.stacks) == 1 and self.whole_periods(0)
        return tuple(sorted(found)) if can else ()

    @property
    def simulated(self) -> Run:
        """The simulated step, in units of a layer's forward pass."""
        own, shared = self.head_cost, 0.0
        if self.slices_head:
            own, shared = 0.0, 3 * self.head_cost / self.table.order.ranks
        costs = stage_costs(self.table, self.layers, own)
        return simulate(self.table, costs, shared_head=shared)

    @property
    def trips(self) -> dict[str, float]:
        """The trip count of each of the executor's loops, on average over ranks and ticks."""
        columns, stages = self.program.columns, self.table.order.stages
        ticks, ranks, lanes = columns["kind"].shape
        cells = ticks * ranks * lanes
        trips, kinds = self._pair_trips, columns["kind"]
        if trips:
            kinds = np.where(kinds[..., 1] == NOP, kinds[..., 0], NOP)[..., None]
        for kind, name in OPERATIONS.items():
            here = kinds == kind
            loops = max(1, np.count_nonzero(here.any(axis=(0, 1))))  # one in each lane that has it
            trips[name] = columns["parts"][..., : here.shape[-1]][here].sum() / (
                ticks * ranks * loops
            )
        stack = self.stage_stacks[columns["stage"]]
        for number in range(len(self.stacks)):
            for name, column in ((GATHER, "gather"), (REDUCE, "reduce")):
                here = (columns[column] == 1) & (stack == number)
                trips[self.scope(name, number)] = np.count_nonzero(here) / cells
        # One in `stages` of the operations is in the last stage, and one in the first.
        trips |= {HEAD: 1 / stages, EMBEDDING: 1 / stages}
        if self.slices_head:
            trips[HEAD] = float((self.columns[HEAD_RANK] >= 0).mean())
        for number, one in enumerate(self.stacks):
            mine = np.array(self.layers)[self.stage_stacks == number]
            periods = -(-mine // one.period)
            trips[self.scope(LAYERS, number)] = float(periods.sum()) / stages
        return {**trips, KIND: 1.0}

    @property
    def _pair_trips(self) -> dict[str, float]:
        """The trip counts of pairs that are one operation: of one pair, of the loop over layers of
        both, and of the loops over the remaining layers of one."""
        if not self.joint_pairs:
            return {}
        columns = self.program.columns
        cells = columns["kind"][..., 1] != NOP
        periods = -(-np.array(self.layers) // self.stacks[0].period)[columns["stage"][cells]]
        both = periods.min(axis=-1)
        return {
            PAIR: float(cells.mean()) / len(self.joint_pairs),
            PAIRED_LAYERS: float(both.mean()),
            PAIR_ALONE: float((periods.mean(axis=-1) - both).mean()),
        }

    def scope(self, name: str, number: int) -> str:
        """The name of one stack's loops in a compiled program."""
        return name if len(self.stacks) == 1 else f"{name}_{self.stacks[number].name}"

    @property
    def recomputed(self) -> float:
        """The fraction of a chunk's passes that are recomputed."""
        counts = np.bincount(self.table.ops.kind, minlength=X + 1)
        return float(counts[R] / counts[F])

    @property
    def stage_stacks(self) -> np.ndarray:
        """int [stages], the index of each virtual stage's stack."""
        return np.array(self.stack_of_stage, np.int64)

    def capacity(self, number: int = 0) -> int:
        """Layers per chunk, padding included, of the stack with this number."""
        return int(np.array(self.layers)[self.stage_stacks == number].max())

    def whole_periods(self, number: int) -> bool:
        """Whether each chunk of a stack has whole periods of its layers."""
        mine = np.array(self.layers)[self.stage_stacks == number]
        return not (mine % self.stacks[number].period).any()

    def first_stage(self, number: int) -> int:
        """The first virtual stage of a stack."""
        return self.stack_of_stage.index(number)

    @property
    def num_parts(self) -> int:
        """Parts of a sequence: its segments, or parts of these."""
        return sum(self.segment_parts) or self.table.order.sequence_chunks

    @property
    def most_parts(self) -> int:
        """Parts of the longest segment."""
        return max(self.segment_parts, default=1)

    @property
    def has_one_chunk(self) -> bool:
        """Whether every rank runs the layers of one chunk only."""
        return self.table.order.virtual_stages * self.table.order.directions == 1

    @property
    def counts(self) -> np.ndarray:
        """int32 [ranks, chunks], layers of each chunk at rest."""
        order = self.table.order
        return np.array(self.layers, np.int32)[chunk_stages(order)]

    @property
    def chunks(self) -> dict[str, np.ndarray]:
        """Properties of each chunk, int32 [ranks, chunks]: `count`, its layers; `stack`, the index
        of their stack; `first`, its first layer's index in the stack; `begin`, its first row among
        the rank's rows. With two directions the chunks and rows of the mirrored rank follow."""
        found = self._chunks_at_rest
        if self.table.order.directions == 1:
            return found
        mirrored = {name: array[::-1] for name, array in found.items()}
        own_rows = self._rows_at_rest(found)[found["stack"]]
        mirrored["begin"] = mirrored["begin"] + own_rows[::-1]
        return {name: np.concatenate([found[name], mirrored[name]], axis=1) for name in found}

    @functools.cached_property
    def _chunks_at_rest(self) -> dict[str, np.ndarray]:
        chosen, stacks = chunk_stages(self.table.order), self.stage_stacks
        first, begin = np.zeros(len(stacks), np.int64), np.zeros(chosen.shape, np.int64)
        for number in range(len(self.stacks)):
            mine = stacks == number
            first[mine] = np.cumsum([0, *np.array(self.layers)[mine][:-1]])
            held = stacks[chosen] == number
            begin[held] = ((np.cumsum(held, axis=1) - 1) * self.capacity(number))[held]
        at_rest = {
            "count": self.counts,
            "stack": stacks[chosen],
            "first": first[chosen],
            "begin": begin,
        }
        return {name: array.astype(np.int32) for name, array in at_rest.items()}

    def _rows_at_rest(self, chunks: dict[str, np.ndarray]) -> np.ndarray:
        """int [stacks], the rows of each stack on a rank, padding included."""
        held = [int((chunks["stack"] == n).sum(axis=1).max()) for n in range(len(self.stacks))]
        return np.array([h * self.capacity(n) for n, h in enumerate(held)], np.int32)

    @property
    def layer_of_row(self) -> dict[str, np.ndarray]:
        """For each stack, int [ranks * chunks * capacity]: the layer in each row of its parameters,
        -1 for padding."""
        chunks, rows = self._chunks_at_rest, {}
        ranks, sizes = len(self.counts), self._rows_at_rest(chunks)
        for number, stack in enumerate(self.stacks):
            held = chunks["stack"] == number
            table = np.full((ranks, int(sizes[number])), -1, np.int64)
            for rank, chunk in np.argwhere(held).tolist():
                begin, first = chunks["begin"][rank, chunk], chunks["first"][rank, chunk]
                count = chunks["count"][rank, chunk]
                table[rank, begin : begin + count] = np.arange(first, first + count)
            rows[stack.name] = table.reshape(-1)
        return rows


def open_stages(
    layout: Layout, stacks: int | Sequence[StackLayers], head_cost: float = 0.0
) -> PipelineStages:
    """The pipeline of a resolved layout.

    Args:
      stacks: of the model; a number is that many layers of one stack.
      head_cost: FLOPs of the head relative to a layer.

    Raises:
      ValueError: the schedule does not support the layout, or there are too few layers; names the
        setting to change.
    """
    if isinstance(stacks, int):
        stacks = [StackLayers("layers", stacks)]
    spec, keep = layout.schedule_spec, layout.remat_policy.kept_passes
    try:
        order = make_order(
            spec.name,
            layout.pipeline,
            layout.microbatches,
            layout.virtual_stages or None,
            layout.sequence_chunks,
            fused=spec.fused,
            keep=keep,
        )
    except ValueError as error:
        remat = "" if keep is None else f", layout.remat = {layout.remat!r}"
        said = re.sub(r"\bstages\b", "pipeline", str(error))  # the setting's name
        raise ValueError(f"layout.schedule = {spec.name!r}{remat}: {said}") from None
    table = compile_order(order)
    check_enough(stacks, order)
    shares = assign_stages([stack.num_layers for stack in stacks], order.stages)
    if spec.layers:
        check_layers(spec.layers, order, stacks)
        shares = stack_shares(spec.layers, stacks)
    # A head that all ranks share makes ticks longer whatever the partition.
    own_head = 0.0 if layout.slices_head else head_cost
    layers = spec.layers or partition_layers(table, stacks, shares, own_head)
    return PipelineStages(
        table,
        make_program(table, layout.segment_parts),
        layers,
        head_cost,
        tuple(stacks),
        tuple(n for n, share in enumerate(shares) for _ in range(share)),
        layout.pipeline_gather == "layer",
        layout.slices_head,
        layout.segment_parts,
    )


def chunk_stages(order: Order) -> np.ndarray:
    """int [ranks, chunks], the virtual stage of each chunk of each rank."""
    stages = np.zeros((order.ranks, order.virtual_stages), np.int64)
    for stage in range(order.stages):
        stages[order.rank_of(stage, 0), stage // order.ranks] = stage
    return stages
