"""Our compiled step beside the peer's: how programs of few layers stand for many."""

import pathlib
import runpy
from types import SimpleNamespace

import pytest

ROOT = pathlib.Path(__file__).parents[2]
tool = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "aot_peer.py")))
TABLE = {
    tool.CASE + "full": {"temp_bytes": 10e9},
    tool.CASE + tool.MINIMAL: {"temp_bytes": 49.1e9},
}
SECONDS_A_LAYER, REST = 0.07, 0.05


def test_a_layer_costs_half_of_what_programs_that_differ_by_two_do():
    kept = {
        str(n): {"optimal_seconds": REST + n * SECONDS_A_LAYER} for n in (tool.SHALLOW, tool.DEEP)
    }
    numbers = tool.ours(TABLE, kept)
    assert numbers["seconds"] == pytest.approx(REST + 32 * SECONDS_A_LAYER)
    assert "| temporaries, every product kept | 53.30 GB | 49.10 GB |" in tool.table(numbers)
    assert "| estimate, full remat | 2.243 s | 2.290 s |" in tool.table(numbers)


def test_the_page_has_a_place_for_the_table():
    text = tool.PAGE.read_text()
    assert text.count(tool.BEGIN) == text.count(tool.END) == 1


def test_the_cases_are_in_the_table_of_absent_machines():
    table = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "aot_table.py")))
    assert {*TABLE} <= {case.name for case in table.CASES}
