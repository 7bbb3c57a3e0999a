"""Requests to stop a run: signals, `run.max_hours`, preemption notices.

During training a request waits for the end of the step, and a checkpoint is saved. Before training
there is nothing to save, and the process exits at once. A Python handler runs only when the
compiler returns, perhaps minutes later, so each signal is also written to a pipe (by
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
"""The exit status of a process that was asked to stop; the same command resumes. It is SIGTERM's
default status, so a SIGTERM before the handlers are set needs no other treatment."""

ENDED_UNSAVED = 130
"""The exit status after a second Ctrl-C, which does not wait for the checkpoint."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)
"""Signals that stop a run. SIGALRM is internal: `limit` sets the alarm, and `ask` sends it."""

AGAIN_SECONDS = 1.0
"""A SIGINT this much later counts as a second Ctrl-C: a terminal and a launcher may both send the
first one."""

LONGEST_TIMER_SECONDS = 1e9
"""Thirty years: the longest timer that every system supports."""

COMPLETE = "the run is complete and saved"
"""The answer to a request that comes too late."""


class Interrupted(Exception):  # noqa: N818 - a request is not an error
    """A request to stop arrived inside `interruptible`."""


_listening = False
_first = 0  # the first request: the number of its signal
_phase = ""  # the main thread's phase at that time, if it could note it
_held = False  # whether a request waits for the training loop
_status = STOPPED  # of a process that exits at once
_interruptible = False
_limit = ""  # the reason of the alarm


class _Deadline(threading.local):
    """Deadline of a run in a thread that gets no signals, such as a notebook's."""

    at = math.inf  # of `time.monotonic()`
    said = ""


_deadline = _Deadline()


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Handles requests to stop inside the context: the process exits at once, unless `hold` was
    called.

    A signal that is ignored (under nohup, or in the background of a shell) remains ignored. SIGQUIT
    prints the stacks of all threads, and the run continues. Does nothing inside another
    `listening`, or outside the main thread, the only one that may set handlers.
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
        _listening, _first = False, 0  # a later run was not asked to stop


def limit(hours: float, since: float) -> None:
    """Requests a stop `hours` after `since`, of `time.monotonic()`; 0: never. Without `listening`
    the request is for the calling thread only."""
    global _limit
    end, said = since + 3600 * hours, f"run.max_hours = {hours:g}"
    alone = hours and not _listening
    _deadline.at, _deadline.said = end if alone else math.inf, said
    if hours and _listening:
        _limit = said
        left = end - time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, min(max(left, 1e-3), LONGEST_TIMER_SECONDS))


def ask(reason: str) -> None:
    """Requests a stop for a reason other than a signal, from any thread."""
    global _limit
    if _listening:
        _limit = reason
        os.kill(os.getpid(), signal.SIGALRM)


def requested() -> str:
    """The name of the request to stop, such as "SIGTERM", or ""."""
    if _first:
        return _name(_first)
    return _deadline.said if time.monotonic() >= _deadline.at else ""


def hold() -> None:
    """From now on requests wait for code that calls `requested`."""
    global _held
    _held = True


def complete() -> None:
    """Marks the run as complete and saved: a later request exits at once with status 0. With
    several processes, which all are needed, it has no effect."""
    global _held, _status
    _held, _status = not processes.alone(), 0


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside the context a request raises `Interrupted`: for a wait that may never end.

    Not with several processes, which must decide together.
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
    # The phase is noted here: the thread that prints it may run later.
    _first, _phase = _first or number, _phase or phases.current()
    if _interruptible:
        raise Interrupted


def _read(pipe: int) -> None:
    """Acts on each signal as it arrives, in a thread, whatever the main thread does."""
    global _first
    interrupted, said = math.inf, False
    while numbers := os.read(pipe, 64):
        for number in filter(SIGNALS.__contains__, numbers):
            _first = _first or number
            now = time.monotonic()
            if not _held:
                _end_at_once(number)
            elif number == signal.SIGINT and now - interrupted > AGAIN_SECONDS:
                processes.leave("SIGINT again: stopped without saving", ENDED_UNSAVED)
            elif not said:
                action = "finishing the step, then saving ..." if _status else COMPLETE
                log.warning(f"{_name(number)} while {_phase or phases.current()}: {action}")
                said = True
            if number == signal.SIGINT:
                interrupted = min(interrupted, now)
    os.close(pipe)


def _end_at_once(number: int) -> None:
    if _status:
        text = f"{_name(number)} while {phases.current()}: stopped; there was nothing to save"
    else:
        text = f"{_name(number)} while {phases.current()}: {COMPLETE}"
    processes.leave(text, _status)


def _name(number: int) -> str:
    return _limit if number == signal.SIGALRM else signal.Signals(number).name
