"""Goodput: the time of a run by cause over all its attempts, and the share that trained it."""

import collections
import contextlib
import json
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from jaxscale.distributed import launcher, phases
from jaxscale.formatting import duration
from jaxscale.storage.untrusted import parse_json

FILE = "seconds.json"

CAUSES = {
    "training": "compute",
    "waiting for input": "input",
    "saving": "save",
    "writing the checkpoint": "save",
    "evaluating": "evaluation",
    "reading text and compiling": "compile",
    "compiling a step": "compile",
}
"""Phase -> the cause of its seconds; other phases are "start"."""

SET_AFTER = 1.6e9
"""Seconds from 1970 to 2020. An earlier wall clock is not set: a host without a battery starts in
1970."""

DAMAGED = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
)
"""Errors from reading a file that is corrupt or not an account."""


class Account:
    """Account of the seconds of this attempt and earlier ones, stored in the run's folder.

    Two causes are known only afterwards: "lost", the steps after the checkpoint that training
    resumes from, which are trained again; and "restart", the time between two attempts.

    Args:
      workdir: the run's folder.
      started: `time.monotonic()` when the process began, if all of its time belongs to this run;
        None counts from now on.
    """

    def __init__(self, workdir: pathlib.Path, started: float | None = None) -> None:
        self._path = workdir / FILE
        self._elsewhere = {} if started is not None else phases.seconds_spent()
        self._lost = 0.0
        age = 0.0 if started is None else time.monotonic() - started
        self.attempts, self._before = 1, dict[str, float]()
        with contextlib.suppress(*DAMAGED):  # only the account is lost
            kept = parse_json(self._path.read_text())
            before = {str(cause): float(each) for cause, each in kept["seconds"].items()}
            gap = seconds_since(float(kept["until"]), kept.get("clock")) - age
            before["restart"] = before.get("restart", 0.0) + max(0.0, gap)
            self.attempts, self._before = int(kept["attempts"]) + 1, before

    def lose(self, seconds: float) -> None:
        """Moves seconds from compute to lost, for steps to be trained again."""
        self._lost += min(seconds, self.seconds().get("compute", 0.0))

    def seconds(self) -> dict[str, float]:
        """Cause -> seconds, of all attempts."""
        total = collections.defaultdict[str, float](float, self._before)
        for phase, each in phases.seconds_spent().items():
            total[CAUSES.get(phase, "start")] += each - self._elsewhere.get(phase, 0.0)
        total["compute"] -= self._lost
        total["lost"] += self._lost
        return {cause: each for cause, each in total.items() if each > 0}

    def keep(self) -> None:
        """Writes the account; on a full disk only the account is lost.

        Without fsync, which would stall the step that runs at the same time: a crash of the machine
        loses a few seconds of the account.
        """
        text = {
            "attempts": self.attempts,
            "seconds": self.seconds(),
            "until": time.time(),
            "clock": _clock(),
        }
        new = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):
            new.write_text(json.dumps(text) + "\n")
            os.replace(new, self._path)


def seconds_since(until: float, clock: Any) -> float:
    """Seconds since a time of the wall clock, without corrections of the clock on the same host; 0
    if the clock was not set.

    Args:
      clock: `_clock` at that time, or None.
    """
    host, now = _clock()
    if isinstance(clock, list) and clock[0] == host:
        corrected_by = now - float(clock[1])
        return time.time() - until - corrected_by
    return time.time() - until if until > SET_AFTER else 0.0


def _clock() -> tuple[str, float]:
    """The host's identity, and its boot time by the wall clock, which shifts with corrections of
    the clock."""
    running = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
    return " ".join(launcher.host_identity()), time.time() - running


def goodput_share(seconds: Mapping[str, float]) -> float:
    """The share of the time spent on steps that were kept."""
    return seconds.get("compute", 0.0) / max(sum(seconds.values()), 1e-9)


def time_line(seconds: Mapping[str, float], attempts: int) -> str:
    """The account as one line of text."""
    total = sum(seconds.values())
    rest = {cause: each for cause, each in seconds.items() if cause != "compute"}
    largest = sorted(rest.items(), key=lambda item: -item[1])
    parts = [f"{cause} {duration(each)}" for cause, each in largest if each >= 0.01 * total]
    tries = f" in {attempts} attempts" if attempts > 1 else ""
    return f"goodput {goodput_share(seconds):.1%} of {duration(total)}{tries}: " + ", ".join(
        [f"compute {duration(seconds.get('compute', 0.0))}", *parts]
    )
