"""`python -m jaxscale.plan --measure`: from flags to trials, a table, a picture and numbers."""

import json
import re
import runpy

import pytest

from jaxscale import plan
from jaxscale.autotune import results, search
from jaxscale.config.layout import Layout

DEVICES = {"devices": 8, "kind": "cpu", "platform": "cpu"}


def test_a_user_of_the_folders_name_is_told_the_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("jaxscale.autotune", run_name="__main__")
    assert "python -m jaxscale.plan --config FILE --measure" in capsys.readouterr().err


@pytest.fixture
def formula(monkeypatch):
    """In place of processes: seconds by a formula, and tensor 2 runs out of memory."""

    def run(program, request, limit_seconds):
        if request is None:
            return "measured", DEVICES
        layout = request["config"]["layout"]
        if layout["tensor"] == 2:
            return "out of memory", {"message": "RESOURCE_EXHAUSTED"}
        seconds = layout["pipeline"] + layout["context"] + layout["microbatches"] / 4
        return "measured", {
            "step_seconds": [seconds],
            "loss": 1.0,
            "compile_seconds": 0,
            "memory_bytes": 1 << 20,
        }

    monkeypatch.setattr(search, "_run", run)


def measured(tmp_path, *words):
    storage, numbers = tmp_path / "layouts.db", tmp_path / "numbers.json"
    status = plan.main(
        [
            "--config",
            "configs/tiny.py",
            "--measure",
            "--storage",
            str(storage),
            "--json",
            str(numbers),
            *words,
        ]
    )
    assert status == 0
    return json.loads(numbers.read_text()), storage


@pytest.mark.proof
def test_the_config_first_then_the_planners_best_then_what_the_search_proposes(
    formula, tmp_path, capsys
):
    numbers, storage = measured(tmp_path, "--trials", "14")
    printed = capsys.readouterr().out
    layouts = [Layout(**trial["layout"]) for trial in numbers["trials"]]
    assert len(layouts) == 14
    assert layouts[0] == Layout(data=8)
    assert all(layout.num_devices == 8 for layout in layouts)
    assert storage.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert sum(numbers["importance"].values()) == pytest.approx(1)
    ranked = sorted(t["step_seconds"] for t in numbers["trials"] if t["outcome"] == "measured")
    assert re.search(rf"(?m)^ +1 +{ranked[0]:.4g} ", printed)
    assert results.layout_flags(layouts[0], Layout()) == "--config.layout.data=8"
    more, _ = measured(tmp_path, "--trials", "16")
    assert more["trials"][:14] == numbers["trials"]


@pytest.mark.proof
def test_measuring_nothing_is_a_failure(tmp_path, monkeypatch, capsys):
    def run(program, request, limit_seconds):
        return ("timed out", {"message": "late"}) if request else ("measured", DEVICES)

    monkeypatch.setattr(search, "_run", run)
    storage = tmp_path / "layouts.db"
    words = ["--config", "configs/tiny.py", "--measure", "--trials", "2", f"--storage={storage}"]
    assert plan.main(words) == 1
    assert "all timed out: raise --trial_seconds" in capsys.readouterr().out


@pytest.mark.proof
def test_pins_hold(formula, tmp_path, capsys):
    numbers, _ = measured(tmp_path, "--trials", "9", "--pin", "remat=full", "pipeline=1")
    layouts = [trial["layout"] for trial in numbers["trials"]]
    assert {(layout["remat"], layout["pipeline"]) for layout in layouts} == {("full", 1)}
    said = "without the config's layout: it has remat = none, and --pin has full"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--measure"], "--config is missing"),
        (["--measure", "--config", "configs/tiny.py", "--pin", "tenso=2"], "did you mean 'tensor'"),
    ],
)
def test_refusals(tmp_path, monkeypatch, capsys, words, why):
    """Before a process is started to find the devices."""
    monkeypatch.setattr(search, "_run", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.py").write_text(
        "import ml_collections\ndef get_config(): return ml_collections.ConfigDict({})\n"
    )
    with pytest.raises(SystemExit, match="2"):
        plan.main(words)
    assert why in capsys.readouterr().err
