"""What hangs is noticed within a deadline that is learnt, and ends with the stacks."""

import os
import subprocess
import sys

import pytest

from jaxscale.distributed import hangs, phases


def test_the_deadline_is_learnt(monkeypatch):
    monkeypatch.setattr(phases, "_longest", {"training": 7.0, "saving": 0.1})
    assert hangs.allowed_seconds("training", 0) == 70
    assert hangs.allowed_seconds("saving", 0) == hangs.LEAST_SECONDS["saving"]
    assert hangs.allowed_seconds("writing the checkpoint", 0) == 600, "whatever a save has blocked"
    assert hangs.allowed_seconds("evaluating", 0) == hangs.FIRST_SECONDS
    assert hangs.allowed_seconds("training", 5) == 5
    assert hangs.allowed_seconds("compiling", 5) is None, "nobody knows how long that takes"


STALLED = """
import multiprocessing, os, signal, sys, time
from jaxscale.distributed import hangs, phases

def work():
    time.sleep(60)

if __name__ == "__main__":
    hangs.LOOK_SECONDS = 0.05
    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    os.kill(worker.pid, signal.SIGSTOP)
    print(worker.pid, flush=True)
    with hangs.watching(0.3):
        phases.enter_phase("training", 3)
        phases.enter_phase("waiting for input", 4)
        time.sleep(60)
"""


def test_a_stalled_data_worker_is_named_with_the_stacks():
    done = subprocess.run(
        [sys.executable, "-c", STALLED], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 1
    worker = done.stdout.strip()
    lines = done.stderr.splitlines()
    assert lines[0].startswith("waiting for input (step 4) for ")
    assert lines[1] == f"data worker {worker} is stopped (state T)"
    assert any("<module>" in line and "line 17" in line for line in lines), "where it waits"
    assert lines[-1].startswith("error: the run hangs: waiting for input (step 4) for ")
    with pytest.raises(ProcessLookupError):
        os.kill(int(worker), 0)
