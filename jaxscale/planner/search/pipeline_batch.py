"""Many pipelines at once: the layers of each, what their ranks hold, and how long a step takes."""

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxscale.layout import kept_passes, parse_schedule
from jaxscale.planner.cost.step import step_cost
from jaxscale.planner.cost.uneven_pipeline import UnevenPipelineCost
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.search.layout_batch import LayoutBatch
from jaxscale.planner.search.sized_model import SizedModel
from jaxscale.planner.search.space import Query
from jaxscale.planner.search.trainable_model import TrainableModel
from jaxscale.planner.tables.pipeline_slots import (
    RankBuffers,
    busiest_rank_buffers,
    default_stage_layers,
)
from jaxscale.planner.tables.table_makespan import TableSpec


class PipelineBatch(NamedTuple):
    """Layers of many pipelines."""

    pipelines: list[TableSpec]  # K that differ
    layers: list[tuple[int, ...]]  # of each of them, the layers of each virtual stage
    place: np.ndarray  # int [N], which of them each layout has


def make_pipelines(model: TrainableModel | SizedModel, layouts: LayoutBatch) -> PipelineBatch:
    """The layers of every pipeline: of each of its numbers of ranks, chunks and micro-batches."""
    name, fused, given = parse_schedule(layouts.schedule)
    keep = kept_passes(layouts.remat)
    columns = [
        np.broadcast_to(getattr(layouts, field), (len(layouts),))
        for field in ("pipeline", "microbatches", "virtual_stages")
    ]
    numbers, place = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    pipelines = [TableSpec(name, p, m, v, fused, keep) for p, m, v in numbers.tolist()]
    layers = [
        given or default_stage_layers(one, model.shape.layers, model.head_cost) for one in pipelines
    ]
    return PipelineBatch(pipelines, layers, place.reshape(-1))


def batch_buffers(dealt: PipelineBatch) -> RankBuffers:
    """What a rank holds in each of the pipelines."""
    each = [busiest_rank_buffers(*one) for one in zip(dealt.pipelines, dealt.layers)]
    return RankBuffers(
        **{
            field.name: np.array([getattr(one, field.name) for one in each])[dealt.place]
            for field in dataclasses.fields(RankBuffers)
        }
    )


def batch_step_seconds(
    query: Query, layouts: LayoutBatch, dealt: PipelineBatch | None
) -> np.ndarray:
    """float [N]."""
    if dealt:
        return uneven_cost(query, layouts).step_seconds(*dealt)
    parallelism = Parallelism.of(layouts, query.planned_model.sequences)
    return np.broadcast_to(
        step_cost(query.shape, query.cluster, parallelism).step_seconds, (len(layouts),)
    )


def uneven_cost(query: Query, layouts: LayoutBatch) -> UnevenPipelineCost:
    """Of pipelines, what their seconds are made of."""
    parallelism = Parallelism.of(layouts, query.planned_model.sequences)
    return UnevenPipelineCost.of(query.shape, query.cluster, parallelism)
