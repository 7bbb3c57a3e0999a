"""Many pipelines at once: the layers of each, what their ranks hold, and how long a step takes."""

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxscale.planner.cost.step import cost
from jaxscale.planner.cost.uneven_pipeline import Parts
from jaxscale.planner.model.parallelism import Choice
from jaxscale.planner.search.layout_batch import Layouts
from jaxscale.planner.search.sized_model import Described
from jaxscale.planner.search.space import Query
from jaxscale.planner.search.trainable_model import Trained
from jaxscale.planner.tables.pipeline_slots import Held, deal, hold
from jaxscale.planner.tables.table_makespan import Pipeline


class Dealt(NamedTuple):
    """Layers of many pipelines."""

    pipelines: list[Pipeline]  # K that differ
    layers: list[tuple[int, ...]]  # of each of them, the layers of each virtual stage
    place: np.ndarray  # int [N], which of them each layout has


def deal_all(subject: Trained | Described, layouts: Layouts) -> Dealt:
    """The layers of every pipeline: of each of its numbers of ranks, chunks and micro-batches."""
    spec, keep = layouts.schedule_spec, layouts.remat_policy.kept_passes
    columns = [
        np.broadcast_to(getattr(layouts, field), (len(layouts),))
        for field in ("pipeline", "microbatches", "virtual_stages")
    ]
    numbers, place = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    pipelines = [Pipeline(spec.name, p, m, v, spec.fused, keep) for p, m, v in numbers.tolist()]
    layers = [
        spec.layers or deal(one, subject.shape.layers, subject.head_cost) for one in pipelines
    ]
    return Dealt(pipelines, layers, place.reshape(-1))


def held_of(dealt: Dealt) -> Held:
    """What a rank holds in each of the pipelines."""
    each = [hold(*one) for one in zip(dealt.pipelines, dealt.layers)]
    return Held(
        **{
            field.name: np.array([getattr(one, field.name) for one in each])[dealt.place]
            for field in dataclasses.fields(Held)
        }
    )


def step_seconds(query: Query, layouts: Layouts, dealt: Dealt | None) -> np.ndarray:
    """float [N]."""
    if dealt:
        return parts_of(query, layouts).step_seconds(*dealt)
    choice = Choice.of(layouts, query.subject.sequences)
    return np.broadcast_to(cost(query.shape, query.cluster, choice).step_seconds, (len(layouts),))


def parts_of(query: Query, layouts: Layouts) -> Parts:
    """Of pipelines, what their seconds are made of."""
    choice = Choice.of(layouts, query.subject.sequences)
    return Parts.of(query.shape, query.cluster, choice)
