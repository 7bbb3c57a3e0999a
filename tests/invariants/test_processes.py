"""Several processes are one run: the same losses, examples and checkpoints; they end together."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxscale.hugging_face.model_folder import write_model
from jaxscale.run.pretrained import from_pretrained
from tests.invariants import several

STEPS = 4

TINY = (
    "data.seq_len=16",
    "model.d_model=32",
    "model.d_ff=64",
    "model.num_kv_heads=4",
    "model.compute_dtype=float64",
    "model.param_dtype=float64",
    "optimizer.moment_dtype=float64",
    "optimizer.second_moment_dtype=float64",
    "optimizer.accumulation_dtype=float64",
    "layout.fsdp=2",
    "layout.tensor=2",
    "optimizer.groups={'params':'layers/mlp_norm/*','frozen':True}",
    f"run.steps={STEPS}",
    "run.checkpoint_every=2",
)


class Group:
    """Real processes that do `commands` in turn, and what they print, as it comes."""

    def __init__(self, file: pathlib.Path, count: int, devices: int, commands: list):
        file.write_text(json.dumps([list(map(str, command)) for command in commands]))
        self.process = subprocess.Popen(
            [
                sys.executable,
                "tools/launch/local.py",
                str(count),
                "--",
                sys.executable,
                "-W",
                "error",
                "-m",
                "tests.invariants.several",
                str(file),
            ],
            env=os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            self.lines += lines

    @property
    def printed(self) -> str:
        return "".join(self.lines)

    def await_line(self, *texts: str, timeout: float = 300) -> None:
        """Until lines that begin so have come, in this order."""
        place, deadline = 0, time.monotonic() + timeout
        while texts:
            seen = len(self.lines)
            found = [i for i in range(place, seen) if self.lines[i].startswith(texts[0])]
            if found:
                place, texts = found[0] + 1, texts[1:]
            else:
                assert self._reading.is_alive(), f"no {texts[0]!r} in:\n{self.printed}"
                assert time.monotonic() < deadline, self.printed
                time.sleep(0.05)

    def kill(self, process_id: int, number: int) -> None:
        """Signals one of the processes."""
        found = re.search(rf"^\[{process_id}\] pid (\d+)$", self.printed, re.MULTILINE)
        assert found
        os.kill(int(found[1]), number)

    def wait(self, timeout: float = 300) -> int:
        """The status, once all have ended."""
        code = self.process.wait(timeout)
        self._reading.join()
        return code


@contextlib.contextmanager
def group(*arguments):
    running = Group(*arguments)
    try:
        yield running
    finally:
        for _ in range(2):  # the second time it kills
            running.process.terminate()
            time.sleep(0.2)
        running.wait()


def fit(workdir: pathlib.Path, *overrides: str) -> tuple:
    """A command that trains without a sample at the end."""
    return ("fit", workdir, *TINY, *overrides)


def started(workdir: pathlib.Path, origin: pathlib.Path) -> tuple:
    """A command that trains from weights."""
    return fit(workdir, f"model.init_from={origin}", "run.checkpoint_every=0")


def records(workdir: pathlib.Path) -> list[dict]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def continued(workdir: pathlib.Path, name: str, step: int = 2) -> pathlib.Path:
    """A copy of a run as it was after a step."""
    copy = shutil.copytree(workdir, workdir.with_name(name))
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    return copy


def assert_same_run(found: pathlib.Path, expected: pathlib.Path) -> None:
    """Equal examples; losses to the rounding of sums that are taken in another order."""
    found_records, expected_records = records(found), records(expected)
    for key in ("step", "tokens", "examples"):
        assert [r[key] for r in found_records] == [r[key] for r in expected_records]
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(
            [r[key] for r in found_records], [r[key] for r in expected_records], rtol=1e-12
        )


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def one(folder) -> pathlib.Path:
    """One process with eight devices."""
    command = fit(folder / "one", f"run.eval_every={STEPS}")
    assert several.fit([str(part) for part in command[1:]]) == 0
    return folder / "one"


@pytest.fixture(scope="session")
def origins(folder, one) -> dict[str, pathlib.Path]:
    """What a run may start from: another run, and its weights at Hugging Face, in float32."""
    model = from_pretrained(one, compute_dtype="float64")
    hf = folder / "hf"
    write_model(hf, model.config, model.model.axes, model.params, dtype="float32", workdir=one)
    return {"run": one, "hf": hf}


@pytest.fixture(scope="session")
def two(folder, one, origins):
    """Two processes with four devices each: every command in turn, then a stop and a death.

    Yields the folder, what they printed, and the status.
    """
    workdir = folder / "two"
    settings = [f"--config.{setting}" for setting in (*TINY, f"run.eval_every={STEPS}")]
    endless = fit(workdir, "run.steps=1000000", "run.checkpoint_every=0")
    commands = [
        (
            "train",
            "--config",
            "configs/tiny.py",
            "--workdir",
            workdir,
            *settings,
            "--trackers",
            "none",
            "--json",
            folder / "train.json",
        ),
        fit(continued(one, "one_then_two")),
        *(started(folder / f"two_from_{name}", origin) for name, origin in origins.items()),
        ("evaluate", "--workdir", workdir, "--json", folder / "evaluate.json", "--max_batches", 8),
        ("generate", "--workdir", workdir, "--prompt", "", "--json", folder / "generate.json"),
        ("doctor", "--json", folder / "doctor.json"),
        endless,
        endless,
    ]
    with group(folder / "two.commands", 2, 4, commands) as running:
        running.await_line("[0] train: 0")
        shutil.copytree(workdir, folder / "two_done")  # before it is trained on
        running.await_line("[0] doctor: 0", "[0] first step done")
        running.kill(1, signal.SIGTERM)
        running.await_line("[0] fit: 143", "[0] first step done")
        running.kill(1, signal.SIGKILL)
        code = running.wait(60)
        yield workdir, running.printed, code


def check_every_command_succeeds_in_all_processes(two):
    _, printed, _ = two
    for command in ("train", "fit", "evaluate", "generate", "doctor"):
        for process_id in (0, 1):
            assert f"[{process_id}] {command}: 0\n" in printed


def check_two_processes_train_as_one(one, two):
    assert_same_run(two[0].with_name("two_done"), one)


def check_only_process_0_speaks(folder, two):
    _, printed, _ = two
    theirs = [line for line in printed.splitlines() if line.startswith("[1] ")]
    phases = "training|waiting for input|evaluating|saving"
    stop = (
        rf"\[process 1\] SIGTERM while ({phases}) \(step \d+\): finishing.*|SIGTERM to process 1.*"
    )
    allowed = rf"\[1\] (pid \d+|\w+: \d+|{stop})"
    # Gloo's threads say that they are connected, into one another's lines, whose ends can then
    # stand alone.
    words = r"\[Gloo\]|Rank|is|connected|to|peer|ranks\.?|Expected|number|of|:|\d+"
    gloo = rf"\[1\] (({words})|\s)*"
    assert [line for line in theirs if not re.fullmatch(f"{allowed}|{gloo}", line)] == []
    summary = json.loads((folder / "train.json").read_text())
    assert summary == json.loads((folder / "two_done" / "summary.json").read_text())


def check_evaluate_and_generate_find_what_the_training_said(folder, one, two):
    evaluation = json.loads((folder / "evaluate.json").read_text())
    summary = json.loads((one / "summary.json").read_text())
    assert evaluation["step"] == STEPS
    assert evaluation["eval_tokens"] == summary["eval_tokens"]
    assert evaluation["eval_loss"] == pytest.approx(summary["eval_loss"], rel=1e-12)
    (sample,) = json.loads((folder / "generate.json").read_text())["samples"]
    assert sample["continuation"]
    assert two[1].count("--- 1 of 1\n") == 1


def check_the_doctor_shows_every_process(folder, two):
    findings = json.loads((folder / "doctor.json").read_text())
    assert [one["devices"][0]["count"] for one in findings["processes"]] == [4, 4]
    assert findings["self_test"]["passed"]
    assert f"[0] process 1 on {socket.gethostname()}\n" in two[1]


def check_two_processes_continue_what_one_began(one, two):
    assert_same_run(one.with_name("one_then_two"), one)


def check_two_processes_start_from_the_same_weights(name, folder, one, two, origins):
    """Each reads the parts of its own devices."""
    assert several.fit(list(map(str, started(folder / f"from_{name}", origins[name])[1:]))) == 0
    assert_same_run(folder / f"two_from_{name}", folder / f"from_{name}")
    assert records(folder / f"from_{name}")[0]["loss"] < records(one)[0]["loss"] - 0.01


def check_checkpoints_of_two_processes_share_what_is_frozen(two):
    """Process 0 links to what both wrote."""
    place = two[0] / "checkpoints"
    first, second = (
        sorted(
            path.stat().st_ino for path in (place / step / "frozen").rglob("*") if path.is_file()
        )
        for step in ("2", str(STEPS))
    )
    assert first == second != []


def check_one_process_continues_what_two_began(one, two):
    half = continued(two[0].with_name("two_done"), "two_then_one")
    assert several.fit([str(part) for part in fit(half)[1:]]) == 0
    assert_same_run(half, one)


def check_four_processes_continue_what_two_began(folder, one, two):
    half = continued(two[0].with_name("two_done"), "two_then_four")
    with group(folder / "four.commands", 4, 2, [fit(half)]) as running:
        assert running.wait() == 0, running.printed
    assert_same_run(half, one)


def check_sigterm_to_one_process_stops_all_after_the_same_step_and_saves(two):
    workdir, printed, _ = two
    stopped = re.findall(r"\[(\d)\] SIGTERM to process 1 on \S+: stopped after step (\d+)", printed)
    assert sorted(process for process, _ in stopped) == ["0", "1"]
    (step,) = {int(step) for _, step in stopped}
    assert step > STEPS
    assert f"checkpoint {step} saved in" in printed
    assert f"resuming at step {step} of 1000000" in printed
    assert (workdir / "checkpoints" / str(step)).is_dir()


def check_a_killed_process_ends_the_others_who_name_it(two):
    _, printed, code = two
    assert code == 128 + signal.SIGKILL
    assert f"[0] error: process 1 on {socket.gethostname()} failed, so this one ends" in printed
    assert "Traceback" not in printed


@pytest.mark.slow
def test_four_processes_continue_what_two_began(folder, one, two):
    check_four_processes_continue_what_two_began(folder, one, two)


@pytest.mark.proof
def test_several_processes_are_one_run(folder, one, two, origins):
    """One test: a second worker of the suite would start all these processes again."""
    check_every_command_succeeds_in_all_processes(two)
    check_two_processes_train_as_one(one, two)
    check_only_process_0_speaks(folder, two)
    check_evaluate_and_generate_find_what_the_training_said(folder, one, two)
    check_the_doctor_shows_every_process(folder, two)
    check_two_processes_continue_what_one_began(one, two)
    check_checkpoints_of_two_processes_share_what_is_frozen(two)
    for name in ("run", "hf"):
        check_two_processes_start_from_the_same_weights(name, folder, one, two, origins)
    check_one_process_continues_what_two_began(one, two)
    check_sigterm_to_one_process_stops_all_after_the_same_step_and_saves(two)
    check_a_killed_process_ends_the_others_who_name_it(two)
