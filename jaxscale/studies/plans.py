"""Plans of studies: the fastest layout with fixed settings, and the columns that studies share."""

import math
from collections.abc import Mapping
from typing import Any

from jaxscale.config import Config
from jaxscale.config.layout import Layout
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.report.text_report import layout_text
from jaxscale.planner.search.plan import Plan, predict_plan
from jaxscale.planner.search.search import search_layouts
from jaxscale.planner.search.space import Query, check_pins
from jaxscale.studies.study import StudyRow

Planned = tuple[Plan | None, str]
"""A plan, or None with the reason."""

PLAN_COLUMNS = {
    "layout": "the layout, as python -m jaxscale.plan prints it",
    "fits": "whether its predicted memory fits on a device",
    "step_seconds": "predicted seconds of a step",
    "tokens_per_second": "of all devices",
    "mfu": "model FLOPs utilisation: without recompute, causal attention",
    "memory_gb": "predicted peak of a device",
    "refused": "why there is no plan",
}
"""Columns of `plan_row`."""


def fastest_plan(
    config: Config, hardware: str, devices: int, pins: Mapping[str, Any], **overrides: Any
) -> Planned:
    """The fastest plan that fits, or the most frequent reason why layouts are refused; without
    the search for a change that would fit, which takes longer.

    Args:
      overrides: of the device's figures.
    """
    try:
        query = Query(config, make_cluster(hardware, devices, **overrides), pins)
        check_pins(query)
        found = search_layouts(query, 1)
        if found.layouts:
            return predict_plan(query, found.layouts[0]), ""
    except ValueError as error:
        return None, str(error)
    return None, next(iter(found.rejected), "no layout has these settings")


def plan_of(
    config: Config, hardware: str, devices: int, layout: Layout, **overrides: Any
) -> Planned:
    """The plan of a layout, whether or not it fits."""
    try:
        query = Query(config, make_cluster(hardware, devices, **overrides))
        return predict_plan(query, layout), ""
    except ValueError as error:
        return None, str(error)


def plan_row(planned: Planned) -> StudyRow:
    """The values of `PLAN_COLUMNS`."""
    plan, refused = planned
    if plan is None:
        return {**dict.fromkeys(PLAN_COLUMNS), "refused": refused}
    return {
        "layout": layout_text(plan.layout),
        "fits": bool(plan.fits),
        "step_seconds": plan.step_seconds,
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "memory_gb": plan.memory_bytes / 1e9,
        "refused": "",
    }


def known_watts(plan: Plan) -> float | None:
    """Mean power of a device; None where no power of it is known."""
    return None if math.isnan(plan.watts) else plan.watts
