"""Formulas of memory against the compilers of machines that are not there."""

import statistics

from jaxscale.planner.compiled import compare_table, summary

TABLE = "tools/aot_table.json"


def test_predicted_memory_is_what_compilers_say():
    """Median error 5 per cent at most, worst 15, over every case of the table."""
    pairs = compare_table(TABLE)
    assert len(pairs) >= 8
    assert {pair.back_end for pair in pairs} == {"tpu", "gpu"}
    errors = [abs(pair.error) for pair in pairs]
    assert statistics.median(errors) <= 0.05, summary(pairs)
    assert max(errors) <= 0.15, summary(pairs)


def test_the_summary_names_every_case():
    pairs = compare_table(TABLE)
    text = summary(pairs)
    assert all(pair.name in text for pair in pairs)
    assert f"of {len(pairs)} cases" in text
