"""Where the time of a run went, over all its attempts: the share that trained it, and the rest."""

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Mapping

from jaxscale.distributed import phases
from jaxscale.formatting import duration

FILE = "seconds.json"

CAUSES = {
    "training": "compute",
    "waiting for input": "input",
    "saving": "save",
    "evaluating": "evaluation",
    "reading text and compiling": "compile",
}
"""Phase -> what its seconds are counted as; those of any other are "start"."""


class Account:
    """Adds up the seconds of this attempt and of those before, which are kept in the run's folder.

    Two causes are known only afterwards: "lost" are the seconds of steps after the checkpoint that
    an attempt resumes from, which are trained again; "restart" those between the end of an attempt
    and the start of the next.

    Args:
      workdir: the run's folder.
      lost_seconds: of the steps that are trained again.
      age_seconds: since this process began.
    """

    def __init__(self, workdir: pathlib.Path, lost_seconds: float, age_seconds: float) -> None:
        self._path = workdir / FILE
        self.attempts, self._before = 1, dict[str, float]()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            kept = json.loads(self._path.read_text())
            before = {str(cause): float(each) for cause, each in kept["seconds"].items()}
            gap = time.time() - age_seconds - float(kept["until"])
            before["restart"] = before.get("restart", 0.0) + max(0.0, gap)
            before["compute"] = before.get("compute", 0.0) - lost_seconds
            before["lost"] = before.get("lost", 0.0) + lost_seconds
            self.attempts, self._before = int(kept["attempts"]) + 1, before

    def seconds(self) -> dict[str, float]:
        """Cause -> seconds, of all attempts."""
        total = dict(self._before)
        for phase, each in phases.seconds_spent().items():
            cause = CAUSES.get(phase, "start")
            total[cause] = total.get(cause, 0.0) + each
        return {cause: max(0.0, each) for cause, each in total.items()}

    def keep(self) -> None:
        """Writes the account; a disk that is full costs only the account."""
        text = {"attempts": self.attempts, "seconds": self.seconds(), "until": time.time()}
        new = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):
            new.write_text(json.dumps(text) + "\n")
            os.replace(new, self._path)


def goodput_share(seconds: Mapping[str, float]) -> float:
    """The share of the time that trained steps which were kept."""
    return seconds.get("compute", 0.0) / max(sum(seconds.values()), 1e-9)


def time_line(seconds: Mapping[str, float], attempts: int) -> str:
    """One line for people."""
    total = sum(seconds.values())
    rest = {cause: each for cause, each in seconds.items() if cause != "compute"}
    largest = sorted(rest.items(), key=lambda item: -item[1])
    parts = [f"{cause} {duration(each)}" for cause, each in largest if each >= 0.01 * total]
    tries = f" in {attempts} attempts" if attempts > 1 else ""
    return f"goodput {goodput_share(seconds):.1%} of {duration(total)}{tries}: " + ", ".join(
        [f"compute {duration(seconds.get('compute', 0.0))}", *parts]
    )
