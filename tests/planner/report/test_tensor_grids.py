"""Grids of tensor in a plan's report."""

import pytest

from jaxscale.planner.plan_layouts import plan_layouts
from jaxscale.planner.report.tensor_grids import grids_text

PINS = {"pipeline": 1, "context": 1, "zero_stage": 3, "microbatches": 8, "remat": "full"}


def test_every_grid_that_the_engine_accepts_is_there():
    pins = {**PINS, "tensor": 16, "offload": "none"}
    answer = plan_layouts(
        "configs/llama3_8b.py", "h200", 16, pins=pins, top=2, max_memory_bytes=1e11
    )
    text = grids_text(answer.query, answer.plans[0])
    names = ["1 x 16 (this)", "2 x 8", "4 x 4", "8 x 2", "16 x 1 (does not fit)"]
    lines = text.splitlines()[1:]
    assert [line.split("  ")[0] for line in map(str.strip, lines)] == names
    assert lines[0].endswith(f"{answer.plans[0].step_seconds:.3f} s")


@pytest.mark.parametrize("pins", [{"tensor": 1}, {"tensor": 8, "overlap_tensor": True}])
def test_one_grid_is_not_listed(pins):
    pins = {**PINS, **pins, "offload": "none"}
    answer = plan_layouts("configs/llama3_8b.py", "h200", 8, pins=pins, top=1)
    assert not grids_text(answer.query, answer.plans[0])
