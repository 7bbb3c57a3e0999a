"""Each kind of layout, beside fsdp, gives one device's losses, gradient norms and parameters."""

import pytest

from tests.invariants.models import check_model_layout

KINDS_OF_LAYOUTS = {
    "tensor": {"tensor": 2, "microbatches": 2, "zero_stage": 1},
    "context": {"context": 2},
    "expert": {"expert": 2},
    "layered": {"accumulation": "layered", "microbatches": 2, "zero_stage": 3},
    "pipeline": {"pipeline": 4, "schedule": "1f1b", "microbatches": 4},
}


@pytest.mark.parametrize("kind", KINDS_OF_LAYOUTS)
def test_each_kind_of_layout_is_one_device_in_float64(kind):
    model = "plain experts" if kind == "expert" else "plain decoder"
    check_model_layout(model, {"fsdp": 2, **KINDS_OF_LAYOUTS[kind]})
