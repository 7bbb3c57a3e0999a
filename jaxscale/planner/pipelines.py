"""Many pipelines at once: the layers of each, what their ranks hold, and how long a step takes."""

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxscale.layout import kept_passes, parse_schedule
from jaxscale.planner.choice import Choice
from jaxscale.planner.cost import cost
from jaxscale.planner.dealt import Parts
from jaxscale.planner.described import Described
from jaxscale.planner.held import Held, deal, hold
from jaxscale.planner.layouts import Layouts
from jaxscale.planner.space import Query
from jaxscale.planner.trained import Trained


class Dealt(NamedTuple):
    """Layers of many pipelines."""

    keys: np.ndarray  # int [K, 3]: ranks, chunks, micro-batches
    place: np.ndarray  # int [N], the key of each pipeline
    layers: list[tuple[int, ...]]  # of each key, the layers of each virtual stage


def deal_all(subject: Trained | Described, layouts: Layouts) -> Dealt:
    """The layers of every pipeline: of each of its numbers of ranks, chunks and micro-batches."""
    name, fused, given = parse_schedule(layouts.schedule)
    keep = kept_passes(layouts.remat)
    columns = [
        np.broadcast_to(getattr(layouts, field), (len(layouts),))
        for field in ("pipeline", "virtual_stages", "microbatches")
    ]
    keys, place = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    layers = [
        given
        or deal(
            name, p, v, m, fused=fused, recompute=keep is not None, keep=keep or 0,
            num_layers=subject.shape.layers, head_cost=subject.head_cost,
        )
        for p, v, m in keys.tolist()
    ]  # fmt: skip
    return Dealt(keys, place.reshape(-1), layers)


def held_of(layouts: Layouts, dealt: Dealt) -> Held:
    """What a rank holds in each of the pipelines."""
    name, fused, _ = parse_schedule(layouts.schedule)
    keep = kept_passes(layouts.remat)
    each = [
        hold(name, p, v, m, fused=fused, recompute=keep is not None, keep=keep or 0, layers=layers)
        for (p, v, m), layers in zip(dealt.keys.tolist(), dealt.layers)
    ]
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
