"""Measured search: every outcome is stored and used, and a search resumes after a kill."""

import os
import pathlib
import signal
import sqlite3
import statistics
import subprocess
import sys
import time

import pytest

from jaxscale import config as configs
from jaxscale.autotune import search
from jaxscale.autotune.search_space import candidates, layout_of, refusal
from jaxscale.config.layout import Layout

FAKE = (sys.executable, "tests/fake_trial.py")
EIGHT = search.Devices(8, "fake", "cpu")
SETTINGS = (
    "data.global_batch_size=16",
    "model.num_layers=8",
    "model.num_heads=8",
    "model.num_kv_heads=8",
    "model.head_dim=8",
)
CONFIG = configs.load("configs/tiny.py", SETTINGS)
TRIALS = 40


@pytest.fixture(scope="session")
def found(tmp_path_factory):
    """A search whose seconds are a formula of the layout, that begins with three that fail."""
    storage = tmp_path_factory.mktemp("search") / "layouts.db"
    first = [Layout(data=1, tensor=8), Layout(data=1, context=8), Layout(data=1, pipeline=8)]
    trials = search.search_by_measuring(
        CONFIG, EIGHT, trials=TRIALS, storage=storage, first=first, program=FAKE
    )
    return storage, trials


def test_the_devices_are_those_that_a_trial_sees():
    assert search.find_devices(FAKE) == EIGHT
    with pytest.raises(ValueError, match="no devices to measure on: status 1: no chip"):
        search.find_devices((sys.executable, "-c", "raise SystemExit('no chip')"))


@pytest.mark.proof
def test_failures_are_recorded_as_what_they_are(found):
    _, trials = found
    assert [trial.outcome for trial in trials[:3]] == ["out of memory", "crashed", "crashed"]
    assert "RESOURCE_EXHAUSTED" in trials[0].message
    assert trials[1].message == "SIGABRT: F1 x.cc:9] Check failed: a.size() == b.size()"
    assert trials[2].message.startswith("SIGKILL: killed, probably by the system")
    assert all((trial.step_seconds is None) != trial.measured for trial in trials)
    assert all(bool(trial.message) != trial.measured for trial in trials)


@pytest.mark.proof
def test_no_layout_is_tried_twice(found):
    _, trials = found
    assert len({str(trial.layout) for trial in trials}) == TRIALS


