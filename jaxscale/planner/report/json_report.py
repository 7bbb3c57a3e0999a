"""The ranking of layouts for a program: `plan --json`."""

import dataclasses
import math
from typing import Any

from jaxscale.planner.cost.tensor_volumes import step_volumes
from jaxscale.planner.search.plan import Plan, RankedPlans


def ranking_json(answer: RankedPlans) -> dict[str, Any]:
    """The plans, best first, and how many layouts were considered and refused: nested records."""
    model = answer.query.planned_model
    return {
        "params": model.num_params,
        "active_params": model.num_active_params,
        "note": answer.note,
        "hardware": answer.query.cluster.name,
        "devices": answer.query.cluster.num_devices,
        "plans": [_plan_json(one, model.run_tokens) for one in answer.plans],
        "considered": answer.found.considered,
        "rejected": dict(answer.found.rejected),
    }


def _plan_json(one: Plan, tokens: float) -> dict[str, Any]:
    run_cost = one.run_cost(tokens)
    return {
        "layout": dataclasses.asdict(one.layout),
        "layers": list(one.layers),
        "step_seconds": one.step_seconds,
        "tokens_per_second": one.tokens_per_second,
        "mfu": one.mfu,
        "hfu": one.hfu,
        "memory_bytes": one.memory_bytes,
        "stage_memory_bytes": one.stage_bytes,
        "terms": one.terms,
        "hidden": one.hidden,
        "tensor_bytes": _tensor_bytes(one),
        "memory": one.memory.at_peak,
        "host_bytes": one.host_bytes,
        "watts": _known(one.watts),
        "run_seconds": float(run_cost.seconds),
        "joules": _known(run_cost.joules),
        "usd": _known(run_cost.usd),
        "goodput": run_cost.goodput.fraction,
    }


def _known(value: float) -> float | None:
    """None for nan, which JSON does not have."""
    return None if math.isnan(value) else float(value)


def _tensor_bytes(one: Plan) -> dict[str, float]:
    """Bytes that a device sends in a step over rows and columns of tensor; {} where no formula
    counts them."""
    model = one.planned_model
    if not model.has_tensor_rows:
        return {}
    return step_volumes(model.work, one.layout, model.sequences)._asdict()
