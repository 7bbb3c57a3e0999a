"""Partial recompute in pipelines: `remat = "keep:N"`, with the largest N that fits.

With "full" every pass through a chunk is recomputed, with "none" each keeps its activations; with
"keep:N" a rank keeps the activations of N passes at a time and recomputes the others. The best N
differs between layouts, so it is found for each one: first by closed forms, then, for the most
promising, by simulating the table. Early ranks of a pipeline save the most activations; a policy
per stage uses the memory that late ranks would leave idle (Mist, EuroSys 2025).
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxscale.config.layout import Layout
from jaxscale.planner.model.layout_batch import LayoutBatch, stack_layouts
from jaxscale.planner.search.pipeline_batch import (
    batch_buffers,
    batch_step_seconds,
    least_peaks,
    least_seconds,
    make_pipelines,
)
from jaxscale.planner.search.space import Query
from jaxscale.planner.tables.pipeline_slots import RankBuffers

MAX_SIMULATED = 48
"""Tables that are simulated, the most promising first."""

TimedLayout = tuple[float, Layout]  # seconds of a step


def search_partial_remat(
    query: Query, recomputed: list[LayoutBatch], best: list[TimedLayout], top: int
) -> list[TimedLayout]:
    """The fastest layouts, including layouts that recompute some passes.

    Args:
      recomputed: layouts with a pipeline and remat "full", those with equal string settings
        together.
      top: how many layouts are wanted.
    """
    found = list(best)

    def limit() -> float:
        return found[top - 1][0] if len(found) >= top else np.inf

    hopeful = _hopeful(query, recomputed, limit())
    guesses = sorted(
        (guess for layouts in hopeful for guess in _guesses(query, layouts, limit())),
        key=lambda guess: guess[0],
    )
    for seconds, keep, layout in guesses[:MAX_SIMULATED]:
        if seconds > limit():
            break
        simulated = _simulate(query, layout, keep)
        found = sorted([*found, *simulated], key=lambda one: one[0])
    return found


def _hopeful(
    query: Query, recomputed: list[LayoutBatch], limit_seconds: float
) -> list[LayoutBatch]:
    """Layouts that could beat the limit with every pass kept, and fit with every one recomputed;
    by bounds, without tables."""
    kept = [dataclasses.replace(layouts, remat="none") for layouts in recomputed]
    fast = [bound < limit_seconds for bound in least_seconds(query, kept)]
    some = [layouts.take(good) for layouts, good in zip(recomputed, fast) if good.any()]
    small = [peak <= query.limit_bytes for peak in least_peaks(query, some)]
    return [layouts.take(good) for layouts, good in zip(some, small) if good.any()]


def _guesses(
    query: Query, layouts: LayoutBatch, limit_seconds: float
) -> Iterator[tuple[float, int, Layout]]:
    """Estimated seconds, passes to keep, and the layout that recomputes every pass; of layouts that
    could beat the limit, fit with some passes kept, and do not fit with all of them kept."""
    kept = dataclasses.replace(layouts, remat="none")
    # The tables without recompute are cached already: they leave fewer to build.
    kept_pipelines = make_pipelines(query.planned_model, kept)
    quick = batch_step_seconds(query, kept, kept_pipelines)
    hopeful = (quick < limit_seconds) & ~_fits(query, kept, batch_buffers(kept_pipelines))
    if not hopeful.any():
        return
    layouts, quick = layouts.take(hopeful), quick[hopeful]
    pipelines = make_pipelines(query.planned_model, layouts)
    least, most = (
        batch_buffers(pipelines),
        batch_buffers(kept_pipelines.take(hopeful)),
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
    # Recomputing a single pass needs as much memory as keeping it.
    low, high = np.zeros(len(layouts), int), np.maximum(in_flight - 2, 0)
    # Binary search for the most passes that fit: memory grows with the passes kept.
    while (low < high).any():
        middle = (low + high + 1) // 2
        enough = fits(middle)
        low, high = np.where(enough, middle, low), np.where(enough, high, middle - 1)
    slow = batch_step_seconds(query, layouts, pipelines)
    seconds = quick + (1 - low / in_flight) * (slow - quick)
    wanted = (low > 0) & fits(low) & (seconds < limit_seconds)
    for n in np.flatnonzero(wanted):
        yield float(seconds[n]), int(low[n]), layouts.layout(int(n))


def _fits(query: Query, layouts: LayoutBatch, buffers: RankBuffers) -> np.ndarray:
    needs = query.planned_model.memory(layouts, buffers, query.back_end)
    fits = query.fits_device(needs) & query.fits_host(needs)
    return np.broadcast_to(fits, (len(layouts),))


def _simulate(query: Query, layout: Layout, keep: int) -> list[TimedLayout]:
    """The layout with the most passes kept that fit by the real table; [] where none does."""
    for passes in range(keep, 0, -1):
        one = dataclasses.replace(layout, remat=f"keep:{passes}")
        layouts = stack_layouts([one])
        pipelines = make_pipelines(query.planned_model, layouts)
        if _fits(query, layouts, batch_buffers(pipelines)).all():
            return [(float(batch_step_seconds(query, layouts, pipelines)[0]), one)]
    return []
