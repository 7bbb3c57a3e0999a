"""Formulas of memory against the compilers of machines that are not there."""

import statistics

import pytest

from jaxscale.planner.memory.against_compiler import compare_table, comparison_text

TABLE = "tools/aot_table.json"
PAIRS = {pair.name: pair for pair in compare_table(TABLE)}


def test_predicted_memory_is_what_compilers_say():
    """In the median, over every case of the table."""
    assert len(PAIRS) >= 24
    assert {pair.back_end for pair in PAIRS.values()} == {"tpu", "gpu"}
    errors = [abs(pair.error) for pair in PAIRS.values()]
    assert statistics.median(errors) <= 0.05, comparison_text(list(PAIRS.values()))


@pytest.mark.parametrize("name", PAIRS)
def test_no_case_is_far_off(name):
    assert abs(PAIRS[name].error) <= 0.15, comparison_text([PAIRS[name]])


def test_ranks_of_tensor_are_right_on_tpus():
    errors = [
        abs(pair.error)
        for name, pair in PAIRS.items()
        if pair.back_end == "tpu" and "tensor=" in name
    ]
    assert len(errors) == 4
    assert max(errors) <= 0.06


def test_the_summary_names_every_case():
    pairs = list(PAIRS.values())
    text = comparison_text(pairs)
    assert all(pair.name in text for pair in pairs)
    assert f"of {len(pairs)} cases" in text
