"""Cost of a pipeline: the split of layers, sends, and the bubble."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.config.layout import SLICED
from jaxscale.planner.cost.communication import LayerTraffic
from jaxscale.planner.cost.layer import LayerCompute
from jaxscale.planner.cost.passes import LayerPass
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.tables import table_makespan
from jaxscale.planner.tables.state_ticks import TickCollectives, state_ticks
from jaxscale.planner.tables.table_makespan import TableSpec
from jaxscale.sharding.model_trace import ModelWork

Floats = Any  # a float, or float [N]


@dataclass(frozen=True)
class StageLayers:
    """Number of layers of pipeline ranks."""

    busiest: Floats  # of a middle rank
    last: Floats  # of the rank that also has the head
    total: int

    @classmethod
    def of(cls, work: ModelWork, parallelism: Parallelism) -> "StageLayers":
        p, v = np.asarray(parallelism.pipeline), np.asarray(parallelism.virtual_stages)
        most = np.ceil(work.layers / (p * v)) * v
        last = np.where(p > 1, np.maximum(0, work.layers - (p - 1) * most), work.layers)
        last = np.where(work.layers % (p * v) == 0, most, last)
        return cls(np.where(p > 1, most, float(work.layers)), last, work.layers)


@dataclass(frozen=True)
class BusiestRank:
    """The pipeline rank with the most work."""

    seconds: Floats  # of a micro-batch
    has_head: Floats  # 1 or 0

    @classmethod
    def of(
        cls,
        parallelism: Parallelism,
        passes: dict[str, LayerPass],
        layer: LayerCompute,
        stages: StageLayers,
    ) -> "BusiestRank":
        p, one = np.asarray(parallelism.pipeline), pass_seconds(passes)
        head = layer.head_forward.seconds + layer.head_backward.seconds
        sliced = parallelism.head == SLICED
        middle, last = stages.busiest * one + sliced * head, stages.last * one + head
        return cls(
            np.where(p > 1, np.maximum(middle, last), last),
            np.where((p == 1) | sliced | (last >= middle), 1.0, 0.0),
        )


def pass_seconds(passes: dict[str, LayerPass]) -> Floats:
    """Seconds of a micro-batch in an average layer, all passes over it."""
    return sum(each.seconds for each in passes.values())


def bubble_seconds(
    parallelism: Parallelism,
    passes: dict[str, LayerPass],
    layer: LayerCompute,
    sent: LayerTraffic,
    stages: StageLayers,
    busiest: BusiestRank,
) -> Floats:
    """Seconds that a pipeline adds to the busiest rank's own work: its sends, and idle time."""
    p, m = np.asarray(parallelism.pipeline), np.asarray(parallelism.microbatches, float)
    if np.all(p == 1):
        return 0.0
    most = int(np.max(p * parallelism.virtual_stages))
    total = _table_seconds(
        parallelism,
        stage_operation_seconds(stages, parallelism, passes, layer, sent.message, most),
    )
    total = total + m * (sliced_head_seconds(parallelism, layer) + sent.head)
    work = m * busiest.seconds
    return np.maximum(0.0, np.where(p > 1, total, work) - work)


def stage_operation_seconds(
    stages: StageLayers,
    parallelism: Parallelism,
    passes: dict[str, LayerPass],
    layer: LayerCompute,
    message: Floats,
    count: int,
) -> table_makespan.OperationSeconds:
    """Seconds of operations with layers split evenly over virtual stages; the last also has the
    head, unless all ranks share it (`sliced_head_seconds`).

    Every operation of our executor ends with an exchange of messages. Full recompute is a
    separate operation (R); partial recompute is part of B.

    Args:
      count: number of stages to return, the last with the head; all others are equal.
    """
    share = stages.total / np.asarray(parallelism.pipeline)  # of a rank
    seconds = {name: one.seconds for name, one in passes.items()}
    if parallelism.remat != "full":
        seconds["input"] = seconds["input"] + seconds["recompute"]
        seconds["recompute"] = 0.0

    def by_stage(name: str, head: Floats) -> np.ndarray:
        v = np.asarray(parallelism.virtual_stages)
        each = np.asarray(share * seconds[name], float)
        # A chunk takes 1/v of these seconds, and each of its operations sends one message.
        each = np.where(each > 0, each + message * v, 0.0)
        costs = np.repeat(each[..., None], count, axis=-1)
        costs[..., -1] = costs[..., -1] + v * head
        return costs

    # Our last stage computes the loss and its gradients in one operation.
    head = layer.head_forward.seconds + layer.head_backward.seconds
    head = 0.0 if parallelism.head == SLICED else head
    return table_makespan.OperationSeconds(
        f=by_stage("forward", 0.0),
        b=by_stage("input", head),
        w=by_stage("weights", 0.0),
        r=by_stage("recompute", 0.0),
    )


def sliced_head_seconds(parallelism: Parallelism, layer: LayerCompute) -> Floats:
    """Seconds of a micro-batch's head in ticks of all ranks, each of which has a slice; 0 if one
    rank has the head."""
    sliced = parallelism.head == SLICED
    return sliced * (layer.head_forward.seconds + layer.head_backward.seconds)


def tick_seconds(parallelism: Parallelism, each: TickCollectives) -> Floats:
    """Seconds per step of gathers and reductions within the ticks of the tables."""
    if not any(np.any(one) for one in each):
        return np.zeros(())
    shape = np.broadcast_shapes(*(np.shape(one) for one in (*each, *_columns(parallelism))))
    flat = [np.broadcast_to(one, shape).ravel() for one in each]
    total = np.zeros(flat[0].size)
    for spec, rows in _tables(parallelism, shape):
        total[rows] = state_ticks(spec).seconds(TickCollectives(*(one[rows] for one in flat)))
    return total.reshape(shape)


def _table_seconds(parallelism: Parallelism, costs: table_makespan.OperationSeconds) -> np.ndarray:
    """The makespan of each layout by its table."""
    shape = np.broadcast_shapes(*(np.shape(c) for c in _columns(parallelism)), costs.f.shape[:-1])
    flat = [np.broadcast_to(c, (*shape, c.shape[-1])).reshape(-1, c.shape[-1]) for c in costs]
    total = np.zeros(len(flat[0]))
    for spec, rows in _tables(parallelism, shape):
        # The head is the last entry, however many stages another layout of the arrays has.
        mine = [np.concatenate([c[rows, : spec.stages - 1], c[rows, -1:]], axis=-1) for c in flat]
        total[rows] = table_makespan.makespan(spec, table_makespan.OperationSeconds(*mine))
    return total.reshape(shape)


def _columns(parallelism: Parallelism) -> tuple[Floats, ...]:
    sizes = parallelism.pipeline, parallelism.microbatches, parallelism.virtual_stages
    return *sizes, parallelism.segments


def _tables(
    parallelism: Parallelism, shape: tuple[int, ...]
) -> Iterator[tuple[TableSpec, np.ndarray]]:
    """The distinct tables of layouts, and the layouts that have each, int [rows]."""
    columns = [np.broadcast_to(one, shape).ravel() for one in _columns(parallelism)]
    keys = np.stack(columns, axis=-1).astype(int)
    keep, parts = 0 if parallelism.remat == "full" else None, parallelism.segment_parts
    for key in np.unique(keys[keys[:, 0] > 1], axis=0):
        p, m, v, k = key.tolist()
        how = parallelism.fused, keep, len(parts) or k, parts
        spec = TableSpec(parallelism.schedule, p, m, v, *how)
        yield spec, np.flatnonzero((keys == key).all(axis=1))
