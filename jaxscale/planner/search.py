"""Every layout of a model on a cluster, judged: refused, too large, or ranked by its step time."""

import collections
import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxscale.layout import Layout, parse_schedule
from jaxscale.planner.choice import Choice
from jaxscale.planner.cost import cost
from jaxscale.planner.dealt import Parts
from jaxscale.planner.described import Described
from jaxscale.planner.held import Held, deal, hold
from jaxscale.planner.layouts import Layouts
from jaxscale.planner.space import HOST_MEMORY_BYTES, Query, fitting, numbers_of, texts_of
from jaxscale.planner.trained import Trained

TOO_LARGE = "does not fit in memory"
TOO_LARGE_FOR_HOST = "moves more to host memory than there is"
TOO_SLOW = "slower than those shown, even if its pipeline never waited"


@dataclass(frozen=True)
class Found:
    """The layouts that fit, best first, and what became of the others."""

    layouts: list[Layout]
    seconds: list[float]  # of a step
    considered: int
    rejected: dict[str, int]  # by reason
    smallest: Layout | None  # of those that do not fit, which needs least
    words: dict[str, str]  # what the engine said of one, by reason


class Dealt(NamedTuple):
    """Layers of many pipelines."""

    keys: np.ndarray  # int [K, 3]: ranks, chunks, micro-batches
    place: np.ndarray  # int [N], the key of each pipeline
    layers: list[tuple[int, ...]]  # of each key, the layers of each virtual stage


def search(query: Query, top: int = 10) -> Found:
    """Ranks all layouts of a query.

    Args:
      top: how many to return.
    """
    rejected: collections.Counter[str] = collections.Counter()
    words: dict[str, str] = {}
    smallest: tuple[float, Layout | None] = (math.inf, None)
    subject = query.subject
    numbers = numbers_of(query, rejected, words)
    best: list[tuple[float, Layout]] = []
    considered = 0
    for texts in texts_of(query):
        layouts = fitting(query, numbers, texts, rejected)
        if layouts is None:
            continue
        considered += len(layouts)
        dealt = None
        if texts["pipelined"]:
            # No table is needed for those that would be too slow even if no rank ever waited.
            slow = _parts(query, layouts).bound() > (best[-1][0] if len(best) == top else np.inf)
            rejected[TOO_SLOW] += int(slow.sum())
            if slow.all():
                continue
            layouts = layouts.take(~slow)
            dealt = deal_all(subject, layouts)
        held = held_of(layouts, dealt) if dealt else None
        needs = subject.memory(layouts, held, query.back_end)
        host = needs.host_stash + layouts.offloads("optimizer") * needs.host_optimizer
        roomy = np.broadcast_to(host <= HOST_MEMORY_BYTES, (len(layouts),))
        fits = np.broadcast_to(needs.peak <= query.limit_bytes, (len(layouts),))
        rejected[TOO_LARGE] += int((~fits).sum())
        if not fits.all():
            peaks = np.where(fits, np.inf, needs.peak)
            n = int(peaks.argmin())
            if peaks[n] < smallest[0]:
                smallest = float(peaks[n]), layouts.one(n, subject.layout)
        rejected[TOO_LARGE_FOR_HOST] += int((fits & ~roomy).sum())
        fits = fits & roomy
        if not fits.any():
            continue
        layouts = layouts.take(fits)
        if dealt:
            dealt = dealt._replace(place=dealt.place[fits])
        seconds = step_seconds(query, layouts, dealt)
        fastest = np.argsort(seconds, kind="stable")[:top]
        best += [(float(seconds[n]), layouts.one(n, subject.layout)) for n in fastest]
        best = _distinct(sorted(best, key=lambda one: one[0]))[:top]
    return Found(
        [layout for _, layout in best], [seconds for seconds, _ in best],
        considered
        + rejected.total()
        - sum(rejected[late] for late in (TOO_LARGE, TOO_LARGE_FOR_HOST, TOO_SLOW)),
        {reason: count for reason, count in rejected.most_common() if count},
        smallest[1], words,
    )  # fmt: skip


def step_seconds(query: Query, layouts: Layouts, dealt: Dealt | None) -> np.ndarray:
    """float [N]."""
    if dealt:
        return _parts(query, layouts).step_seconds(*dealt)
    choice = Choice.of(layouts, query.subject.sequences)
    return np.broadcast_to(cost(query.shape, query.cluster, choice).step_seconds, (len(layouts),))


def _parts(query: Query, layouts: Layouts) -> Parts:
    choice = Choice.of(layouts, query.subject.sequences)
    return Parts.of(query.shape, query.cluster, choice)


def _distinct(ranked: list[tuple[float, Layout]]) -> list[tuple[float, Layout]]:
    """Without layouts that differ from a faster one only in what they offload."""
    first: dict[Layout, tuple[float, Layout]] = {}
    for one in ranked:
        first.setdefault(dataclasses.replace(one[1], offload="none"), one)
    return list(first.values())


def deal_all(subject: Trained | Described, layouts: Layouts) -> Dealt:
    """The layers of every pipeline: of each of its numbers of ranks, chunks and micro-batches."""
    name, fused, given = parse_schedule(layouts.schedule)
    columns = [
        np.broadcast_to(getattr(layouts, field), (len(layouts),))
        for field in ("pipeline", "virtual_stages", "microbatches")
    ]
    keys, place = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    layers = [
        given
        or deal(
            name, p, v, m, fused=fused, recompute=layouts.remat == "full",
            num_layers=subject.shape.layers, head_cost=subject.head_cost,
        )
        for p, v, m in keys.tolist()
    ]  # fmt: skip
    return Dealt(keys, place.reshape(-1), layers)


def held_of(layouts: Layouts, dealt: Dealt) -> Held:
    """What a rank holds in each of the pipelines."""
    name, fused, _ = parse_schedule(layouts.schedule)
    recompute = layouts.remat == "full"
    each = [
        hold(name, p, v, m, fused=fused, recompute=recompute, layers=layers)
        for (p, v, m), layers in zip(dealt.keys.tolist(), dealt.layers)
    ]
    return Held(
        **{
            field.name: np.array([getattr(one, field.name) for one in each])[dealt.place]
            for field in dataclasses.fields(Held)
        }
    )
