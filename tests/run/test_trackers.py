"""Trackers get the numbers of metrics.jsonl, and none of them ends a run."""

import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto import event_pb2

from jaxscale.run import metrics, trackers
from jaxscale.run.metrics import Metrics
from jaxscale.run.trackers import TrackerError
from tests.run.test_metrics import lines, tensorboard_events


@pytest.mark.parametrize("passed", [0, 60, -60])
def test_tensorboard_shows_each_step_once_after_a_crash(
    passed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hides what came before a restart, from the restart's step on; no more and no less. It
    reads files in the order of their names, whatever the clock says."""
    for begin, last, now in ((0, 5, 1_700_000_000), (3, 6, 1_700_000_000 + passed)):
        monkeypatch.setattr(time, "time", lambda now=now: float(now))
        writer = Metrics(tmp_path, begin)
        for step in range(begin + 1, last + 1):
            writer.write({"step": step, "loss": float(begin)})
        writer.close()
    shown: dict[int, float] = {}
    for path in sorted((tmp_path / "tensorboard").iterdir()):
        for event in tensorboard_events(path):
            if event.WhichOneof("what") == "session_log":
                assert event.session_log.status == event_pb2.SessionLog.START
                shown = {step: loss for step, loss in shown.items() if step < event.step}
            for value in event.summary.value:
                assert event.step not in shown
                shown[event.step] = value.simple_value
    assert shown == {1: 0, 2: 0, 3: 0, 4: 3, 5: 3, 6: 3}


def test_unknown_tracker(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tracker 'comet' is not known.*wandb"):
        Metrics(tmp_path, trackers=("comet",))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_tracker_names_the_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf"jaxscale\[{name}\]"):
        Metrics(tmp_path, trackers=(name,))


def test_wandb_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def init(**settings: Any) -> Any:
        calls.append(("init", settings["id"], settings["config"]))
        return types.SimpleNamespace(
            id="abc",
            log=lambda numbers, step: calls.append((step, numbers)),
            finish=lambda: calls.append("finish"),
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for begin in (0, 1):
        writer = Metrics(tmp_path, begin, ("wandb",), config={"run": {"steps": 2}})
        writer.write({"step": begin + 1, "loss": 2.0, "mfu": None})
        writer.close()
    assert calls == [
        ("init", None, {"run": {"steps": 2}}),
        (1, {"loss": 2.0}),
        "finish",
        ("init", "abc", {"run": {"steps": 2}}),
        (2, {"loss": 2.0}),
        "finish",
    ]


def test_mlflow_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def start_run(run_id: str | None, run_name: str | None) -> Any:
        calls.append(("start", run_id, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))

    module = types.SimpleNamespace(
        start_run=start_run,
        log_dict=lambda config, name: calls.append((name, config)),
        log_metrics=lambda numbers, step, run_id: calls.append((step, numbers, run_id)),
        end_run=lambda: calls.append("end"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ValueError, match="set MLFLOW_TRACKING_URI"):
        Metrics(tmp_path, trackers=("mlflow",))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    for begin in (0, 1):
        writer = Metrics(tmp_path, begin, ("mlflow",), config={"run": {"steps": 2}})
        writer.write({"step": begin + 1, "loss": 2.0})
        writer.close()
    assert calls == [
        ("start", None, tmp_path.name),
        ("config.json", {"run": {"steps": 2}}),
        (1, {"loss": 2.0}, "abc"),
        "end",
        ("start", "abc", None),
        (2, {"loss": 2.0}, "abc"),
        "end",
    ]


def test_a_tracker_that_fails_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise ConnectionError("no server")

    module = types.SimpleNamespace(
        start_run=lambda **_: types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc")),
        log_dict=lambda *_: None,
        log_metrics=gone,
        end_run=gone,
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    for steps in ([1, 2], []):
        writer = Metrics(tmp_path, trackers=("mlflow",))
        for step in steps:
            writer.write({"step": step, "loss": 2.0})
        assert len(metrics.read(tmp_path / "metrics.jsonl")) == len(steps)
        writer.close()
        (record,) = caplog.records
        assert "mlflow gets no more metrics of this attempt (ConnectionError: no" in record.message
        caplog.clear()
    module.start_run = gone
    with pytest.raises(TrackerError, match=r"mlflow could not start \(ConnectionError: no server"):
        Metrics(tmp_path, trackers=("mlflow",))
    # A run that resumes while nobody is there trains on.
    writer = Metrics(tmp_path, 2, trackers=("mlflow",))
    writer.write({"step": 3, "loss": 2.0})
    writer.close()
    assert "mlflow gets no more metrics of this attempt (ConnectionError: no" in caplog.text
    assert len(lines(tmp_path)) == 1


def test_no_step_waits_for_a_tracker_whose_server_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    answer, ended = threading.Event(), []
    module = types.SimpleNamespace(
        start_run=lambda **_: types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc")),
        log_dict=lambda *_: None,
        log_metrics=lambda *_, **__: ended.append(answer.wait(600)),
        end_run=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.01)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    writer = Metrics(tmp_path, trackers=("mlflow",))
    for step in (1, 2):
        writer.write({"step": step, "loss": 2.0})
    writer.close()
    assert not ended
    answer.set()
    assert "mlflow gets no more metrics of this attempt (TimeoutError: no answer" in caplog.text
