"""Pipelines between recomputing every pass and keeping all: as many are kept as there is room for.

How many that is differs from layout to layout, so it is found for each by itself, where no policy
that many have in common could say it: by closed forms first, and of those that look best by the
table itself. Memory that the early ranks fill the later ones would leave unused; here each keeps
what it can (`pipeline.orders.keep_passes`), which is what a policy for each stage is good for
(Mist, EuroSys 2025).
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxscale.layout import Layout
from jaxscale.planner.search.layout_batch import LayoutBatch, stack_layouts
from jaxscale.planner.search.pipeline_batch import (
    batch_buffers,
    batch_step_seconds,
    make_pipelines,
    uneven_cost,
)
from jaxscale.planner.search.space import Query
from jaxscale.planner.tables.pipeline_slots import RankBuffers

MAX_SIMULATED = 48
"""Tables that are played, of those that could be best."""

Timed = tuple[float, Layout]  # seconds of a step


def search_partial_remat(
    query: Query, recomputed: list[LayoutBatch], best: list[Timed], top: int
) -> list[Timed]:
    """The best with, among them, layouts that keep passes and are faster than the slowest.

    Args:
      recomputed: pipelines with remat "full", those of common texts together.
      top: how many are wanted.
    """
    found = list(best)

    def limit() -> float:
        return found[top - 1][0] if len(found) >= top else np.inf

    guesses = sorted(
        (guess for layouts in recomputed for guess in _guesses(query, layouts, limit())),
        key=lambda guess: guess[0],
    )
    for seconds, keep, layout in guesses[:MAX_SIMULATED]:
        if seconds > limit():
            break
        played = _play(query, layout, keep)
        found = sorted([*found, *played], key=lambda one: one[0])
    return found


def _guesses(
    query: Query, layouts: LayoutBatch, limit_seconds: float
) -> Iterator[tuple[float, int, Layout]]:
    """Seconds, passes to keep, and the layout that recomputes all of them; of those that could be
    faster than a limit, that fit so, and that do not fit when nothing is recomputed."""
    kept = dataclasses.replace(layouts, remat="none")
    fast = uneven_cost(query, kept).bound() < limit_seconds
    if not fast.any():
        return
    layouts, kept = layouts.take(fast), kept.take(fast)
    # Of the tables without R most are known by now: they leave fewer to be made.
    dealt_kept = make_pipelines(query.planned_model, kept)
    quick = batch_step_seconds(query, kept, dealt_kept)
    hopeful = (quick < limit_seconds) & ~_fits(query, kept, batch_buffers(dealt_kept))
    if not hopeful.any():
        return
    layouts, quick = layouts.take(hopeful), quick[hopeful]
    dealt = make_pipelines(query.planned_model, layouts)
    least, most = (
        batch_buffers(dealt),
        batch_buffers(dealt_kept._replace(place=dealt_kept.place[hopeful])),
    )

    def fits(keep: np.ndarray) -> np.ndarray:
        buffers = dataclasses.replace(
            least,
            **{
                name: np.minimum(getattr(least, name) + keep, getattr(most, name))
                for name in ("residual_b", "residual_w")
            },
        )
        return _fits(query, layouts, buffers)

    in_flight = np.asarray(most.residual_w)
    # With all but one kept, that one would need as much room as keeping it, too.
    low, high = np.zeros(len(layouts), int), np.maximum(in_flight - 2, 0)
    while (low < high).any():
        middle = (low + high + 1) // 2
        roomy = fits(middle)
        low, high = np.where(roomy, middle, low), np.where(roomy, high, middle - 1)
    slow = batch_step_seconds(query, layouts, dealt)
    seconds = quick + (1 - low / in_flight) * (slow - quick)
    wanted = (low > 0) & fits(low) & (seconds < limit_seconds)
    for n in np.flatnonzero(wanted):
        yield float(seconds[n]), int(low[n]), layouts.layout(int(n))


def _fits(query: Query, layouts: LayoutBatch, buffers: RankBuffers) -> np.ndarray:
    needs = query.planned_model.memory(layouts, buffers, query.back_end)
    fits = query.fits_device(needs) & query.fits_host(needs, layouts)
    return np.broadcast_to(fits, (len(layouts),))


def _play(query: Query, layout: Layout, keep: int) -> list[Timed]:
    """With as many passes kept as the real table leaves room for; [] where that is none."""
    for passes in range(keep, 0, -1):
        one = dataclasses.replace(layout, remat=f"keep:{passes}")
        layouts = stack_layouts([one])
        dealt = make_pipelines(query.planned_model, layouts)
        if _fits(query, layouts, batch_buffers(dealt)).all():
            return [(float(batch_step_seconds(query, layouts, dealt)[0]), one)]
    return []
