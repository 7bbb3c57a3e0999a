"""Pipelines of a batch of layouts: the layers of each stage, a rank's buffers, and the step time.

Layouts that differ in other axes share their table, so each distinct pipeline is worked out once.
"""

from typing import NamedTuple

import numpy as np

from jaxscale.pipeline.partition import StackLayers
from jaxscale.planner.cost.step import step_cost
from jaxscale.planner.cost.uneven_pipeline import UnevenPipelineCost
from jaxscale.planner.model.layout_batch import LayoutBatch
from jaxscale.planner.search.sized_model import SizedModel
from jaxscale.planner.search.space import Query
from jaxscale.planner.search.trainable_model import TrainableModel
from jaxscale.planner.tables.pipeline_slots import (
    RankBuffers,
    busiest_rank_buffers,
    default_stage_layers,
    stack_buffers,
)
from jaxscale.planner.tables.table_makespan import TableSpec


class PipelineBatch(NamedTuple):
    """The distinct pipelines of N layouts."""

    specs: list[TableSpec]
    layers: list[tuple[int, ...]]  # of each spec, the layers of each virtual stage
    stacks: tuple[StackLayers, ...]  # of the model
    index: np.ndarray  # int [N], the spec of each layout

    def take(self, mask: np.ndarray) -> "PipelineBatch":
        """Those of some layouts."""
        return self._replace(index=self.index[mask])


def make_pipelines(model: TrainableModel | SizedModel, layouts: LayoutBatch) -> PipelineBatch:
    """The pipelines, one for each combination of ranks, micro-batches and virtual stages."""
    schedule, keep = layouts.schedule_spec, layouts.remat_policy.kept_passes
    columns = [
        np.broadcast_to(getattr(layouts, field), (len(layouts),))
        for field in ("pipeline", "microbatches", "virtual_stages")
    ]
    distinct, index = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    specs = [
        TableSpec(schedule.name, p, m, v, schedule.fused, keep) for p, m, v in distinct.tolist()
    ]
    layers = [
        schedule.layers or default_stage_layers(spec, model.stacks, model.head_cost)
        for spec in specs
    ]
    return PipelineBatch(specs, layers, model.stacks, index.reshape(-1))


def batch_buffers(pipelines: PipelineBatch) -> RankBuffers:
    """The buffers of the busiest rank; fields are int [N]."""
    each = [
        busiest_rank_buffers(spec, layers, pipelines.stacks)
        for spec, layers in zip(pipelines.specs, pipelines.layers)
    ]
    return stack_buffers(each, pipelines.index)


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
    seconds = step_cost(query.shape, query.cluster, parallelism).step_seconds
    return np.broadcast_to(seconds, (len(layouts),))


def uneven_cost(query: Query, layouts: LayoutBatch) -> UnevenPipelineCost:
    """The cost model of layouts with a pipeline."""
    parallelism = query.planned_model.parallelism(layouts)
    return UnevenPipelineCost.of(query.shape, query.cluster, parallelism)
