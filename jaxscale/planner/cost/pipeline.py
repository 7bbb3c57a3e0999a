"""What a pipeline adds to a step: the split of layers, sends, and the bubble."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

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
        ends = 2 * parallelism.traits.balanced_ends
        most = np.ceil((work.layers + ends * (p > 1)) / (p * v)) * v
        if parallelism.traits.balanced_ends:
            last = np.where(p > 1, most - 1, work.layers)
        else:
            last = np.where(p > 1, np.maximum(0, work.layers - (p - 1) * most), work.layers)
            last = np.where(work.layers % (p * v) == 0, most, last)
        return cls(np.where(p > 1, most, float(work.layers)), last, work.layers)


@dataclass(frozen=True)
class PipelineOverhead:
    """What a pipeline adds to the busiest rank's own work, in seconds of a step."""

    bubble: Floats
    messages: Floats
    head_here: Floats  # 1 where the busiest rank has the head


CLOSED_FORMS = ("gpipe", "1f1b", "interleaved", "breadth_first")
"""Schedules with a closed form for their time where ranks do not run in lockstep."""


def pipeline_overhead(
    parallelism: Parallelism,
    passes: dict[str, LayerPass],
    layer: LayerCompute,
    sent: LayerTraffic,
    stages: StageLayers,
    waits: bool,
) -> PipelineOverhead:
    """What a pipeline adds to the busiest rank's own work."""
    p, v = np.asarray(parallelism.pipeline), np.asarray(parallelism.virtual_stages, float)
    m = np.asarray(parallelism.microbatches, float)
    one = sum(each.seconds for each in passes.values())
    head = layer.head_forward.seconds + layer.head_backward.seconds
    middle, last = stages.busiest * one, stages.last * one + head
    head_here = np.where((p == 1) | (last >= middle), 1.0, 0.0)
    busiest = np.where(p > 1, np.maximum(middle, last), last)
    if np.all(p == 1) or not waits:
        return PipelineOverhead(0.0, 0.0, head_here)
    each = 0.0 if parallelism.traits.overlap_pipeline else 2 * sent.message * v
    if parallelism.traits.lockstep or parallelism.schedule not in CLOSED_FORMS:
        most = int(np.max(p * parallelism.virtual_stages))
        total = _table_seconds(
            parallelism,
            stage_operation_seconds(stages, parallelism, passes, layer, sent.message, most),
        )
        total = np.where(p > 1, total, m * busiest)
        return PipelineOverhead(np.maximum(0.0, total - m * busiest), np.zeros(()), head_here)
    # Without lockstep the busiest rank works all the time once the pipeline is filled.
    other = np.where(head_here == 1, middle, one * stages.total / p)
    turns = (p - 1) / v
    if parallelism.schedule == "breadth_first":  # ranks wait for a chunk's micro-batches
        turns = turns + np.maximum(0.0, p - m) * (v - 1) / v
    fill = turns * (other + 2 * sent.message * v)
    return PipelineOverhead(np.where(p > 1, fill, 0.0), np.where(p > 1, m * each, 0.0), head_here)


def stage_operation_seconds(
    stages: StageLayers,
    parallelism: Parallelism,
    passes: dict[str, LayerPass],
    layer: LayerCompute,
    message: Floats,
    count: int,
) -> table_makespan.OperationSeconds:
    """Seconds of operations with layers split evenly over virtual stages; the last also has the
    head.

    Every operation of our executor ends with an exchange of messages. Full recompute is an
    operation of its own (R); partial recompute is part of B.

    Args:
      count: of stages to return, the last of which has the head; all others are alike.
    """
    share = stages.total / np.asarray(parallelism.pipeline)  # of a rank
    seconds = {name: one.seconds for name, one in passes.items()}
    if parallelism.remat != "full":
        seconds["input"] = seconds["input"] + seconds["recompute"]
        seconds["recompute"] = 0.0

    def by_stage(name: str, head: Floats) -> np.ndarray:
        v = np.asarray(parallelism.virtual_stages)
        each = np.asarray(share * seconds[name], float)
        each = np.where(each > 0, each + message * v, 0.0)
        costs = np.repeat(each[..., None], count, axis=-1)
        costs[..., -1] = costs[..., -1] + v * head
        return costs

    up, down = layer.head_forward.seconds, layer.head_backward.seconds
    # Our last stage computes the loss and its gradients in one operation.
    f, b, w = (0.0, up + down, 0.0) if parallelism.traits.lockstep else (up, down / 2, down / 2)
    return table_makespan.OperationSeconds(
        f=by_stage("forward", f),
        b=by_stage("input", b),
        w=by_stage("weights", w),
        r=by_stage("recompute", 0.0),
    )


def tick_seconds(parallelism: Parallelism, each: TickCollectives) -> Floats:
    """What ranks gather and reduce within the ticks of their tables, seconds of a step."""
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
        total[rows] = table_makespan.makespan(
            spec, table_makespan.OperationSeconds(*mine), lockstep=parallelism.traits.lockstep
        )
    return total.reshape(shape)


def _columns(parallelism: Parallelism) -> tuple[Floats, ...]:
    return parallelism.pipeline, parallelism.microbatches, parallelism.virtual_stages


def _tables(
    parallelism: Parallelism, shape: tuple[int, ...]
) -> Iterator[tuple[TableSpec, np.ndarray]]:
    """The distinct tables of layouts, and the layouts that have each, int [rows]."""
    columns = [np.broadcast_to(one, shape).ravel() for one in _columns(parallelism)]
    keys = np.stack(columns, axis=-1).astype(int)
    keep = 0 if parallelism.remat == "full" else None
    for key in np.unique(keys[keys[:, 0] > 1], axis=0):
        p, m, v = key.tolist()
        spec = TableSpec(parallelism.schedule, p, m, v, parallelism.fused, keep)
        yield spec, np.flatnonzero((keys == key).all(axis=1))
