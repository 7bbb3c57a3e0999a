"""Comparison of compiled steps with MaxText's: one compiler, an estimate from few layers."""

import importlib.metadata
import json
import pathlib
import runpy
import sys
from types import SimpleNamespace

import pytest

ROOT = pathlib.Path(__file__).parents[2]
tool = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "aot_peer.py")))
SECONDS_A_LAYER, REST = 0.07, 0.05


def test_a_layer_costs_half_of_what_programs_that_differ_by_two_do():
    few, more = (REST + n * SECONDS_A_LAYER for n in (tool.SHALLOW, tool.DEEP))
    assert tool.of_all_layers(few, more) == pytest.approx(REST + 32 * SECONDS_A_LAYER)


def test_each_case_has_a_row_with_both_numbers():
    ours, theirs = ({"argument_bytes": 1e9, "temp_bytes": size} for size in (10e9, 12e9))
    compiled = {case.ours: ours for case in tool.CASES}
    kept = {case.settings: theirs for case in tool.CASES} | {tool.ESTIMATE: [2.243, 2.19]}
    text = tool.table(compiled, kept)
    row = "| 1.00 / 1.00 | 12.00 / 10.00 | 0.85 |"
    assert text.count(row) == len(tool.CASES)
    assert text.endswith("2.243 / 2.190 s, ratio 0.98.")
    only = tool.CASES[0]
    kept[only.settings] = {"temp_bytes": 8e9}  # from before arguments were recorded
    (first, *_) = tool.rows({only.ours: ours}, kept)
    assert first.ratio == 10 / 8
    assert "| 12.00 / 10.00 |" not in tool.table({only.ours: ours}, kept)


def test_a_table_of_another_compiler_is_refused(monkeypatch, capsys):
    """MaxText's step takes 13.7 GB by libtpu 0.0.50.1, and 9.2 by 0.0.52."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.0.1")
    monkeypatch.setattr(sys, "argv", ["aot_peer.py"])
    with pytest.raises(SystemExit):
        tool.main()
    assert "libtpu 0.0.1 is installed, and tools/aot_table.json is of" in capsys.readouterr().err


def test_what_is_kept_is_of_the_tables_compiler():
    compiled, kept = (json.loads(file.read_text()) for file in (tool.TABLE, tool.KEPT))
    assert tool.rows(compiled, kept)
    assert {row.ours["libtpu"] for row in tool.rows(compiled, kept)} == {kept["libtpu"]}


def test_the_page_has_a_place_for_the_table():
    text = tool.PAGE.read_text()
    assert text.count(tool.BEGIN) == text.count(tool.END) == 1


def test_the_cases_are_in_the_table_of_absent_machines():
    table = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "aot_table.py")))
    assert {case.ours for case in tool.CASES} <= {case.name for case in table.CASES}
