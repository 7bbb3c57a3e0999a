"""Records survive crashes and odd numbers, lines read well."""

import json
import math
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from tensorboardX.proto import event_pb2

from jaxscale.run import metrics
from jaxscale.run.metrics import Metrics

RECORD = {
    "step": 12,
    "loss": 3.21456,
    "grad_norm": 0.8412,
    "learning_rate": 6e-4,
    "tokens": 4096,
    "step_seconds": 0.33,
    "data_seconds": 0.0021,
    "tokens_per_second": 12345.6,
    "mfu": 0.4123,
    "hfu": 0.5,
}


def lines(directory: Path) -> list[dict[str, Any]]:
    text = (directory / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def write_steps(writer: Metrics, first: int, last: int) -> None:
    for step in range(first, last + 1):
        writer.write({**RECORD, "step": step, "loss": 5 - step / 10})
        if step % 4 == 0:
            writer.write({"step": step, "eval_loss": 5.1 - step / 10})


def test_lines_are_there_at_once(tmp_path: Path) -> None:
    writer = Metrics(tmp_path / "run")
    writer.write(RECORD)
    assert lines(tmp_path / "run") == [RECORD]
    writer.close()


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    writer = Metrics(tmp_path)
    writer.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "mfu": None})
    writer.finish({"loss": -math.inf, "steps": 1})
    assert lines(tmp_path) == [
        {
            "step": 1,
            "loss": None,
            "grad_norm": None,
            "mfu": None,
            "nonfinite": {"loss": "nan", "grad_norm": "inf"},
        }
    ]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": None, "steps": 1}
    assert not (tmp_path / "loss.png").exists()  # there is nothing to draw


@pytest.mark.parametrize("torn", ["", '{"step": 11, "lo'])
def test_each_step_is_there_once_after_a_crash(tmp_path: Path, torn: str) -> None:
    first = Metrics(tmp_path)
    write_steps(first, 1, 10)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    second = Metrics(tmp_path, 8)
    assert [r["step"] for r in lines(tmp_path) if "loss" in r] == list(range(1, 9))
    write_steps(second, 9, 12)
    second.finish({})
    assert [r["step"] for r in lines(tmp_path) if "loss" in r] == list(range(1, 13))
    assert [r["step"] for r in lines(tmp_path) if "eval_loss" in r] == [4, 8, 12]


def test_torn_line_in_a_run_that_goes_on_from_there(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    writer = Metrics(tmp_path, 2)
    writer.write({"step": 3, "loss": 1.0})
    writer.close()
    assert [record["step"] for record in lines(tmp_path)] == [1, 3]


def test_finish_draws_and_writes_tensorboard(tmp_path: Path) -> None:
    writer = Metrics(tmp_path)
    write_steps(writer, 1, 20)
    writer.write({"step": 21, "expert_load_cv": 0.5, "expert_load_cv_by_layer": [0.25, 0.75]})
    writer.finish({"loss": 3.0})
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": 3.0}
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"grad_norm" in events.read_bytes()
    *_, last = tensorboard_events(events)
    assert {value.tag: value.simple_value for value in last.summary.value} == {
        "expert_load_cv": 0.5,
        "expert_load_cv_by_layer/0": 0.25,
        "expert_load_cv_by_layer/1": 0.75,
    }


def tensorboard_events(path: Path) -> Iterator[Any]:
    """Of an event file: each is its length in 8 bytes, a checksum in 4, itself, another in 4."""
    data = path.read_bytes()
    while data:
        size = int.from_bytes(data[:8], "little")
        yield event_pb2.Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]


def test_only_process_zero_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    writer = Metrics(tmp_path / "run")
    writer.write(RECORD)
    writer.finish({"loss": 1.0})
    assert not (tmp_path / "run").exists()


def test_no_trackers(tmp_path: Path) -> None:
    writer = Metrics(tmp_path, trackers=())
    write_steps(writer, 1, 2)
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_progress_line() -> None:
    assert metrics.progress_line(RECORD, steps=1000, seconds_left=3899) == (
        "step   12/1000 | loss 3.2146 | grad norm 0.841 | lr 6.00e-04 | 12.3k tokens/s | "
        "MFU 41.2% | input wait 2 ms | 1 h 05 min left"
    )


def test_progress_line_never_guesses() -> None:
    odd = {**RECORD, "mfu": None, "loss": math.nan}
    line = metrics.progress_line(odd, steps=12, seconds_left=math.inf)
    assert "loss nan" in line
    assert "MFU n/a" in line
    assert line.endswith("n/a left")


def test_progress_line_of_an_evaluation() -> None:
    line, bits = metrics.evaluation_line, " | 1.250 bits per byte"
    assert line(7, 100, "", 2.5, 1.25) == f"step   7/100 | eval loss 2.5000{bits}"
    assert line(7, 100, "code", 2.5, 1.25) == f"step   7/100 | eval loss code 2.5000{bits}"
    said = line(7, 100, "code", None, 0.0)
    assert said.startswith("step   7/100 | eval loss code n/a: no token has loss; raise data.seq_l")


def test_utilisation() -> None:
    # 7e9 parameters x 6 FLOPs x 100k tokens/s on 16 chips of 459 TFLOP/s.
    assert metrics.utilisation(6 * 7e9 * 1e5, 16, 459e12) == pytest.approx(0.5719, abs=1e-4)
    assert metrics.utilisation(1e15, 8, None) is None


def test_odd_lines_are_left_out_with_a_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 1, "loss": 2.0}\n'
    odd = b'5\n{"loss": 3}\n{"step": "2"}\nnull\n'
    odd += b'{"step": 1, "loss": "x"}\n{"step": 1, "step_seconds": null}\n'
    path.write_bytes(good + odd + good.replace(b"1", b"3") + b"\xff\x00{")
    assert [record["step"] for record in metrics.read(path, last_step=2)] == [1]
    assert "has 6 lines that are not records of steps" in caplog.text


def test_a_full_disk_loses_no_record_and_ends_no_run(tmp_path: Path, caplog: Any) -> None:
    """Of metrics.jsonl and TensorBoard's file, which tensorboardX writes in a thread that ends: the
    run then waited for it."""
    writer = Metrics(tmp_path)
    (events,) = (tmp_path / "tensorboard").iterdir()
    writer.write({"step": 1, "loss": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))  # both files have more
    try:
        for step in range(2, 100):
            writer.write({"step": step, "loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = [record.message.partition(" cannot ") for record in caplog.records]
    why = "be written (File too large); its records are kept in memory until it can"
    assert said == [
        (f"warning: {path}", " cannot ", why) for path in (tmp_path / "metrics.jsonl", events)
    ]
    writer.write({"step": 100, "loss": 1.0})
    writer.close()
    assert [line["step"] for line in lines(tmp_path)] == [*range(1, 101)]
    shown = [event.step for event in tensorboard_events(events) if event.summary.value]
    assert shown == [*range(1, 101)]
