"""Layout search: every layout of a model on a cluster is refused, too large, or ranked by step
time."""

import collections
import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config import Config
from jaxscale.config.layout import SLICED, Layout
from jaxscale.planner.model.layout_batch import LayoutBatch, stack_layouts
from jaxscale.planner.search.partial_offload import least_offload
from jaxscale.planner.search.partial_remat import TimedLayout, search_partial_remat
from jaxscale.planner.search.pipeline_batch import (
    PipelineBatch,
    batch_buffers,
    batch_step_seconds,
    least_peaks,
    least_seconds,
    make_pipelines,
)
from jaxscale.planner.search.segments import COUNTS, split_sequences
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
    smallest: Layout | None  # where none fits, the layout with the least memory
    messages: dict[str, str]  # by reason, the error message of one refused layout


def search_layouts(query: Query, top: int = 10) -> SearchResult:
    """Ranks all layouts of a query. Sequences in segments and a head in slices are tried in the
    fastest pipelines, and in all of them where nothing else fits; then parts of the state in host
    memory.

    Args:
      top: how many to return.
    """
    found, pins = _search(query, top), query.pins
    others = []
    if "head" not in pins:
        others.append(dataclasses.replace(query, pins={**pins, "head": SLICED}))
    if _may_split(query):
        split = {**pins, "sequence_chunks": max(COUNTS)}  # which needs the least memory
        others.append(dataclasses.replace(query, pins=split))
    if query.can_fill_host:
        alone = {**pins, "pipeline": 1}
        others.append(dataclasses.replace(query, pins=alone, fills_host=True))
    for other in others:
        if not found.layouts and (more := _search(other, top)).layouts:
            return more
    return found


def _search(query: Query, top: int) -> SearchResult:
    """`search_layouts` without a second search."""
    refused = _Refused(collections.Counter(), [], [])
    messages: dict[str, str] = {}
    sizes = enumerate_sizes(query, refused.counts, messages)
    best: list[TimedLayout] = []
    recomputed: list[LayoutBatch] = []
    considered = 0
    for options, schedules in itertools.groupby(enumerate_options(query), _without_schedule):
        combined = (combine(query, sizes, each, refused.counts) for each in schedules)
        batches = list(filter(None, combined))
        considered += sum(map(len, batches))
        if options["pipelined"]:
            if options["remat"] == "full" and "remat" not in query.pins:
                recomputed += batches
            # Pipelines that are too slow even without a bubble, or too large even with the least
            # buffers, need no table.
            fast = _may_rank(query, batches, best[top - 1 :], refused)
            batches = _may_fit(query, fast, refused)
        for layouts in batches:
            pipelines = (
                make_pipelines(query.planned_model, layouts) if options["pipelined"] else None
            )
            best = _distinct([*best, *_fastest(query, layouts, pipelines, top, refused)])[:top]
    best = _distinct(search_partial_remat(query, recomputed, best, top))[:top]
    best = _distinct([*best, *_segments(query, best)])[:top]
    best = _distinct([*best, *_sliced_heads(query, best), *_partial_offloads(query, best)])[:top]
    # Layouts that are already counted are refused for one of three reasons.
    late = sum(map(refused.counts.__getitem__, (TOO_LARGE, TOO_LARGE_FOR_HOST, TOO_SLOW)))
    return SearchResult(
        layouts=[layout for _, layout in best],
        seconds=[seconds for seconds, _ in best],
        considered=considered + refused.counts.total() - late,
        rejected=dict((+refused.counts).most_common()),
        smallest=None if best else _smallest(query, refused),
        messages=messages,
    )


class _Refused(NamedTuple):
    """How many layouts are refused, by reason; and of each batch of layouts that do not fit on a
    device, the layout with the least memory."""

    counts: collections.Counter[str]
    measured: list[tuple[float, Layout]]  # its bytes
    bounded: list[tuple[float, LayoutBatch]]  # where no tables were made: bytes that it exceeds


