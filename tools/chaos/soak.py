"""Soak test: kills processes of a supervised run repeatedly, and compares it with a quiet run.

    python tools/chaos/soak.py --minutes 30 --seed 0

`jaxscale.supervise` restarts `tools/launch/local.py`, which starts the processes of one training
run. Every 15 to 30 seconds (--between, for slower machines) a random process gets SIGKILL. At the
end the supervisor gets SIGTERM, and the run saves. Then the same command trains, undisturbed, to
the same step. Faults: a supervisor that gave up; a last state that differs in any bit from that of
the undisturbed run; processes that are alive at the end. Also printed: goodput (ETTR), the fraction
of time spent on steps that were kept, and the seconds from a kill to the end of the next step. The
last line is JSON.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kills import state  # noqa: E402

from jaxscale.supervise import newest_step  # noqa: E402

SETTINGS = (
    "--config.model.num_layers=1",
    "--config.data.seq_len=32",
    "--config.optimizer.schedule=constant",
    "--config.run.checkpoint_every=50",
    "--config.run.eval_every=500",
)
END_SECONDS = 120
"""Time after SIGTERM for the last checkpoint."""

ENDLESS = 10**7
"""run.steps of the disturbed run, which it does not reach."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if the run has faults."""
    parser = argparse.ArgumentParser(description="Kills processes of a supervised run.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--between",
        type=float,
        default=22.5,
        help="mean seconds between kills; a third more or less",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="chaos_"))
    os.environ["JAXSCALE_CACHE"] = str(folder / "compiled")
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        found = soak(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({**vars(options), **found}))
    return int(bool(found["faults"]))


def soak(folder: pathlib.Path, options: argparse.Namespace) -> dict[str, Any]:
    """Trains under kills, then to the same step without."""
    disturbed, quiet = folder / "disturbed", folder / "quiet"
    start(training(folder / "first", options.processes, 1)).communicate()  # fills the cache
    supervisor = [sys.executable, "-u", "-m", "jaxscale.supervise", "--failures=100", "--"]
    process = start([*supervisor, *training(disturbed, options.processes, ENDLESS)])
    begin, faults = time.monotonic(), []
    trained: list[float] = []  # times of attempts' first steps
    reading = threading.Thread(target=read, args=(process, trained))
    reading.start()
    end = begin + 60 * options.minutes
    killed = kill_until(end, disturbed, process, options.between, random.Random(options.seed))
    seconds = time.monotonic() - begin
    if process.poll() is not None:
        faults.append(f"the supervisor ended by itself with {process.returncode}")
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    if left := processes_of(disturbed):
        faults.append(f"{len(left)} processes did not end")
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    reading.join()
    last = newest_step(disturbed)
    if not last:
        raise SystemExit("error: no attempt has saved a checkpoint; raise --between")
    kept = json.loads((disturbed / "seconds.json").read_text())
    print(f"{len(killed)} kills in {seconds:.0f} s; now {last} steps without", flush=True)
    alone = start(training(quiet, options.processes, last))
    text = alone.communicate()[0]
    equal = alone.returncode == 0 and state(str(disturbed), last) == state(str(quiet), last)
    if not equal:
        faults.append(f"the last state is not that of the undisturbed run: {text[-1000:]}")
    restarts = [min(later) - at for at in killed if (later := [t for t in trained if t > at])]
    return {
        "seconds": round(seconds),
        "kills": len(killed),
        "attempts": kept["attempts"],
        "steps": last,
        "goodput": round(kept["seconds"].get("compute", 0) / sum(kept["seconds"].values()), 4),
        "seconds_by_cause": {cause: round(each, 1) for cause, each in kept["seconds"].items()},
        "median_restart_seconds": round(statistics.median(restarts), 1) if restarts else None,
        "equal": equal,
        "faults": faults,
    }


def kill_until(
    end: float,
    workdir: pathlib.Path,
    supervisor: subprocess.Popen,
    between: float,
    draw: random.Random,
) -> list[float]:
    """Kills random processes of the run until `end`; returns the times."""
    killed = []
    while supervisor.poll() is None:
        pause = between * draw.uniform(2 / 3, 4 / 3)
        time.sleep(max(0.0, min(pause, end - time.monotonic())))
        if time.monotonic() >= end:
            break
        if pids := processes_of(workdir):
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(pids), signal.SIGKILL)
                killed.append(time.monotonic())
                print(f"kill {len(killed)}", flush=True)
    return killed


def training(workdir: pathlib.Path, processes: int, steps: int) -> list[str]:
    """The command of a run of several processes."""
    launcher = [sys.executable, "-u", str(ROOT / "tools/launch/local.py"), str(processes), "--"]
    command = [sys.executable, "-u", "-m", "jaxscale.train", "--config", "tiny"]
    return [
        *(*launcher, *command, *SETTINGS),
        f"--config.run.steps={steps}",
        f"--workdir={workdir}",
    ]


def start(command: Iterable[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [*command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def read(process: subprocess.Popen, trained: list[float]) -> None:
    """Records the times of attempts' first steps; prints the supervisor's lines."""
    assert process.stdout
    for line in process.stdout:
        if re.search(r"first step done", line):
            trained.append(time.monotonic())
        if line.startswith("supervise:"):
            print(line, end="", flush=True)


def processes_of(workdir: pathlib.Path) -> list[int]:
    """The ids of a run's processes, neither launcher nor supervisor."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if f"--workdir={workdir}" in words and any(w[:13] == "--process_id=" for w in words):
                found.append(int(folder.name))
    return sorted(found)


if __name__ == "__main__":
    sys.exit(main())
