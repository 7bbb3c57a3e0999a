"""A run's pipeline: its table, and which layers live where. NumPy only."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxscale.layout import Layout
from jaxscale.pipeline.buffer_slots import TickProgram, make_program
from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.simulator import Costs, simulate
from jaxscale.pipeline.table import Ops, Table, compile_order, replay
from jaxscale.pipeline_schedules.operations import B, F, Order, R, W, X
from jaxscale.pipeline_schedules.shipped import RUNNABLE

OPERATIONS = {F: "pipeline_F", R: "pipeline_R", B: "pipeline_B", W: "pipeline_W", X: "pipeline_X"}
GATHER, REDUCE = "pipeline_gather", "pipeline_reduce"
HEAD, EMBEDDING, LAYERS = "pipeline_head", "pipeline_embedding", "pipeline_layers"
"""Names, in a compiled program, of the executor's loops, whose trip counts the table gives."""


@dataclass(frozen=True, eq=False)
class PipelineStages:
    """What every rank of the pipeline does and holds.

    A rank's layers are stacked chunk by chunk, each chunk filled up to `capacity` layers: the
    stack of the whole pipeline is that of rank 0, then that of rank 1, and so on.
    """

    table: Table
    program: TickProgram
    layers: tuple[int, ...]  # of each virtual stage
    head_cost: float = 0.0  # FLOPs of the head over those of a layer

    @functools.cached_property
    def forward_program(self) -> TickProgram:
        """The forward operations alone, for evaluation."""
        ops, needs = self.table.ops, self.table.needs
        kept = np.flatnonzero(ops.kind == F)
        place = np.full(len(ops.kind) + 1, -1)  # the last one for a need of -1
        place[kept] = np.arange(len(kept))
        ops, needs, step = Ops(*(field[kept] for field in ops)), place[needs[kept]], place[kept]
        ends = replay(ops.rank, step, needs, np.ones(len(kept)))
        return make_program(Table(self.table.order, ops, needs, step, ends.astype(np.int64) - 1))

    @property
    def costs(self) -> Costs:
        """Of each stage's operations, where a layer's forward pass costs 1."""
        return _costs(self.table, self.layers, self.head_cost)

    @property
    def trips(self) -> dict[str, float]:
        """The trip count of each of the executor's loops, on average over ranks and ticks."""
        columns, stages = self.program.columns, self.table.order.stages
        cells = columns["kind"].size
        trips = {
            name: np.count_nonzero(columns["kind"] == kind) / cells
            for kind, name in OPERATIONS.items()
        }
        for name, column in ((GATHER, "gather"), (REDUCE, "reduce")):
            trips[name] = np.count_nonzero(columns[column] == 1) / cells
        # Of the operations of a kind, the last stage and the first have one in `stages` each.
        return {
            **trips,
            HEAD: 1 / stages,
            EMBEDDING: 1 / stages,
            LAYERS: sum(self.layers) / stages,
        }

    @property
    def recomputed(self) -> float:
        """Of all passes through a chunk, the share that is recomputed."""
        counts = np.bincount(self.table.ops.kind, minlength=X + 1)
        return float(counts[R] / counts[F])

    @property
    def capacity(self) -> int:
        """Layers that a chunk has room for."""
        return max(self.layers)

    @property
    def counts(self) -> np.ndarray:
        """int32 [ranks, chunks], layers of each chunk."""
        order = self.table.order
        return np.array(self.layers, np.int32)[chunk_stages(order)]

    @property
    def layer_of_row(self) -> np.ndarray:
        """int [ranks * chunks * capacity], the layer in each row of the stack; -1 for none."""
        first = np.cumsum([0, *self.layers[:-1]])[chunk_stages(self.table.order)][..., None]
        place = np.arange(self.capacity)
        return np.where(place < self.counts[..., None], first + place, -1).reshape(-1)