def _without_schedule(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without the schedule, on which memory depends through a rank's buffers alone."""
    return {name: options[name] for name in options if name not in ("schedule", "virtual_stages")}


def _may_rank(
    query: Query, batches: list[LayoutBatch], last: list[TimedLayout], refused: _Refused
) -> list[LayoutBatch]:
    """Pipelines that take no longer than the last layout to show, if no rank ever idled."""
    fast = []
    for layouts, seconds in zip(batches, least_seconds(query, batches)):
        good = seconds <= (last[0][0] if last else np.inf)
        refused.counts[TOO_SLOW] += int((~good).sum())
        if good.any():
            fast.append(layouts.take(good))
    return fast


def _may_fit(query: Query, batches: list[LayoutBatch], refused: _Refused) -> list[LayoutBatch]:
    """Pipelines that fit on a device with the least buffers.

    Args:
      batches: layouts that differ in the schedule.
    """
    roomy = []
    for layouts, peaks in zip(batches, least_peaks(query, batches)):
        good = peaks <= query.limit_bytes
        refused.counts[TOO_LARGE] += int((~good).sum())
        if good.any():
            roomy.append(layouts.take(good))
        if not good.all():
            n = int(np.where(good, np.inf, peaks).argmin())
            refused.bounded.append((float(peaks[n]), layouts.take([n])))
    return roomy


def _fits(
    query: Query, layouts: LayoutBatch, pipelines: PipelineBatch | None, refused: _Refused
) -> np.ndarray:
    """Which layouts fit, bool [N]."""
    needs = query.planned_model.memory(
        layouts, batch_buffers(pipelines) if pipelines else None, query.back_end
    )
    fits_host, fits, peaks = (
        np.broadcast_to(one, (len(layouts),))
        for one in (query.fits_host(needs), query.fits_device(needs), needs.peak)
    )
    refused.counts[TOO_LARGE] += int((~fits).sum())
    refused.counts[TOO_LARGE_FOR_HOST] += int((fits & ~fits_host).sum())
    if not fits.all():
        n = int(np.where(fits, np.inf, peaks).argmin())
        refused.measured.append((float(peaks[n]), layouts.layout(n)))
    return fits & fits_host


def _smallest(query: Query, refused: _Refused) -> Layout | None:
    """The layout with the least memory, of the layouts that do not fit."""
    found, model = sorted(refused.measured, key=lambda one: one[0])[:1], query.planned_model
    for bound, layouts in sorted(refused.bounded, key=lambda one: one[0]):
        if found and bound >= found[0][0]:
            break
        buffers = batch_buffers(make_pipelines(model, layouts))
        peak = float(np.ravel(model.memory(layouts, buffers, query.back_end).peak)[0])
        found = sorted([*found, (peak, layouts.layout(0))], key=lambda one: one[0])[:1]
    return found[0][1] if found else None


def _fastest(
    query: Query,
    layouts: LayoutBatch,
    pipelines: PipelineBatch | None,
    top: int,
    refused: _Refused,
) -> list[TimedLayout]:
    """The layouts that fit."""
    if query.fills_host and pipelines is None and not layouts.offloads("optimizer"):
        layouts = least_offload(query, layouts)
    fits = _fits(query, layouts, pipelines, refused)
    if not fits.any():
        return []
    layouts, pipelines = layouts.take(fits), pipelines and pipelines.take(fits)
    seconds = batch_step_seconds(query, layouts, pipelines)
    order = np.argsort(seconds, kind="stable")[:top]
    return [(float(seconds[n]), layouts.layout(int(n))) for n in order]


def _may_split(query: Query) -> bool:
    """Whether a search may choose segments. Models given by their sizes have no memory of them."""
    pins = query.pins
    given = "sequence_chunks" in pins or "schedule" in pins or pins.get("pipeline", 2) == 1
    return isinstance(query.model, Config) and not given


def _segments(query: Query, best: list[TimedLayout]) -> list[TimedLayout]:
    """The pipelines among the best with sequences in segments, where they fit."""
    if not _may_split(query):
        return []
    piped = (layout for _, layout in best if layout.pipeline > 1)
    split = (one for layout in piped for one in split_sequences(query, layout))
    return [one for layout in dict.fromkeys(split) for one in _timed_pipeline(query, layout)]


def _sliced_heads(query: Query, best: list[TimedLayout]) -> list[TimedLayout]:
    """The pipelines among the best with the head in slices, where it fits."""
    found = []
    for _, layout in best if "head" not in query.pins else ():
        if layout.segment_lengths:
            continue
        sliced = dataclasses.replace(layout, head=SLICED)
        if sliced.slices_head and not query.planned_model.refusal(sliced)[0]:
            found += _timed_pipeline(query, sliced)
    return found


def _timed_pipeline(query: Query, layout: Layout) -> list[TimedLayout]:
    """The layout with its seconds, if it fits."""
    layouts = stack_layouts([layout])
    pipelines = make_pipelines(query.planned_model, layouts)
    return _fastest(query, layouts, pipelines, 1, _Refused(collections.Counter(), [], []))


def _partial_offloads(query: Query, best: list[TimedLayout]) -> list[TimedLayout]:
    """The layouts among the best with moments in host memory, with no more there than needed."""
    found = []
    for _, layout in best if query.can_fill_host else ():
        if layout.pipeline > 1 or not layout.offloads("optimizer"):
            continue
        kept = "activations" if layout.offloads("activations") else "none"
        layouts = stack_layouts([dataclasses.replace(layout, offload=kept)])
        filling = dataclasses.replace(query, fills_host=True)
        found += _fastest(filling, layouts, None, 1, _Refused(collections.Counter(), [], []))
    return found


def _distinct(timed: list[TimedLayout]) -> list[TimedLayout]:
    """Fastest first, without layouts that differ from a faster one only in what they offload."""
    first: dict[Layout, TimedLayout] = {}
    for one in sorted(timed, key=lambda one: one[0]):
        first.setdefault(dataclasses.replace(one[1], offload="none", offload_bytes=0), one)
    return list(first.values())
