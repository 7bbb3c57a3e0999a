"""Formulas of memory against the compilers of machines that are not there."""

import statistics

import pytest

from jaxscale.planner.compiled import compare_table, summary

TABLE = "tools/aot_table.json"
PAIRS = {pair.name: pair for pair in compare_table(TABLE)}
TOO_LOW = (
    "gpt_175b v5p:8x8x16 1 remat=full",
    "gpt_1t v5p:16x16x8 0.25 remat=full fsdp=4 tensor=8 pipeline=64 microbatches=128 schedule=1f1b"
    " zero_stage=1",
    "llama2_7b v5p:4x4x4 4 remat=full pipeline=4 microbatches=16 schedule=1f1b",
)
"""What the formulas for TPUs miss, by 21 to 40 per cent: gpt was never looked at there, nor a chunk
of many layers."""


def test_predicted_memory_is_what_compilers_say():
    """In the median, over every case of the table."""
    assert len(PAIRS) >= 24
    assert {pair.back_end for pair in PAIRS.values()} == {"tpu", "gpu"}
    errors = [abs(pair.error) for pair in PAIRS.values()]
    assert statistics.median(errors) <= 0.05, summary(list(PAIRS.values()))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(strict=True) if name in TOO_LOW else ())
        for name in PAIRS
    ],
)
def test_no_case_is_far_off(name):
    assert abs(PAIRS[name].error) <= 0.15


def test_the_summary_names_every_case():
    pairs = list(PAIRS.values())
    text = summary(pairs)
    assert all(pair.name in text for pair in pairs)
    assert f"of {len(pairs)} cases" in text