def open_stages(layout: Layout, num_layers: int, head_cost: float = 0.0) -> PipelineStages:
    """The pipeline of a resolved layout.

    Args:
      head_cost: FLOPs of the head over those of a layer.

    Raises:
      ValueError: the schedule does not support the layout, or there are too few layers; names
        what to change.
    """
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
        said = _as_settings(str(error))
        raise ValueError(f"layout.schedule = {spec.name!r}{remat}: {said}") from None
    check_runnable(order)
    table = compile_order(order)
    if num_layers < order.stages:
        raise ValueError(
            f"model.num_layers = {num_layers} is less than the {order.stages} stages of "
            f"layout.pipeline = {order.ranks} x {order.virtual_stages} chunks; each has at least "
            f"one layer: set model.num_layers = {order.stages}, or layout.pipeline = "
            f"{max(1, num_layers // order.virtual_stages)}"
        )
    if spec.layers:
        _check_layers(spec.layers, order, num_layers)
    layers = spec.layers or partition_layers(table, num_layers, head_cost)
    return PipelineStages(table, make_program(table), layers, head_cost)


def check_runnable(order: Order) -> None:
    """Refuses orders that a table can hold and the executor cannot run yet.

    Raises:
      ValueError: names what it cannot run, and the schedules that it can.
    """
    ops = [op for row in order.rows for op in row]
    missing = {
        "sequence chunks": order.sequence_chunks > 1,
        "two directions": any(op.direction for op in ops),
        "overlapped pairs": any(op.paired for op in ops),
    }
    for what, asked in missing.items():
        if asked:
            raise ValueError(
                f"layout.schedule = {order.name!r} has {what}, which this version draws but does "
                f"not run; it runs {', '.join(RUNNABLE)}, and orders from a .csv file without them"
            )


def partition_layers(table: Table, num_layers: int, head_cost: float) -> tuple[int, ...]:
    """Layers of each virtual stage: the shortest step and, of those, the most even partition.

    The head's work, forward and backward, is in the last stage's B; with it, that stage may be
    better off with fewer layers than the others. The simulator decides.

    Args:
      head_cost: FLOPs of the head over those of a layer.
    """
    found = candidate_partitions(num_layers, table.order.stages)
    makespans = [simulate(table, _costs(table, n, head_cost)).lockstep_makespan for n in found]
    return found[best_partition(found, makespans)]


def candidate_partitions(num_layers: int, stages: int) -> list[tuple[int, ...]]:
    """Ways to divide layers over stages: any number in the last, the others as even as possible."""

    def partition(last: int) -> tuple[int, ...]:
        each, more = divmod(num_layers - last, stages - 1)
        # The first stage has the embedding, so it is the last to get one more.
        extra = [int(n < more) for n in (*range(stages - 2), stages - 2)]
        return (each + extra[-1], *(each + n for n in extra[:-1]), last)

    return [partition(last) for last in range(1, -(-num_layers // stages) + 1)]


def best_partition(partitions: Sequence[tuple[int, ...]], makespans: Sequence[float]) -> int:
    """The one with the shortest makespan and, of those as short to nine digits, the most even."""
    shortest = min(makespans)
    short = [n for n, one in enumerate(makespans) if one <= shortest * (1 + 1e-9)]
    return min(short, key=lambda n: max(partitions[n]) - min(partitions[n]))


def _costs(table: Table, layers: tuple[int, ...], head_cost: float) -> Costs:
    """A layer costs 1 in each of F, B and W, and in R where there is one."""
    each = tuple(map(float, layers))
    recompute = each if (table.ops.kind == R).any() else 0.0
    return Costs(f=each, b=(*each[:-1], each[-1] + 3 * head_cost), w=each, r=recompute)


def chunk_stages(order: Order) -> np.ndarray:
    """int [ranks, chunks], the virtual stage that is each chunk of each rank."""
    stages = np.zeros((order.ranks, order.virtual_stages), np.int64)
    for stage in range(order.stages):
        stages[order.rank_of(stage, 0), stage // order.ranks] = stage
    return stages


def _check_layers(layers: tuple[int, ...], order: Order, num_layers: int) -> None:
    got = ",".join(map(str, layers))
    if len(layers) != order.stages:
        raise ValueError(
            f"layout.schedule deals layers {got} to {len(layers)} stages, and there are "
            f"{order.stages}: layout.pipeline = {order.ranks} x {order.virtual_stages} chunks"
        )
    if sum(layers) != num_layers:
        raise ValueError(
            f"layout.schedule deals {got}, {sum(layers)} layers together, and model.num_layers = "
            f"{num_layers}"
        )


def _as_settings(text: str) -> str:
    """An error about an order, with the names of the layout's settings."""
    return re.sub(r"\bstages\b", "pipeline", text)
