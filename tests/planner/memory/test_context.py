"""Formulas of memory against steps whose state is sharded over context, compiled for absent
hardware.

Each figure is what `python -m jaxscale.aot --topology NAME` printed as the step's total, with the
settings of its row, full remat and data 1 (jaxlib 0.12.0.1, libtpu 0.0.51): `h200:1x8`, and
`v5p:2x2x2` where the back end is "tpu". Two steps are outside of the limit, and in
docs/planning.md: fsdp 1 x context 8 of llama3_8b, 22.9 % too low, where the loss has a single
chunk, and llama2_7b in stage 3, 13.2 % too low.
"""

import statistics

import pytest

from tests.planner.memory.test_families import BATCH, FULL, PASSES, Compiled

COMMON = (FULL, "layout.data=1", "model.num_layers=4")
SPREAD = ("layout.fsdp=2", "layout.context=4")
LLAMA3 = (*COMMON, "model.attention=flash", "data.seq_len=32768")
LLAMA2 = (*COMMON, *SPREAD, "data.seq_len=8192")
ONCE, TWICE = f"{PASSES}=1", f"{PASSES}=2"

STEPS = (
    Compiled("llama3_8b", (*LLAMA3, *SPREAD, f"{BATCH}=2", ONCE), 10_288_122_308),
    Compiled(
        "llama3_8b", (*LLAMA3, *SPREAD, f"{BATCH}=4", TWICE, "layout.zero_stage=2"), 13_246_498_692
    ),
    Compiled(
        "llama3_8b", (*LLAMA3, *SPREAD, f"{BATCH}=2", ONCE, "layout.zero_stage=1"), 11_881_982_596
    ),
    Compiled(
        "llama3_8b",
        (*LLAMA3, "layout.fsdp=2", "layout.context=2", "layout.tensor=2", f"{BATCH}=2", ONCE),
        7_666_974_660,
    ),
    Compiled(
        "llama2_7b",
        (*LLAMA2, f"{BATCH}=4", TWICE, "layout.zero_stage=1"),
        6_746_404_032,
        "tpu",
    ),
    Compiled(
        "mixtral_8x7b",
        (
            *COMMON,
            "layout.fsdp=1",
            "layout.expert=4",
            "layout.context=2",
            "data.seq_len=8192",
            f"{BATCH}=4",
            ONCE,
        ),
        28_253_488_188,
    ),
)


@pytest.mark.proof
def test_predicted_memory_is_what_compilers_say():
    errors = [abs(step.error) for step in STEPS]
    assert statistics.median(errors) <= 0.05
    assert max(errors) <= 0.11