@pytest.mark.proof
def test_failures_and_slow_layouts_are_steered_away_from(found):
    """Of all layouts, those with 8 ranks on an axis that fails are a fifth; tensor is what counts,
    and the best found is far better than the median of what there is."""
    _, trials = found
    fails = [trial for trial in trials[20:] if 8 in (trial.layout.tensor, trial.layout.pipeline)]
    assert len(fails) <= 2
    assert statistics.mean(trial.layout.tensor == 1 for trial in trials[20:]) > 0.6
    seconds = [formula(layout) for layout in accepted()]
    best = min(trial.step_seconds for trial in trials if trial.measured)
    assert best < sorted(seconds)[len(seconds) // 20]


def accepted() -> list[Layout]:
    layouts = [layout_of(choices, CONFIG.layout, 8) for choices in candidates(CONFIG, 8)]
    return [layout for layout in layouts if not refusal(CONFIG, layout)]


def formula(layout: Layout) -> float:
    """That of `fake_trial.py`."""
    walk = {"none": 0, "full": 3}.get(layout.remat, 1) + layout.microbatches / 4
    return layout.pipeline * layout.tensor**2 + layout.context + walk


@pytest.mark.proof
def test_what_decides_is_found(found):
    storage, _ = found
    shares = search.importances(search.open_study(CONFIG, EIGHT, storage))
    assert next(iter(shares)) == "tensor"
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.proof
def test_a_search_that_is_done_does_nothing_more(found):
    storage, trials = found
    broken = (sys.executable, "-c", "raise SystemExit(1)")
    assert (
        search.search_by_measuring(CONFIG, EIGHT, trials=TRIALS, storage=storage, program=broken)
        == trials
    )


@pytest.mark.proof
def test_a_file_of_something_else_is_refused(found):
    storage, _ = found
    other = configs.load("configs/tiny.py", [*SETTINGS, "model.d_ff=256"])
    with pytest.raises(ValueError, match="another config; give another file in --storage"):
        search.search_by_measuring(other, EIGHT, trials=1, storage=storage, program=FAKE)
    fewer = search.Devices(4, "fake", "cpu")
    with pytest.raises(ValueError, match="devices = 8, and there are 4; give another file"):
        search.search_by_measuring(CONFIG, fewer, trials=1, storage=storage, program=FAKE)


def test_a_file_that_is_no_database_is_refused(tmp_path):
    storage = tmp_path / "hw.csv"
    storage.write_text("name,generation\n" * 100)
    with pytest.raises(ValueError, match=r"hw\.csv is not a database of trials \(file is not"):
        search.open_study(CONFIG, EIGHT, storage)
    assert storage.read_text().startswith("name,generation")


@pytest.mark.proof
def test_a_trial_that_takes_too_long_is_ended(tmp_path):
    (trial,) = search.search_by_measuring(
        CONFIG, EIGHT, trials=1, storage=tmp_path / "a.db", limit_seconds=0.5, program=(*FAKE, "60")
    )
    assert (trial.outcome, trial.message) == ("timed out", "not finished after 0.5 s")


def test_layouts_that_cannot_run_cost_no_process(tmp_path):
    bad = Layout(data=1, pipeline=8, schedule="interleaved", virtual_stages=4, microbatches=8)
    broken = (sys.executable, "-c", "raise SystemExit(1)")
    (trial,) = search.search_by_measuring(
        CONFIG, EIGHT, trials=1, storage=tmp_path / "a.db", first=[bad], program=broken
    )
    assert trial.outcome == "refused"
    assert "model.num_layers = 8 is less than the 32 stages" in trial.message


@pytest.mark.proof
def test_running_out_of_layouts_says_how_many_there_are(tmp_path):
    one = search.Devices(1, "fake", "cpu")
    config = configs.load("configs/tiny.py", ["data.global_batch_size=1"])
    every = "all 4 feasible layouts were tried; set --trials 4"
    for _ in range(2):
        with pytest.raises(ValueError, match=every):
            search.search_by_measuring(
                config, one, trials=5, storage=tmp_path / "a.db", program=FAKE
            )


SEARCH = f"""
import pathlib, sys
from jaxscale import config
from jaxscale.autotune.search import Devices, search_by_measuring
search_by_measuring(
    config.load("configs/tiny.py", {SETTINGS!r}), Devices(8, "fake", "cpu"), trials=8,
    storage=pathlib.Path(sys.argv[1]), program=(*{FAKE!r}, sys.argv[2]),
)
"""


@pytest.mark.proof
def test_a_killed_search_goes_on_where_it_was(tmp_path):
    storage = tmp_path / "layouts.db"
    command = [sys.executable, "-c", SEARCH, str(storage)]
    process = subprocess.Popen([*command, "0.2"], env={**os.environ, "PYTHONPATH": os.getcwd()})
    while len(before := ended(storage)) < 3 and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    before = ended(storage)
    assert 3 <= len(before) < 8
    trials = search.search_by_measuring(CONFIG, EIGHT, trials=8, storage=storage, program=FAKE)
    assert len(trials) == 8
    assert len({str(trial.layout) for trial in trials}) == 8
    assert ended(storage)[: len(before)] == before
    with sqlite3.connect(storage) as file:
        left = file.execute("select count(*) from trials where state = 'RUNNING'").fetchone()
    assert left == (0,)


def ended(storage: pathlib.Path) -> list[tuple[int, float]]:
    """Number and seconds of the trials in the file that were measured, read past the search."""
    if not storage.exists():
        return []
    with sqlite3.connect(storage) as file:
        try:
            return file.execute(
                "select number, value from trials join trial_values using (trial_id) "
                "where state = 'COMPLETE' order by number"
            ).fetchall()
        except sqlite3.OperationalError:  # not yet a study
            return []


@pytest.mark.proof
def test_a_trial_ends_with_who_started_it():
    code = (
        "import subprocess, sys; "
        "p = subprocess.Popen([sys.executable, '-m', 'jaxscale.autotune.trial'], "
        "stdin=subprocess.PIPE, text=True); "
        "print(p.pid, flush=True); p.stdin.write('{}'); p.stdin.flush(); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        parent.kill()
    for _ in range(600):
        if not pathlib.Path(f"/proc/{child}").exists() or "State:\tZ" in status_of(child):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the trial outlived its search")


def status_of(process_id: int) -> str:
    try:
        return pathlib.Path(f"/proc/{process_id}/status").read_text()
    except FileNotFoundError:
        return ""


@pytest.mark.slow
def test_real_trials_on_eight_devices(tmp_path, monkeypatch):
    """Two layouts have one loss; a model that no memory holds is said to be that."""
    monkeypatch.delenv("JAX_ENABLE_X64")
    devices = search.find_devices()
    assert devices == search.Devices(8, "cpu", "cpu")
    small = ["data.seq_len=16", "model.num_layers=1"]
    config = configs.load("configs/tiny.py", small)
    first = [Layout(data=4, fsdp=2, zero_stage=2), Layout(data=4, tensor=2)]
    trials = search.search_by_measuring(
        config, devices, trials=2, storage=tmp_path / "a.db", first=first, steps=2
    )
    assert [trial.layout.sizes for trial in trials] == [layout.sizes for layout in first]
    assert all((trial.step_seconds or 0) > 0 for trial in trials)
    assert trials[0].loss == pytest.approx(trials[1].loss, rel=1e-6)
    large = configs.load("configs/tiny.py", [*small, f"model.d_ff={10**11}"])
    (trial,) = search.search_by_measuring(
        large, devices, trials=1, storage=tmp_path / "b.db", first=[Layout(data=8)]
    )
    assert trial.outcome == "out of memory", trial.message
