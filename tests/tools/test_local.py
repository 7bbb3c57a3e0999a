"""The starter of processes on this machine: numbers, flags, and how a group ends."""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = pathlib.Path("tools/launch/local.py")
spec = importlib.util.spec_from_file_location("local", SCRIPT)
assert spec
assert spec.loader
local = importlib.util.module_from_spec(spec)
spec.loader.exec_module(local)


def start(count, program, stderr=subprocess.STDOUT):
    return subprocess.Popen(
        [sys.executable, SCRIPT, str(count), "--", sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def test_each_process_gets_its_place_and_its_lines_a_number():
    """On the stream where it prints them: `supervise` reads who failed in stderr."""
    gloo = "[Gloo] [Gloo] Rank Rank 0 is connected to 1 peer ranks. is connected"
    program = f"import sys; print(*sys.argv[1:]); print({gloo!r}); print('oh', file=sys.stderr)"
    process = start(3, program, subprocess.PIPE)
    printed, complaints = (sorted(text.splitlines()) for text in process.communicate(timeout=60))
    assert process.returncode == 0
    assert not local.GLOO.fullmatch("3\n"), "whoever prints a number means it"
    port = printed[0].partition("127.0.0.1:")[2].partition(" ")[0]
    assert printed == [
        f"[{i}] --coordinator=127.0.0.1:{port} --num_processes=3 --process_id={i}" for i in range(3)
    ]
    assert complaints == [f"[{i}] oh" for i in range(3)]


ONE_FAILS = """
import sys, time
if sys.argv[-1].endswith('1'):
    sys.exit(7)
time.sleep(600)
"""


IN_A_HURRY = """
import sys
import local
local.GRACE_SECONDS = 0.3
sys.exit(local.main(sys.argv[1:]))
"""


@pytest.mark.proof
def test_when_one_fails_the_others_end():
    done = subprocess.run(
        [sys.executable, "-c", IN_A_HURRY, "2", "--", sys.executable, "-c", ONE_FAILS],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parent)},
        timeout=60,
    )
    assert done.returncode == 7


NOTES_SIGTERM = """
import signal, sys, time
number = int(sys.argv[-1][-1])
signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(143)))
print('ready', flush=True)
time.sleep(60)
"""


@pytest.mark.proof
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_all(number):
    process = start(2, NOTES_SIGTERM)
    assert process.stdout
    lines = [process.stdout.readline() for _ in range(2)]
    assert sorted(lines) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(number)
    printed = process.communicate(timeout=60)[0]
    assert sorted(printed.splitlines()) == ["[0] saved", "[1] saved"]
    assert process.returncode == 143


SAVES_INTO_A_FILE = """
import pathlib, signal, sys, time
number, folder = sys.argv[-1][-1], pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: ((folder / number).touch(), sys.exit(143)))
print('ready', flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels have no such signal")
def test_when_the_starter_is_killed_the_others_save_and_end(tmp_path):
    command = [sys.executable, "-c", SAVES_INTO_A_FILE, str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "2", "--", *command], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    with process.stdout as lines:
        for _ in range(2):
            lines.readline()
        process.kill()
        process.wait()
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("visible", "shares"),
    [("0,1,2,3", ["0,1", "2,3"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"]), ("", [None, None])],
)
def test_gpus_are_assigned(visible, shares, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [local.gpus(i, 2).get("CUDA_VISIBLE_DEVICES") for i in range(2)] == shares


def test_gpus_that_do_not_divide_are_refused(monkeypatch, capsys):
    """With the status after which no supervisor tries again."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv("JAXSCALE_TOKEN", "token")
    assert local.main(["2", "--", "true"]) == 2
    assert capsys.readouterr().err.startswith("error: 3 GPUs do not divide over 2 processes")


@pytest.mark.parametrize("argv", [["2"], ["0", "--", "true"], ["--", "true"]])
def test_a_line_without_a_command_is_refused(argv, capsys):
    with pytest.raises(SystemExit) as refused:
        local.main(argv)
    assert refused.value.code == 2
    assert "error" in capsys.readouterr().err


def test_a_missing_command_is_one_line():
    command = [sys.executable, SCRIPT, "2", "--", "nonexist_cmd"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: nonexist_cmd: No such file or directory\n"


def test_the_environment_is_kept(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    process = start(1, "import os; print(os.environ['JAX_NUM_CPU_DEVICES'])")
    assert process.communicate(timeout=60)[0] == f"[0] {os.environ['JAX_NUM_CPU_DEVICES']}\n"
