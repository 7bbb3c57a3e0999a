"""Every layout of a model on a cluster, judged: refused, too large, or ranked by its step time."""

import collections
import dataclasses
from dataclasses import dataclass

import numpy as np

from jaxscale.layout import Layout
from jaxscale.planner.search.layout_batch import LayoutBatch
from jaxscale.planner.search.partial_remat import Timed, search_partial_remat
from jaxscale.planner.search.pipeline_batch import (
    PipelineBatch,
    batch_buffers,
    batch_step_seconds,
    make_pipelines,
    uneven_cost,
)
from jaxscale.planner.search.space import Query, combine, enumerate_options, enumerate_sizes

TOO_LARGE = "does not fit in memory"
TOO_LARGE_FOR_HOST = "moves more to host memory than there is"
TOO_SLOW = "slower than those shown, even if its pipeline never waited"


@dataclass(frozen=True)
class SearchResult:
    """The layouts that fit, best first, and what became of the others."""

    layouts: list[Layout]
    seconds: list[float]  # of a step
    considered: int
    rejected: dict[str, int]  # by reason
    smallest: Layout | None  # of those that do not fit, which needs least
    words: dict[str, str]  # what the engine said of one, by reason


def search_layouts(query: Query, top: int = 10) -> SearchResult:
    """Ranks all layouts of a query.

    Args:
      top: how many to return.
    """
    rejected: collections.Counter[str] = collections.Counter()
    words: dict[str, str] = {}
    numbers = enumerate_sizes(query, rejected, words)
    best: list[Timed] = []
    large: list[tuple[float, Layout]] = []
    recomputed: list[LayoutBatch] = []
    considered = 0
    for texts in enumerate_options(query):
        layouts = combine(query, numbers, texts, rejected)
        if layouts is None:
            continue
        considered += len(layouts)
        dealt = None
        if texts["pipelined"]:
            if layouts.remat == "full" and "remat" not in query.pins:
                recomputed.append(layouts)
            # No table is needed for those that would be too slow even if no rank ever waited.
            slow = uneven_cost(query, layouts).bound() > (
                best[-1][0] if len(best) == top else np.inf
            )
            rejected[TOO_SLOW] += int(slow.sum())
            if slow.all():
                continue
            layouts = layouts.take(~slow)
            dealt = make_pipelines(query.planned_model, layouts)
        fits, smallest = _room(query, layouts, dealt, rejected)
        large += smallest
        if not fits.any():
            continue
        layouts = layouts.take(fits)
        if dealt:
            dealt = dealt._replace(place=dealt.place[fits])
        best = _distinct([*best, *_fastest(query, layouts, dealt, top)])[:top]
    best = _distinct(search_partial_remat(query, recomputed, best, top))[:top]
    late = (TOO_LARGE, TOO_LARGE_FOR_HOST, TOO_SLOW)  # of those that are considered
    return SearchResult(
        layouts=[layout for _, layout in best],
        seconds=[seconds for seconds, _ in best],
        considered=considered + rejected.total() - sum(rejected[reason] for reason in late),
        rejected={reason: count for reason, count in rejected.most_common() if count},
        smallest=min(large, key=lambda one: one[0])[1] if large else None,
        words=words,
    )


def _room(
    query: Query, layouts: LayoutBatch, dealt: PipelineBatch | None, rejected: collections.Counter
) -> tuple[np.ndarray, list[tuple[float, Layout]]]:
    """Which layouts there is memory for, bool [N]; and of those that are too large for a device the
    smallest, with its bytes, if there is one."""
    needs = query.planned_model.memory(
        layouts, batch_buffers(dealt) if dealt else None, query.back_end
    )
    roomy, fits, peaks = (
        np.broadcast_to(one, (len(layouts),))
        for one in (query.fits_host(needs, layouts), query.fits_device(needs), needs.peak)
    )
    rejected[TOO_LARGE] += int((~fits).sum())
    rejected[TOO_LARGE_FOR_HOST] += int((fits & ~roomy).sum())
    n = int(np.where(fits, np.inf, peaks).argmin())
    smallest = [] if fits.all() else [(float(peaks[n]), layouts.layout(int(n)))]
    return fits & roomy, smallest


def _fastest(
    query: Query, layouts: LayoutBatch, dealt: PipelineBatch | None, top: int
) -> list[Timed]:
    seconds = batch_step_seconds(query, layouts, dealt)
    order = np.argsort(seconds, kind="stable")[:top]
    return [(float(seconds[n]), layouts.layout(int(n))) for n in order]


def _distinct(timed: list[Timed]) -> list[Timed]:
    """From the fastest on, without layouts that differ from a faster one only in what they
    offload."""
    first: dict[Layout, Timed] = {}
    for one in sorted(timed, key=lambda one: one[0]):
        first.setdefault(dataclasses.replace(one[1], offload="none"), one)
    return list(first.values())
