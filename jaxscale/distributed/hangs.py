"""Hang detection: a watchdog with a deadline learned from earlier phases, which ends a hung run.

A thread of each process compares the current phase with the longest of the same name so far. If it
takes much longer, the process asks the others (`ControlChannel.inquire`). A process that does not
respond is frozen; when all respond and all are past their deadlines, they wait for each other.
Either ends the run: the error names the process, and each prints its activity and its stacks.
"""

import contextlib
import faulthandler
import multiprocessing
import pathlib
import sys
import threading
import time
from collections.abc import Iterator

from jaxscale.distributed import phases, processes

LEAST_SECONDS = {
    "training": 30.0,
    "waiting for input": 60.0,
    "evaluating": 60.0,  # a batch
    "saving": 120.0,  # the part of a save that blocks training
    "writing the checkpoint": 600.0,  # since one of its files grew
}
"""Watched phases -> the shortest deadline of each."""

FIRST_SECONDS = 600.0
"""Deadline of the first phase of a name: no duration is known, and an evaluation compiles."""

TIMES = 10
"""Deadline of later ones, as a multiple of the longest so far."""

LOOK_SECONDS = 1.0

ADVICE = "run.hang_seconds allows more than the run has shown to need; the same command resumes"


@contextlib.contextmanager
def watching(limit_seconds: float = 0.0) -> Iterator[None]:
    """Watches phases inside the context: one past its deadline ends the process with status 1.

    Args:
      limit_seconds: the deadline of a phase; 0 learns it.
    """
    done, watch = threading.Event(), _Watch(limit_seconds)
    processes.answer_with(watch.activity, _dump)
    thread = threading.Thread(target=watch.run, args=(done,), name="hang detection", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def allowed_seconds(name: str, limit_seconds: float) -> float | None:
    """The deadline of a phase; None when the phase is not watched."""
    if name not in LEAST_SECONDS:
        return None
    if limit_seconds:
        return limit_seconds
    longest = phases.longest_phase(name)
    return FIRST_SECONDS if longest is None else max(LEAST_SECONDS[name], TIMES * longest)


class _Watch:
    """The watchdog thread and its clock."""

    def __init__(self, limit_seconds: float):
        self._limit_seconds = limit_seconds
        self._resumed = time.monotonic()

    def activity(self) -> tuple[str, bool]:
        """The activity of this process, and whether it is past its deadline."""
        phase = phases.current()
        seconds = time.monotonic() - max(phase.since, self._resumed)
        allowed = allowed_seconds(phase.name, self._limit_seconds)
        return f"{phase} for {seconds:.0f} s", allowed is not None and seconds > allowed

    def run(self, done: threading.Event) -> None:
        looked = self._resumed
        while not done.wait(LOOK_SECONDS):
            now = time.monotonic()
            if now - looked > 5 * LOOK_SECONDS:  # this process was stopped (SIGSTOP) or starved
                self._resumed = now
            doing, overdue = self.activity()
            if overdue and processes.alone():
                _dump(doing)
                processes.leave(f"error: the run hangs: {doing}; {ADVICE}", 1)
            if overdue:
                processes.inquire()
            looked = time.monotonic()


def _dump(doing: str) -> None:
    """Prints this process's activity, its data workers and the stacks of its threads; kills the
    workers, since a stopped one would outlive the process."""
    with contextlib.suppress(OSError, ValueError):
        print("\n".join([doing, *_workers(), "the stacks of its threads:"]), file=sys.stderr)
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join(1)


def _workers() -> Iterator[str]:
    """A line for each data worker, with its state."""
    words = {"T": "stopped", "t": "traced", "Z": "dead", "D": "waiting for its disk"}
    for worker in multiprocessing.active_children():
        with contextlib.suppress(OSError, IndexError):
            stat = pathlib.Path(f"/proc/{worker.pid}/stat").read_text()
            state = stat.rpartition(")")[2].split()[0]
            yield f"data worker {worker.pid} is {words.get(state, 'alive')} (state {state})"
