"""Phases of a process with their durations: reported when it is stopped or hangs, and summed for
the account of a run's time."""

import collections
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A phase of a run, named to follow the word "while"."""

    name: str
    step: int  # 0 before the first
    since: float  # `time.monotonic()`

    def __str__(self) -> str:
        return self.name + (f" (step {self.step})" if self.step else "")


_now = Phase("starting", 0, time.monotonic())
_seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
_longest: dict[str, float] = {}


def enter_phase(name: str, step: int = 0) -> None:
    """Begins a phase and ends the one before it; called by the main thread only."""
    global _now
    before, _now = _now, Phase(name, step, time.monotonic())
    spent = _now.since - before.since
    _seconds[before.name] += spent
    _longest[before.name] = max(spent, _longest.get(before.name, 0.0))


@contextlib.contextmanager
def within(name: str) -> Iterator[None]:
    """A phase nested in the current one, which resumes afterwards."""
    outer = _now
    enter_phase(name, outer.step)
    try:
        yield
    finally:
        enter_phase(outer.name, outer.step)


def current() -> Phase:
    """The current phase."""
    return _now


def longest_phase(name: str) -> float | None:
    """Seconds of the longest phase of this name that has ended; None before one has."""
    return _longest.get(name)


def seconds_spent() -> dict[str, float]:
    """Name -> seconds spent so far, including the current phase."""
    now = time.monotonic()
    return {**_seconds, _now.name: _seconds.get(_now.name, 0.0) + now - _now.since}
