"""Grids of rows x columns that a plan's tensor ranks can form, with the bytes that each sends."""

import dataclasses

from jaxscale.choices import divisors
from jaxscale.formatting import gigabytes, table
from jaxscale.planner.cost.tensor_volumes import layer_volumes, step_volumes
from jaxscale.planner.search.plan import Plan, predict_plan
from jaxscale.planner.search.space import Query


def grids_text(query: Query, plan: Plan) -> str:
    """A line for each grid that the engine accepts; "" where there is only one."""
    model, chosen = query.planned_model, plan.layout
    # Rows are refused with context, expert and overlap_tensor.
    if not model.has_tensor_rows or chosen.context * chosen.expert > 1 or chosen.overlap_tensor:
        return ""
    rows: list[tuple[str, ...]] = [
        ("rows x columns", "a layer, over rows", "columns", "a step, over rows", "columns", "time")
    ]
    for across in divisors(chosen.tensor):
        layout = dataclasses.replace(chosen, tensor_rows=across)
        if model.refusal(layout)[0]:
            continue
        each = layer_volumes(query.work, layout, model.sequences)
        whole = step_volumes(query.work, layout, model.sequences)
        asked = predict_plan(query, layout)
        here = " (this)" if layout == chosen else "" if asked.fits else " (does not fit)"
        sizes = (gigabytes(size) for size in (*each, *whole))
        grid = f"{across} x {layout.tensor_columns}{here}"
        rows.append((grid, *sizes, f"{asked.step_seconds:.3f} s"))
    return table(rows) if len(rows) > 2 else ""
