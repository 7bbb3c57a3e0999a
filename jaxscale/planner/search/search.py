"""The search: every layout of a model on a cluster is refused, too large, or ranked by step
time."""

import collections
import dataclasses
from dataclasses import dataclass

import numpy as np

from jaxscale.layout import Layout
from jaxscale.planner.model.layout_batch import LayoutBatch
from jaxscale.planner.search.partial_remat import TimedLayout, search_partial_remat
from jaxscale.planner.search.pipeline_batch import (
    PipelineBatch,
    batch_buffers,
    batch_step_seconds,
    make_pipelines,
    uneven_cost,
)
from jaxscale.planner.search.space import Query, combine, enumerate_options, enumerate_sizes

TOO_LARGE = "does not fit in memory"
TOO_LARGE_FOR_HOST = "offloads more than fits in host memory"
TOO_SLOW = "slower than those shown, even without a pipeline bubble"


@dataclass(frozen=True)
class SearchResult:
    """The layouts that fit, fastest first, and why the others were rejected."""

    layouts: list[Layout]
    seconds: list[float]  # of a step
    considered: int
    rejected: dict[str, int]  # by reason
    smallest: Layout | None  # of those that do not fit, the one that needs least memory
    messages: dict[str, str]  # by reason, the error message of one refused layout


def search_layouts(query: Query, top: int = 10) -> SearchResult:
    """Ranks all layouts of a query.

    Args:
      top: how many to return.
    """
    rejected: collections.Counter[str] = collections.Counter()
    messages: dict[str, str] = {}
    sizes = enumerate_sizes(query, rejected, messages)
    best: list[TimedLayout] = []
    large: list[tuple[float, Layout]] = []
    recomputed: list[LayoutBatch] = []
    considered = 0
    for options in enumerate_options(query):
        layouts = combine(query, sizes, options, rejected)
        if layouts is None:
            continue
        considered += len(layouts)
        pipelines = None
        if options["pipelined"]:
            if layouts.remat == "full" and "remat" not in query.pins:
                recomputed.append(layouts)
            # Those that are too slow even without a bubble need no table.
            slow = uneven_cost(query, layouts).bound() > (
                best[-1][0] if len(best) == top else np.inf
            )
            rejected[TOO_SLOW] += int(slow.sum())
            if slow.all():
                continue
            layouts = layouts.take(~slow)
            pipelines = make_pipelines(query.planned_model, layouts)
        fits, smallest = _fits(query, layouts, pipelines, rejected)
        large += smallest
        if not fits.any():
            continue
        layouts = layouts.take(fits)
        if pipelines:
            pipelines = pipelines.take(fits)
        best = _distinct([*best, *_fastest(query, layouts, pipelines, top)])[:top]
    best = _distinct(search_partial_remat(query, recomputed, best, top))[:top]
    late = (TOO_LARGE, TOO_LARGE_FOR_HOST, TOO_SLOW)  # reasons of layouts already counted
    return SearchResult(
        layouts=[layout for _, layout in best],
        seconds=[seconds for seconds, _ in best],
        considered=considered + rejected.total() - sum(rejected[reason] for reason in late),
        rejected={reason: count for reason, count in rejected.most_common() if count},
        smallest=min(large, key=lambda one: one[0])[1] if large else None,
        messages=messages,
    )


def _fits(
    query: Query,
    layouts: LayoutBatch,
    pipelines: PipelineBatch | None,
    rejected: collections.Counter,
) -> tuple[np.ndarray, list[tuple[float, Layout]]]:
    """Which layouts fit, bool [N]; and the smallest of those too large for a device, with its
    bytes, if there is one."""
    needs = query.planned_model.memory(
        layouts, batch_buffers(pipelines) if pipelines else None, query.back_end
    )
    fits_host, fits, peaks = (
        np.broadcast_to(one, (len(layouts),))
        for one in (query.fits_host(needs, layouts), query.fits_device(needs), needs.peak)
    )
    rejected[TOO_LARGE] += int((~fits).sum())
    rejected[TOO_LARGE_FOR_HOST] += int((fits & ~fits_host).sum())
    n = int(np.where(fits, np.inf, peaks).argmin())
    smallest = [] if fits.all() else [(float(peaks[n]), layouts.layout(int(n)))]
    return fits & fits_host, smallest


def _fastest(
    query: Query, layouts: LayoutBatch, pipelines: PipelineBatch | None, top: int
) -> list[TimedLayout]:
    seconds = batch_step_seconds(query, layouts, pipelines)
    order = np.argsort(seconds, kind="stable")[:top]
    return [(float(seconds[n]), layouts.layout(int(n))) for n in order]


def _distinct(timed: list[TimedLayout]) -> list[TimedLayout]:
    """Fastest first, without layouts that differ from a faster one only in `offload`."""
    first: dict[Layout, TimedLayout] = {}
    for one in sorted(timed, key=lambda one: one[0]):
        first.setdefault(dataclasses.replace(one[1], offload="none"), one)
    return list(first.values())
