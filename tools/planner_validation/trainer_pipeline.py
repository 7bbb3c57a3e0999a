"""Pipelines of other trainers, whose ranks continue as soon as their messages have arrived."""

from typing import Any

import numpy as np

from jaxscale.planner.cost.passes import LayerPass
from jaxscale.planner.cost.pipeline import BusiestRank, StageLayers, pass_seconds
from tools.planner_validation.trainer_layout import TrainerLayout

Floats = Any  # a float, or float [N]

CLOSED_FORMS = ("gpipe", "1f1b", "interleaved", "breadth_first")
"""Schedules with a closed form for their time where ranks do not run in lockstep."""


def free_bubble_seconds(
    layout: TrainerLayout,
    passes: dict[str, LayerPass],
    message: Floats,
    stages: StageLayers,
    busiest: BusiestRank,
) -> Floats:
    """Seconds that a pipeline adds to the work of the busiest rank, which is never idle once the
    pipeline is filled: fill, drain and sends.

    Raises:
      ValueError: a schedule without a closed form.
    """
    if layout.schedule not in CLOSED_FORMS:
        raise ValueError(
            f"schedule = {layout.schedule!r} has no closed form without lockstep; "
            f"it can be {', '.join(CLOSED_FORMS)}"
        )
    p, v = np.asarray(layout.pipeline), np.asarray(layout.virtual_stages, float)
    m, one = np.asarray(layout.microbatches, float), pass_seconds(passes)
    both_ways = 2 * message * v
    other = np.where(busiest.has_head == 1, stages.busiest * one, one * stages.total / p)
    waits = (p - 1) / v
    if layout.schedule == "breadth_first":  # ranks wait for a chunk's micro-batches
        waits = waits + np.maximum(0.0, p - m) * (v - 1) / v
    sends = 0.0 if layout.traits.overlap_pipeline else m * both_ways
    return np.where(p > 1, waits * (other + both_ways) + sends, 0.0)


def weight_sweeps(layout: TrainerLayout) -> Floats:
    """Passes of a step over its layers that gather their weights: a pipeline keeps the weights of a
    rank's only chunk, and gathers several chunks again in every round of as many micro-batches as
    ranks."""
    p, v = np.asarray(layout.pipeline), np.asarray(layout.virtual_stages, float)
    m = np.asarray(layout.microbatches, float)
    rounds = np.where(v > 1, m / np.maximum(1, np.minimum(m, p)), 1.0)
    if layout.schedule == "breadth_first":
        rounds = np.ones_like(rounds)
    return np.where(p > 1, rounds, 1.0 if layout.accumulation == "layered" else m)
