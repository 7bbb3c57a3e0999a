"""The table of compiled steps: its cases, and how a result is shown."""

import pathlib
import runpy
from types import SimpleNamespace

import pytest

from jaxscale import config
from jaxscale.compiled import topology
from jaxscale.config.layout import Layout

pytestmark = pytest.mark.compiles

ROOT = pathlib.Path(__file__).parents[2]
tool = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "aot_table.py")))
FITS = {
    "fits": True,
    "peak_bytes": 2e9,
    "limit_bytes": 16e9,
    "argument_bytes": 5e8,
    "temp_bytes": 1e9,
    "layout": {"fsdp": 64},
    "optimal_seconds": 1.25,
    "collective_bytes": 4e6,
    "beside_bytes": 3e6,
    "link_seconds": 0.5,
    "wait_seconds": 0.3,
    "libtpu": "0.0.50.1",
}


def test_there_are_enough_cases_and_each_is_its_own():
    assert len({case.name for case in tool.CASES}) == len(tool.CASES) >= 24


@pytest.mark.parametrize("case", [*tool.CASES, *tool.STAGES], ids=lambda case: case.name)
def test_a_case_names_a_config_a_machine_and_settings_of_the_layout(case):
    assert f"{case.topology.partition(':')[0]}:" in topology.describe_topologies()
    names = [setting.partition("=")[0] for setting in case.layout.split()]
    names = [name for name in names if "." not in name]
    assert set(names) <= set(vars(Layout()))
    sequences = case.sequences * tool.num_devices(case.topology)
    assert sequences == round(sequences)
    assert config.load(case.model).model.num_layers > 1


def test_a_step_of_every_zero_stage_is_shown_whether_it_fits_or_not():
    kept = {case.name: FITS for case in tool.STAGES}
    kept[tool.STAGES[0].name] = FITS | {"fits": False, "peak_bytes": 20e9}
    first, *others = tool.stage_table(kept).splitlines()[2:]
    assert "| 16.0, exceeded by 4.0 |" in first
    assert len(others) == 3
    assert all("| 16.0 |" in line for line in others)
    # 16, 4 + 12 / n, 2 + 14 / n and 16 / n bytes a parameter.
    assert [round(tool.zero_bytes(10**9, stage, 4) / 1e9, 2) for stage in range(4)] == [
        16.0,
        7.0,
        5.5,
        4.0,
    ]
    text = tool.put("a\n<!-- x -->\nold\n<!-- y -->\nb", "<!-- x -->", "new", "<!-- y -->")
    assert text == "a\n<!-- x -->\nnew\n<!-- y -->\nb"


def test_a_row_has_the_limit_and_by_how_much_it_is_exceeded():
    case = tool.Case("llama2_7b", "v5p:4x4x4", 4, "remat=full")
    assert tool.row(case, FITS) == [
        "llama2_7b",
        "v5p:4x4x4",
        "4",
        "fsdp=64 remat=full",
        "0.50",
        "1.00",
        "16.0",
        "1.25",
        "75",
        "40",
    ]
    too_much = FITS | {"fits": False, "peak_bytes": 20e9, "optimal_seconds": None}
    assert "16.0, exceeded by 4.0" in tool.row(case, too_much)
    old = {"collectives": [{"bytes": 3e6, "async": True, "beside_flops": 1e9}]}
    assert tool.hidden(old) == ("?", "?"), "which of its runs it was is not known"
    assert tool.hidden({"collectives": [old["collectives"][0] | {"beside_flops": 0}]})[0] == "0"
    refused = tool.row(case, {"refusal": "error: no"})
    assert "refused" in refused
    header, ruler, *_ = tool.table({}).splitlines()
    assert {len(refused), len(tool.row(case, FITS))} == {header.count("|") - 1}
    assert ruler.count("|") == header.count("|")
    assert tool.table({tool.CASES[0].name: FITS}).endswith("\n\nTPUs by libtpu 0.0.50.1.")
