"""Requests to stop a run: signals, the end of the time that it was given, a cloud's notice.

While a step runs, a request waits for the end of the step, and a checkpoint is saved. Before
training begins there is nothing to save, and the process ends at once. A Python handler would run
only when the compiler returns, perhaps minutes later, so each signal is also written to a pipe (by
`signal.set_wakeup_fd`, in C), which a thread reads.
"""

import contextlib
import faulthandler
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from jaxscale.distributed import phases, processes

log = logging.getLogger("jaxscale")

STOPPED = 143
"""The status of a process that stopped because it was asked to: the same command resumes. It is
that of SIGTERM, so that one which arrives before anything is set up needs no other treatment."""

ENDED_UNSAVED = 130
"""The status after a second Ctrl-C, which does not wait for the checkpoint."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)
"""Those that stop a run. SIGALRM is ours: `limit` sets the alarm, and `ask` sends it."""

AGAIN_SECONDS = 1.0
"""A second Ctrl-C this much later is meant as one: a terminal and a launcher may both send the
first."""

LONGEST_TIMER_SECONDS = 1e9
"""Thirty years: the most that every system's timer takes."""

COMPLETE = "the run is complete and saved"
"""What is said to a request that comes too late."""


class Interrupted(Exception):  # noqa: N818 - a request is not an error
    """A request to stop arrived inside `interruptible`."""


_listening = False
_first = 0  # the first request: the number of its signal
_phase = ""  # what the main thread did at it, if it was free to notice
_held = False  # whether a request waits for the training loop
_status = STOPPED  # of a process that ends at once
_interruptible = False
_limit = ""  # what set the alarm, or sent it


class _Deadline(threading.local):
    """When to stop a run in a thread that gets no signals, as a notebook's, which has to look."""

    at = math.inf  # of `time.monotonic()`
    said = ""


_deadline = _Deadline()


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Notes requests to stop, and ends the process at once unless they are `held`.

    A signal that was ignored before (under nohup, or in the background of a shell) stays so.
    SIGQUIT prints the stacks of all threads, and the run continues. Does nothing inside another
    `listening`, or outside the main thread, which alone may set handlers.
    """
    global _listening, _first, _phase, _held, _status, _limit
    if _listening or threading.current_thread() is not threading.main_thread():
        yield
        return
    _listening, _first, _phase, _held, _status, _limit = True, 0, "", False, STOPPED, ""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _note)
    if sys.__stderr__ is not None:
        faulthandler.register(signal.SIGQUIT, file=sys.__stderr__, all_threads=True)
    thread = threading.Thread(target=_read, args=(reading,), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        faulthandler.unregister(signal.SIGQUIT)
        signal.set_wakeup_fd(wakeup)
        os.close(writing)
        thread.join()
        _listening, _first = False, 0  # a run in another thread was not asked


def limit(hours: float, since: float) -> None:
    """Asks to stop `hours` after `since`, of `time.monotonic()`; 0 is never. Where nothing is
    `listening`, the calling thread alone is asked."""
    global _limit
    end, said = since + 3600 * hours, f"run.max_hours = {hours:g}"
    alone = hours and not _listening
    _deadline.at, _deadline.said = end if alone else math.inf, said
    if hours and _listening:
        _limit = said
        left = end - time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, min(max(left, 1e-3), LONGEST_TIMER_SECONDS))


def ask(reason: str) -> None:
    """Asks to stop for another reason than a signal; for any thread."""
    global _limit
    if _listening:
        _limit = reason
        os.kill(os.getpid(), signal.SIGALRM)


def requested() -> str:
    """What asked to stop, such as "SIGTERM"; "" when nothing did."""
    if _first:
        return _name(_first)
    return _deadline.said if time.monotonic() >= _deadline.at else ""


def hold() -> None:
    """From now on, requests wait for the code that asks `requested`."""
    global _held
    _held = True


def complete() -> None:
    """The run is complete and saved: from now on a request ends the process at once, with 0; of
    several processes it has no effect, since all are needed."""
    global _held, _status
    _held, _status = not processes.alone(), 0


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, a request raises `Interrupted`: for a wait that may never end.

    Not in one process of several, which must not decide by itself.
    """
    global _interruptible
    _interruptible = processes.alone()
    try:
        if _interruptible and requested():
            raise Interrupted
        yield
    finally:
        _interruptible = False


def _note(number: int, frame: Any) -> None:
    """The handler in the main thread."""
    global _first, _phase
    # The thread that says it may have its turn when this one is past it.
    _first, _phase = _first or number, _phase or phases.current()
    if _interruptible:
        raise Interrupted


def _read(pipe: int) -> None:
    """The thread: acts on each signal as it arrives, whatever the main thread does."""
    global _first
    interrupted, said = math.inf, False
    while numbers := os.read(pipe, 64):
        for number in filter(SIGNALS.__contains__, numbers):
            _first = _first or number
            now = time.monotonic()
            if not _held:
                _end_at_once(number)
            elif number == signal.SIGINT and now - interrupted > AGAIN_SECONDS:
                processes.leave("SIGINT again: ended without saving", ENDED_UNSAVED)
            elif not said:
                goes_on = "finishing the step, then saving ..." if _status else COMPLETE
                log.warning(f"{_name(number)} while {_phase or phases.current()}: {goes_on}")
                said = True
            if number == signal.SIGINT:
                interrupted = min(interrupted, now)
    os.close(pipe)


def _end_at_once(number: int) -> None:
    if _status:
        text = f"{_name(number)} while {phases.current()}: stopped, and there was nothing to save"
    else:
        text = f"{_name(number)} while {phases.current()}: {COMPLETE}"
    processes.leave(text, _status)


def _name(number: int) -> str:
    return _limit if number == signal.SIGALRM else signal.Signals(number).name
