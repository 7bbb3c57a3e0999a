"""Pipelines of a batch of layouts: the layers of each stage, a rank's buffers, and the step time.

Layouts that differ in other axes share their table, so each distinct pipeline is computed once.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config.layout import SLICED
from jaxscale.pipeline_schedules.shipped import find_schedule, is_foreign
from jaxscale.planner.cost.step import step_cost
from jaxscale.planner.cost.uneven_pipeline import UnevenPipelineCost
from jaxscale.planner.model.layout_batch import SETTINGS, LayoutBatch, stack_layouts
from jaxscale.planner.search.sized_model import SizedModel
from jaxscale.planner.search.space import Query
from jaxscale.planner.search.trainable_model import TrainableModel
from jaxscale.planner.tables.pipeline_slots import (
    RankBuffers,
    busiest_rank_buffers,
    default_stage_layers,
    join_buffers,
    most_slots,
    stack_buffers,
)
from jaxscale.planner.tables.state_ticks import state_ticks
from jaxscale.planner.tables.table_makespan import TableSpec, count_copies


class PipelineBatch(NamedTuple):
    """The distinct pipelines of N layouts."""

    specs: list[TableSpec]
    layers: list[tuple[int, ...]]  # of each spec, the layers of each virtual stage
    buffers: list[RankBuffers]  # of each spec, those of the busiest rank
    index: np.ndarray  # int [N], the spec of each layout

    def take(self, mask: np.ndarray) -> "PipelineBatch":
        """The pipelines of some of the layouts."""
        return self._replace(index=self.index[mask])


def make_pipelines(model: TrainableModel | SizedModel, layouts: LayoutBatch) -> PipelineBatch:
    """The pipelines, one for each combination of ranks, micro-batches and virtual stages."""
    specs, index = _distinct_tables(layouts)
    schedule, layers, buffers = layouts.schedule_spec, [], []
    head_cost = 0.0 if layouts.head == SLICED else model.head_cost
    for spec in specs:  # one table after the other: there are too many to keep
        layers.append(schedule.layers or default_stage_layers(spec, model.stacks, head_cost))
        buffers.append(busiest_rank_buffers(spec, layers[-1], model.stacks))
        state_ticks(spec)
    return PipelineBatch(specs, layers, buffers, index)


def least_seconds(query: Query, batches: Sequence[LayoutBatch]) -> list[np.ndarray]:
    """For each batch float [N]: lower bounds on the seconds of a step, as if no rank ever idled."""
    found = []
    for several in _equal_settings(batches, lambda layouts: layouts.schedule_spec.name):
        found += _split(uneven_cost(query, stack_layouts(several)).bound(), several)
    return found


def least_peaks(query: Query, batches: Sequence[LayoutBatch]) -> list[np.ndarray]:
    """For each batch float [N]: lower bounds on the peak bytes of a device for any split of the
    layers, by tables of few micro-batches."""
    model, found = query.planned_model, []
    for several in _equal_settings(batches):
        joined = stack_layouts(several)
        buffers = join_buffers([_least_buffers(model, layouts) for layouts in several])
        peaks = model.memory(joined, buffers, query.back_end).peak
        found += _split(np.broadcast_to(peaks, (len(joined),)), several)
    return found


def _equal_settings(
    batches: Sequence[LayoutBatch], more: Callable[[LayoutBatch], Any] = lambda layouts: None
) -> Iterator[list[LayoutBatch]]:
    """Groups of consecutive batches with equal settings, except for integers and the schedule."""

    def settings(layouts: LayoutBatch) -> tuple:
        others = (getattr(layouts, name) for name in SETTINGS if name != "schedule")
        return (more(layouts), *others)

    for _, several in itertools.groupby(batches, settings):
        yield list(several)


def _split(joined: np.ndarray, batches: Sequence[LayoutBatch]) -> list[np.ndarray]:
    """Results of joined batches, for each batch."""
    return np.split(joined, np.cumsum([len(layouts) for layouts in batches])[:-1])


def _least_buffers(model: TrainableModel | SizedModel, layouts: LayoutBatch) -> RankBuffers:
    """Lower bounds on the buffers of each pipeline's busiest rank; fields are int [N]."""
    specs, index = _distinct_tables(layouts)
    slots = [most_slots(_with_few_microbatches(spec)) for spec in specs]
    directions, lanes = count_copies(layouts.schedule_spec.name)
    ranks, stages = np.array([(one.ranks, one.stages) for one in specs]).T[:, index]
    layers = [stack.num_layers for stack in model.stacks]
    return RankBuffers(
        # A stack of s stages has s / ranks chunks on some rank, each of its layers / s or more.
        tuple(-(-count // ranks) for count in layers),
        tuple(-(-count // stages) for count in layers),
        **{name: np.array([one[name] for one in slots])[index] for name in slots[0]},
        chunks=stages // ranks * directions,
        directions=np.full(len(index), directions),
        lanes=np.full(len(index), lanes),
    )


def _with_few_microbatches(spec: TableSpec) -> TableSpec:
    """A pipeline whose ranks need no more slots: the shipped schedules need no fewer with more
    micro-batches. Most need their maximum with about as many micro-batches as ranks."""
    if is_foreign(spec.schedule) or spec.schedule.endswith(".csv") or spec.keep:
        return spec
    schedule, ranks = find_schedule(spec.schedule), spec.ranks
    fewer = range(ranks, spec.microbatches)
    numbers = spec.virtual_stages, spec.segments
    served = (m for m in fewer if schedule.serves(ranks, m, *numbers))
    return spec._replace(microbatches=next(served, spec.microbatches))


def _distinct_tables(layouts: LayoutBatch) -> tuple[list[TableSpec], np.ndarray]:
    """The distinct specs of a batch, and int [N], the spec of each layout."""
    schedule, keep = layouts.schedule_spec, layouts.remat_policy.kept_passes
    parts = layouts.segment_parts
    columns = [
        np.broadcast_to(getattr(layouts, field), (len(layouts),))
        for field in ("pipeline", "microbatches", "virtual_stages", "segments")
    ]
    distinct, index = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    specs = [
        TableSpec(schedule.name, p, m, v, schedule.fused, keep, len(parts) or k, parts)
        for p, m, v, k in distinct.tolist()
    ]
    return specs, index.reshape(-1)


def batch_buffers(pipelines: PipelineBatch) -> RankBuffers:
    """The buffers of the busiest rank; fields are int [N]."""
    return stack_buffers(pipelines.buffers, pipelines.index)


def batch_step_seconds(
    query: Query, layouts: LayoutBatch, pipelines: PipelineBatch | None
) -> np.ndarray:
    """float [N], predicted seconds of a step.

    Args:
      pipelines: None for layouts without a pipeline.
    """
    if pipelines:
        cost = uneven_cost(query, layouts)
        return cost.step_seconds(pipelines.specs, pipelines.layers, pipelines.index)
    parallelism = query.planned_model.parallelism(layouts)
    seconds = step_cost(query.work, query.cluster, parallelism).step_seconds
    return np.broadcast_to(seconds, (len(layouts),))


def uneven_cost(query: Query, layouts: LayoutBatch) -> UnevenPipelineCost:
    """The cost model of layouts with a pipeline."""
    parallelism = query.planned_model.parallelism(layouts)
    return UnevenPipelineCost.of(query.work, query.cluster, parallelism)
