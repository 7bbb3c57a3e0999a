"""Why a layout is not the best or does not fit, and the smallest change that would make it fit."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxscale.choices import divisors
from jaxscale.config.layout import HEADS, MESH_AXES, OFFLOADS, PIPELINE_GATHERS, READ_WITH, Layout
from jaxscale.config.zero_stage import gathers_each_pass
from jaxscale.formatting import gigabytes
from jaxscale.pipeline_schedules.shipped import SEARCHED
from jaxscale.planner.memory.terms import TEXTS
from jaxscale.planner.report.text_report import comparison, layout_text
from jaxscale.planner.search.plan import Plan, RankedPlans, predict_plan
from jaxscale.planner.search.search import SearchResult, search_layouts
from jaxscale.planner.search.space import HOST_MEMORY_BYTES, Query, check_pins, pipeline_refusal


def explain_why_not(answer: RankedPlans, pins: dict[str, Any]) -> str:
    """Explains why layouts with these settings are not the best."""
    query = dataclasses.replace(answer.query, pins={**answer.query.pins, **pins})
    asked = pin_text(pins)
    best = answer.plans[0]
    try:
        check_pins(query)
    except ValueError as error:
        said = str(error).removeprefix("--pin ").removeprefix(f"{asked}: ")
        return f"why not {asked}: {said}"
    found = search_layouts(query, 1)
    if found.layouts:
        one = predict_plan(query, found.layouts[0])
        if one.layout == best.layout:
            return f"why not {asked}: {_unread(best.layout, pins) or 'the best plan has it'}"
        slower = one.step_seconds / best.step_seconds - 1
        return (
            f"why not {asked}: feasible; the fastest such layout is "
            f"{100 * abs(slower):.1f} % {'slower' if slower >= 0 else 'faster'} than the best\n"
            + comparison(best, one)
        )
    if found.smallest is None:
        return f"why not {asked}: {_refused(query, found)}" + _nearby(query, pins)
    why = why_infeasible(query, found.smallest)
    text = f"why not {asked}: the layout with least memory, {layout_text(found.smallest)}: {why}"
    change = smallest_change(query, found.smallest)
    if change:
        text += f"\nsmallest change: {change[0]}, for a step of {change[1].step_seconds:.3f} s"
    return text


def _unread(layout: Layout, pins: Mapping[str, Any]) -> str:
    """A message that the layout does not read one of the settings; "" where it has all of them."""
    for axis, names in READ_WITH.items():
        for name in names:
            if getattr(layout, axis) == 1 and pins.get(name, getattr(layout, name)) != getattr(
                layout, name
            ):
                return (
                    f"the best plan has layout.{axis} = 1, where layout.{name} is not read; ask "
                    f"with a larger {axis} too, as {axis}=2 {name}={pins[name]}"
                )
    return ""


def _refused(query: Query, found: SearchResult) -> str:
    """Why the engine refuses the settings."""
    if found.messages:
        return _message(query, found)
    count = query.pins.get("pipeline", 1)
    layout = Layout(**{"data": 1, "microbatches": count, **query.pins})
    return why_infeasible(query, layout) or "; ".join(found.rejected)


def _message(query: Query, found: SearchResult) -> str:
    """A refusal that names one of the settings asked for, or else the batch, or else any; "" where
    there is none."""
    words = [f"layout.{name} = {value!r}" for name, value in query.pins.items()]
    messages = list(found.messages.values())
    named = [one for one in messages if any(re.search(rf"{re.escape(w)}\b", one) for w in words)]
    batch = _batch_refusal(query, found)
    return next(iter([*named, *([batch] if batch else []), *messages]), "")


def _batch_refusal(query: Query, found: SearchResult) -> str:
    """The refusal of a batch that does not split over all devices; "" where it does, or nothing was
    refused for it."""
    model, devices = query.planned_model, query.cluster.num_devices
    if model.sequences % devices == 0 or model.batch_reason not in found.messages:
        return ""
    reason, message = model.refusal(Layout(data=1, fsdp=devices))
    pinned = any(axis in query.pins for axis in MESH_AXES)
    whole = reason == model.batch_reason and not pinned
    return message if whole else found.messages[model.batch_reason]


def _nearby(query: Query, pins: dict[str, Any]) -> str:
    """The nearest value of a pin, one at a time, for which some layout is feasible."""
    for name, value in pins.items():
        if not isinstance(value, int):
            continue
        for factor in (0.5, 2, 0.25, 4):
            other = {**query.pins, name: int(value * factor)}
            if other[name] >= 1 and value * factor == other[name]:
                found = search_layouts(dataclasses.replace(query, pins=other), 1)
                if found.layouts:
                    return (
                        f"\nsmallest change: {name}={other[name]}, for a step of "
                        f"{found.seconds[0]:.3f} s"
                    )
    return ""


def nothing_fits(query: Query, found: SearchResult) -> str:
    """Explains why no layout is feasible, and what would help."""
    pins = pin_text(query.pins)
    asked = f"{query.cluster.num_devices} {query.cluster.name}" + (f" with {pins}" if pins else "")
    if found.smallest is None:
        said = _message(query, found) or next(iter(found.rejected), "")
        return f"no layout on {asked}: {said}"
    why = why_infeasible(query, found.smallest)
    change = smallest_change(dataclasses.replace(query, pins={}), found.smallest)
    hint = f"; it would fit with {change[0]}" if change else "; use more devices"
    return (
        f"no layout on {asked} fits. {layout_text(found.smallest)} needs least memory: {why}{hint}"
    )


def pin_text(pins: Mapping[str, Any]) -> str:
    """The settings as written after --pin."""
    return " ".join(f"{name}={value}" for name, value in pins.items())


def why_infeasible(query: Query, layout: Layout) -> str:
    """Why a layout is infeasible for the model on the cluster; "" where it is feasible."""
    model = query.planned_model
    if said := model.refusal(layout)[1] or pipeline_refusal(model, layout):
        return said
    plan = predict_plan(query, layout)
    if plan.host_bytes > HOST_MEMORY_BYTES:
        return (
            f"it offloads {gigabytes(plan.host_bytes)} per device, more than the "
            f"{gigabytes(HOST_MEMORY_BYTES)} of host memory assumed for each"
        )
    if plan.fits:
        return ""
    name, size = max(plan.memory.at_peak.items(), key=lambda item: item[1])
    return (
        f"it does not fit: {gigabytes(plan.memory_bytes)} per device, "
        f"{gigabytes(plan.memory_bytes - plan.limit_bytes)} more than {gigabytes(plan.limit_bytes)}"
        f"; the largest part is {TEXTS[name]}, {gigabytes(size)}"
    )


def smallest_change(query: Query, layout: Layout) -> tuple[str, Plan] | None:
    """The fastest feasible layout one setting away, or else two settings away.

    Returns:
      The settings that change, and the plan; None where no two changes suffice.
    """
    found = _best(query, layout, neighbours(query, layout))
    if found:
        return found
    savers = [one for one in neighbours(query, layout) if _saves(layout, one)]
    return _best(query, layout, itertools.chain(*(neighbours(query, one) for one in savers)))


def _best(query: Query, layout: Layout, others: Iterator[Layout] | Sequence[Layout]):
    plans = [predict_plan(query, one) for one in others if not why_infeasible(query, one)]
    if not plans:
        return None
    best = min(plans, key=lambda plan: plan.step_seconds)
    return difference(layout, best.layout), best


def _saves(before: Layout, after: Layout) -> bool:
    """Whether a change is among the largest savers of memory."""
    return (
        (after.remat == "full") > (before.remat == "full")
        or after.microbatches == 2 * before.microbatches
        or gathers_each_pass(after.zero_stage) > gathers_each_pass(before.zero_stage)
        or after.tensor == 2 * before.tensor
    )


def difference(before: Layout, after: Layout) -> str:
    """The settings that differ, as a user would write them."""
    changed = {
        field.name: getattr(after, field.name)
        for field in dataclasses.fields(Layout)
        if getattr(before, field.name) != getattr(after, field.name)
    }
    return ", ".join(f"layout.{name} = {value!r}" for name, value in changed.items())


def neighbours(query: Query, layout: Layout) -> list[Layout]:
    """Layouts on as many devices that differ in one setting, or in the sizes of two axes."""
    shard = query.planned_model.sequences // layout.batch_shards
    values: dict[str, Iterable[Any]] = {
        "microbatches": divisors(max(1, shard)),
        "remat": ("full", "save_matmuls", "save_all_but_attention"),
        "offload": OFFLOADS,
        "zero_stage": range(4),
        "accumulation": ("sequential",),
        "context_method": ("gather",),
    }
    schedules = []
    if layout.pipeline > 1:
        values["remat"] = (*values["remat"], "keep:1", "keep:2", "keep:4", "keep:8")
        values["pipeline_gather"] = PIPELINE_GATHERS
        values["head"] = HEADS
        schedules = itertools.product(SEARCHED, (1, 2, 4))
    changes: list[dict] = [{name: value} for name in values for value in values[name]]
    changes += [{"schedule": name, "virtual_stages": chunks} for name, chunks in schedules]
    for smaller, larger in itertools.permutations(MESH_AXES, 2):
        size = getattr(layout, smaller)
        changes += [
            {smaller: size // factor, larger: getattr(layout, larger) * factor}
            for factor in divisors(size)
            if factor > 1
        ]
    found = []
    for change in changes:
        try:
            other = dataclasses.replace(layout, **change)
        except ValueError:
            continue
        if other != layout and other not in found:
            found.append(other)
    return found
