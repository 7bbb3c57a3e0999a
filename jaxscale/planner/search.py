"""Every layout of a model on a cluster, judged: refused, too large, or ranked by its step time."""

import collections
import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from jaxscale.layout import Layout
from jaxscale.planner.keeping import keep_more
from jaxscale.planner.layouts import Layouts
from jaxscale.planner.pipelines import deal_all, held_of, parts_of, step_seconds
from jaxscale.planner.space import Query, fitting, numbers_of, texts_of

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
    recomputed: list[Layouts] = []
    considered = 0
    for texts in texts_of(query):
        layouts = fitting(query, numbers, texts, rejected)
        if layouts is None:
            continue
        considered += len(layouts)
        dealt = None
        if texts["pipelined"]:
            recomputed += [layouts] * (layouts.remat == "full" and "remat" not in query.pins)
            # No table is needed for those that would be too slow even if no rank ever waited.
            slow = parts_of(query, layouts).bound() > (best[-1][0] if len(best) == top else np.inf)
            rejected[TOO_SLOW] += int(slow.sum())
            if slow.all():
                continue
            layouts = layouts.take(~slow)
            dealt = deal_all(subject, layouts)
        held = held_of(dealt) if dealt else None
        needs = subject.memory(layouts, held, query.back_end)
        roomy, fits = (
            np.broadcast_to(one, (len(layouts),))
            for one in (query.fits_host(needs, layouts), query.fits_device(needs))
        )
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
    best = _distinct(keep_more(query, recomputed, best, top))[:top]
    return Found(
        [layout for _, layout in best], [seconds for seconds, _ in best],
        considered
        + rejected.total()
        - sum(rejected[late] for late in (TOO_LARGE, TOO_LARGE_FOR_HOST, TOO_SLOW)),
        {reason: count for reason, count in rejected.most_common() if count},
        smallest[1], words,
    )  # fmt: skip


def _distinct(ranked: list[tuple[float, Layout]]) -> list[tuple[float, Layout]]:
    """Without layouts that differ from a faster one only in what they offload."""
    first: dict[Layout, tuple[float, Layout]] = {}
    for one in ranked:
        first.setdefault(dataclasses.replace(one[1], offload="none"), one)
    return list(first.values())
