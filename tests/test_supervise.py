"""What the supervisor starts again, what it does not, and what it writes down."""

import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from jaxscale import supervise

FAILS = """
import pathlib, sys
workdir, statuses = pathlib.Path(sys.argv[2]), sys.argv[3].split(",")
tried = len(list(workdir.glob("try*")))
(workdir / f"try{tried}").touch()
status = statuses[min(tried, len(statuses) - 1)]
if status.startswith("saves"):
    (workdir / "checkpoints" / str(tried + 1)).mkdir(parents=True)
    status = status[5:]
print(f"attempt {tried}", file=sys.stderr)
if status.startswith("-"):
    import os
    os.kill(os.getpid(), -int(status))
sys.exit(int(status))
"""


def supervised(workdir, statuses, *flags):
    command = [sys.executable, "-c", FAILS, "--workdir", str(workdir), statuses]
    done = subprocess.run(
        [sys.executable, "-m", "jaxscale.supervise", "--wait_seconds=0", *flags, "--", *command],
        capture_output=True,
        text=True,
        timeout=60,
    )
    log = workdir / "incidents.jsonl"
    return done, [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.proof(but=("1,-9,saves143,143,0-0-actions1", "1-1-actions4"))
@pytest.mark.parametrize(
    ("statuses", "status", "actions"),
    [
        ("0", 0, []),
        ("1,-9,saves143,143,0", 0, ["restart in 0 s"] * 4),
        ("255,-40,0", 0, ["restart in 0 s"] * 2),  # as of ssh; a real-time signal
        ("2", 2, ["gave up: it was refused: a restart would not help"]),
        (
            "1",
            1,
            ["restart in 0 s"] * 2
            + ["gave up: 3 attempts in a row failed without a new checkpoin"],
        ),
        ("1,1,saves1,1,1,0", 0, ["restart in 0 s"] * 5),
        (
            "143",
            143,
            ["restart in 0 s"] * 2
            + ["gave up: 3 attempts in a row failed without a new checkpoin"],
        ),
    ],
)
def test_what_is_started_again(statuses, status, actions, tmp_path):
    done, incidents = supervised(tmp_path, statuses, "--failures=3")
    assert done.returncode == status
    assert [one["action"][:59] for one in incidents] == actions
    if statuses.startswith("1,-9"):
        assert [one["status"] for one in incidents] == [1, 128 + 9, 143, 143]
        assert "attempt 3 ended with 143 (it was asked to stop); restart in 0 s" in done.stdout
        assert incidents[1]["stderr"] == ["attempt 1"]
        assert "supervise: attempt 2 ended with 137 (SIGKILL); restart in 0 s" in done.stdout
        assert done.stderr.startswith("attempt 0\nattempt 1\n")
    if statuses.startswith("255"):
        for number, code in enumerate((255, 128 + 40), 1):
            assert f"supervise: attempt {number} ended with {code}; restart in 0 s" in done.stdout
    if statuses.startswith("1,1"):
        steps = [(one["checkpoint_before"], one["checkpoint_after"]) for one in incidents]
        assert steps[1:4] == [(0, 0), (0, 3), (3, 3)]


WAITS = """
import pathlib, signal, sys, time
def stop(number, frame):
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.proof
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_supervisor_ends_its_command_which_saves(number, tmp_path):
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "jaxscale.supervise", "--log", tmp_path / "log", "--"),
            *(sys.executable, "-c", WAITS, str(tmp_path)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout
    with process.stdout as lines:
        assert lines.readline() == "ready\n"
        process.send_signal(number)
        status = process.wait(60)
    deadline = time.monotonic() + 30
    while not (tmp_path / "saved").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if number == signal.SIGTERM:
        assert status == 143
        (incident,) = map(json.loads, (tmp_path / "log").read_text().splitlines())
        assert incident["action"] == "gave up: the supervisor was asked to stop"


STUBBORN = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("x" * 10_000, end="", file=sys.stderr, flush=True)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_command_that_does_not_stop_is_killed_and_its_lines_are_kept_in_pieces(tmp_path):
    """One that never ends would fill the memory of the supervisor."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "jaxscale.supervise", "--log", tmp_path / "log"),
            *("--grace_seconds=0.1", "--", sys.executable, "-c", STUBBORN),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert said.startswith("supervise: the command did not stop within 100 ms; killing it\n")
    assert errors == "x" * 10_000
    (incident,) = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert incident["action"] == "gave up: the supervisor was asked to stop"
    most = supervise.LINE_CHARS
    assert incident["stderr"] == ["x" * most, "x" * most, "x" * (10_000 - 2 * most)]


def test_layouts_are_tried_in_turn_at_each_attempt(tmp_path):
    """Those that are refused, for devices that are missing; the first is tried again later."""
    done, incidents = supervised(tmp_path, "2,1,2,0", "--layouts", "fsdp=8,data=2", "fsdp=4")
    assert done.returncode == 0
    assert [(one["status"], one["action"]) for one in incidents] == [(1, "restart in 0 s")]
    refused = "refused with --config.layout.fsdp=8 --config.layout.data=2; trying the next"
    assert done.stdout.count(refused) == 2
    done, incidents = supervised(tmp_path, "2", "--layouts", "fsdp=8", "fsdp=4")
    assert done.returncode == incidents[-1]["status"] == 2
    for bad in ("fspd=8", "fsdp", "fsdp=8,"):
        done, _ = supervised(tmp_path, "0", "--layouts", bad)
        assert done.returncode == 2
        assert "is not a setting of a layout; give NAME=VALUE" in done.stderr
    assert len(list(tmp_path.glob("try*"))) == 6, "nothing was started"


@pytest.mark.proof
def test_a_missing_command_is_one_line(tmp_path):
    for words, said in ((["no-such-program"], "No such file"), ([], "no command; add it after --")):
        done = subprocess.run(
            [sys.executable, "-m", "jaxscale.supervise", f"--log={tmp_path / 'log'}", "--", *words],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert said in done.stderr


@pytest.mark.proof
def test_a_mistyped_config_leaves_no_folder(tmp_path):
    """Nor a log in it; a run that failed has both, also where it made no folder itself."""
    command = [sys.executable, "-m", "jaxscale.supervise", "--failures=1", "--"]
    train = [*command, sys.executable, "-m", "jaxscale.train", "--config=tinny"]
    done = subprocess.run(train, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: --config tinny: there is no such file; did you mean 'tiny'?" in done.stderr
    assert not list(tmp_path.iterdir())
    fails = [*command, sys.executable, "-c", "raise SystemExit(1)", f"--workdir={tmp_path / 'run'}"]
    assert subprocess.run(fails).returncode == 1
    assert json.loads((tmp_path / "run" / "incidents.jsonl").read_text())["status"] == 1


def test_the_usage_names_every_flag():
    parser = supervise._parser()
    flags = {flag for each in parser._actions for flag in each.option_strings} - {"-h", "--help"}
    for text in (parser.format_usage(), supervise.__doc__):
        assert set(re.findall(r"--\w+", text or "")) == flags


def test_the_folder_of_a_command_is_found():
    assert supervise._workdir(["a", "--workdir", "x"]) == pathlib.Path("x")
    assert supervise._workdir(["a", "--workdir=y"]) == pathlib.Path("y")
    assert supervise._workdir(["a"]) is None
    # That of `train` where it is given none; of another command nobody knows it.
    train = ["srun", "--nodes=2", "python", "-m", "jaxscale.train"]
    assert supervise._workdir([*train, "--config", "tiny"]) == pathlib.Path("runs/tiny")
    assert supervise._workdir([*train, "--config=x/config.json"]) == pathlib.Path("x")
    given = ["--config=tiny", "--config.run.steps=3", "--workdir=y"]
    assert supervise._workdir([*train, *given]) == pathlib.Path("y")
    assert supervise._workdir([*train, "--config.run.steps=3"]) is None
    assert supervise._workdir(["a", "--config=tiny"]) is None
