"""Memory of custom models against compiled steps: the temporaries of their layers are predicted by
liveness.

Each figure is the total of the step's `memory_analysis` (jaxlib 0.12.0.1): for eight CPUs in
float32, and for eight H200 of `compiled.topology` in bfloat16.
"""

import statistics
from typing import Any, NamedTuple

import jax
import pytest

from jaxscale.config import Config, from_dict
from jaxscale.planner.auto_layout import choose_layout
from jaxscale.planner.memory.step import step_memory
from jaxscale.planner.plan_layouts import plan_layouts
from jaxscale.planner.report import text_report
from jaxscale.run.setup.layout import open_engine, planned
from jaxscale.run.setup.layout_report import describe_layout
from jaxscale.run.trainer import lower_step

BRANCHES = {"family": "docs.my_model:MyModel", "d_model": 256, "num_layers": 4, "d_ff": 1024}
BRANCHES |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
STACKS = {"family": "tests.models.two_stacks:make", "vocab_size": 64, "head_dim": 8}
CONVOLUTION = {"family": "tests.models.gated_convolution:make", "vocab_size": 512}
CONVOLUTION |= {"width": 256, "hidden": 1024}

FULL, NONE = {"fsdp": 8, "remat": "full"}, {"fsdp": 8, "remat": "none"}
HALVES = {"data": 8, "zero_stage": 1, "remat": "none", "microbatches": 2}
COLUMNS = {"fsdp": 4, "tensor": 2, "remat": "full", "microbatches": 2}
PIPELINE = {"pipeline": 2, "fsdp": 4, "schedule": "1f1b", "microbatches": 4, "zero_stage": 1}


class Compiled(NamedTuple):
    """A step for eight devices; `layout` without the axes of size 1."""

    model: dict[str, Any]
    layout: dict[str, Any]
    peak_bytes: int
    back_end: str = "cpu"

    @property
    def config(self) -> Config:
        dtype = "float32" if self.back_end == "cpu" else "bfloat16"
        # Two stacks are 32 wide: with fewer sequences blocks of scores are most of their memory.
        batch = 256 if self.model is STACKS else 64
        return from_dict(
            {
                "model": {**self.model, "compute_dtype": dtype},
                "data": {"global_batch_size": batch, "seq_len": 1024},
                "layout": {"data": 1, **self.layout},
            }
        )

    @property
    def error(self) -> float:
        """Of the predicted peak, relative; positive where it is higher."""
        needs = step_memory(self.config, self.back_end, own_host=self.back_end != "cpu")
        return needs.peak / self.peak_bytes - 1


STEPS = {
    "gated branches, full": Compiled(BRANCHES, FULL, 453_370_088),
    "gated branches, none": Compiled(BRANCHES, NONE, 725_179_872),
    "gated branches, halves": Compiled(BRANCHES, HALVES, 469_952_544),
    "gated branches, columns": Compiled(BRANCHES, COLUMNS, 262_996_752),
    "gated branches, pipeline": Compiled(BRANCHES, PIPELINE, 495_011_544),
    "two stacks, full": Compiled(STACKS, FULL, 96_422_400),
    "two stacks, none": Compiled(STACKS, NONE, 201_707_776),
    "two stacks, halves": Compiled(STACKS, HALVES, 146_475_744),
    "two stacks, columns": Compiled(STACKS, COLUMNS, 73_563_736),
    "two stacks, pipeline": Compiled(STACKS, PIPELINE, 235_763_352),
    "gated convolution, full": Compiled(CONVOLUTION, FULL, 357_745_532),
    "gated convolution, none": Compiled(CONVOLUTION, NONE, 1_219_163_132),
    "gated convolution, halves": Compiled(CONVOLUTION, HALVES, 718_177_700),
    "gated convolution, columns": Compiled(CONVOLUTION, COLUMNS, 214_860_028),
    "gated convolution, pipeline": Compiled(CONVOLUTION, PIPELINE, 709_828_236),
    "gated branches, full, h200": Compiled(BRANCHES, FULL, 169_522_088, "gpu"),
    "gated branches, none, h200": Compiled(BRANCHES, NONE, 367_189_752, "gpu"),
    "gated branches, halves, h200": Compiled(BRANCHES, HALVES, 268_218_168, "gpu"),
    "gated branches, columns, h200": Compiled(BRANCHES, COLUMNS, 109_270_824, "gpu"),
    "gated branches, pipeline, h200": Compiled(BRANCHES, PIPELINE, 240_143_400, "gpu"),
    "gated convolution, full, h200": Compiled(CONVOLUTION, FULL, 166_427_500, "gpu"),
    "gated convolution, none, h200": Compiled(CONVOLUTION, NONE, 661_464_764, "gpu"),
}


@pytest.mark.proof
def test_memory_is_what_compilers_say():
    errors = {name: abs(step.error) for name, step in STEPS.items()}
    assert statistics.median(errors.values()) <= 0.08, errors
    assert max(errors.values()) <= 0.15, errors


@pytest.mark.proof
@pytest.mark.compiles
def test_a_block_that_no_one_planned_before(tmp_path):
    """Described, planned, given a layout by "auto", and compared with its compiled step."""
    step = STEPS["gated convolution, full"]
    config, engine = open_engine(step.config)
    needs = step_memory(config)
    assert "temporaries by liveness" in describe_layout(engine)
    memory = lower_step(engine).compile().memory_analysis()
    assert memory
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    total += memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert total == pytest.approx(step.peak_bytes, rel=0.01)
    assert needs.peak == pytest.approx(total, rel=0.15)
    answer = plan_layouts(config, "H200", 16, top=3)
    assert "by liveness" in text_report.ranking_text(answer)
    assert all(plan.fits for plan in answer.plans)


@pytest.mark.proof
@pytest.mark.parametrize("model", [BRANCHES, STACKS, CONVOLUTION])
def test_a_layout_is_chosen(model):
    auto = from_dict(
        {
            "model": model,
            "data": {"global_batch_size": 64, "seq_len": 256},
            "layout": {"schedule": "auto"},
        }
    )
    if model is CONVOLUTION:
        assert planned(auto).layout.num_devices == jax.device_count()
    plan = choose_layout(auto, "NVIDIA H200", "gpu", 8)
    assert plan.layout.num_devices == 8
    assert plan.fits
