"""What no longer goes on is noticed within a deadline that the run itself teaches, named, and ends.

A thread of each process compares its phase with the longest of that kind so far. One that takes
much longer asks the others (`ControlChannel.inquire`): a process that does not respond is frozen;
when all respond and none has time left, they wait for each other. Either ends the run, and every
process prints what it was doing and the stacks of its threads.
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
    "saving": 120.0,  # what stands in the way of training
    "writing the checkpoint": 600.0,  # since a file of it grew
}
"""Phases that are watched: every one of them has at least this long."""

FIRST_SECONDS = 600.0
"""The first of a kind has this long: nothing is known yet, and an evaluation compiles."""

TIMES = 10
"""Others have this many times the longest one so far."""

LOOK_SECONDS = 1.0

ADVICE = "run.hang_seconds allows more than the run has shown to need; the same command resumes"


@contextlib.contextmanager
def watching(limit_seconds: float = 0.0) -> Iterator[None]:
    """Inside, a phase that takes too long ends the process with status 1.

    Args:
      limit_seconds: how long a phase may take; 0 learns it.
    """
    done, watch = threading.Event(), _Watch(limit_seconds)
    processes.answer_with(watch.place, _dump)
    thread = threading.Thread(target=watch.run, args=(done,), name="hang detection", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def allowed_seconds(name: str, limit_seconds: float) -> float | None:
    """How long a phase may take; None when it is not watched."""
    if name not in LEAST_SECONDS:
        return None
    if limit_seconds:
        return limit_seconds
    longest = phases.longest_phase(name)
    return FIRST_SECONDS if longest is None else max(LEAST_SECONDS[name], TIMES * longest)


class _Watch:
    """The thread, and what it knows."""

    def __init__(self, limit_seconds: float):
        self._limit_seconds = limit_seconds
        self._resumed = time.monotonic()

    def place(self) -> tuple[str, bool]:
        """What this process is doing, and whether for too long."""
        phase = phases.current()
        seconds = time.monotonic() - max(phase.since, self._resumed)
        allowed = allowed_seconds(phase.name, self._limit_seconds)
        return f"{phase} for {seconds:.0f} s", allowed is not None and seconds > allowed

    def run(self, done: threading.Event) -> None:
        looked = self._resumed
        while not done.wait(LOOK_SECONDS):
            now = time.monotonic()
            if now - looked > 5 * LOOK_SECONDS:  # this process itself was stopped, or starved
                self._resumed = now
            doing, overdue = self.place()
            if overdue and processes.alone():
                _dump(doing)
                processes.leave(f"error: nothing goes on: {doing}; {ADVICE}", 1)
            if overdue:
                processes.inquire()
            looked = time.monotonic()


def _dump(doing: str) -> None:
    """Prints what this process is doing, its data workers, and the stacks of its threads; ends the
    workers, which would stay when they are stopped."""
    with contextlib.suppress(OSError, ValueError):
        print("\n".join([doing, *_workers(), "the stacks of its threads:"]), file=sys.stderr)
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join(1)


def _workers() -> Iterator[str]:
    """A line for each data worker that is not at work."""
    words = {"T": "stopped", "t": "traced", "Z": "dead", "D": "waiting for its disk"}
    for worker in multiprocessing.active_children():
        with contextlib.suppress(OSError, IndexError):
            stat = pathlib.Path(f"/proc/{worker.pid}/stat").read_text()
            state = stat.rpartition(")")[2].split()[0]
            yield f"data worker {worker.pid} is {words.get(state, 'alive')} (state {state})"
