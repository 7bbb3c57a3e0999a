"""Retention: which checkpoints of a run are kept."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """The newest checkpoints, and some of the others."""

    last: int  # of the newest
    every: int = 0  # also those whose step is a multiple of this; 0 means none
    best: bool = False  # also that with the lowest loss on held-out text

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 0:
            raise ValueError(
                f"run.keep_last = {self.last} must be at least 1 and "
                f"run.keep_every = {self.every} at least 0"
            )

    def kept(self, steps: Collection[int], losses: Mapping[int, float]) -> set[int]:
        """Those of some steps whose checkpoints are kept.

        Args:
          losses: on held-out text, by step.
        """
        kept = set(sorted(steps)[-self.last :])
        if self.every:
            kept |= {step for step in steps if step % self.every == 0}
        if self.best and (best := best_step(steps, losses)) is not None:
            kept.add(best)
        return kept


LAST_THREE = Retention(3)


def best_step(steps: Collection[int], losses: Mapping[int, float]) -> int | None:
    """That of some steps with the lowest loss, of equal ones the first; None where none has one."""
    return min(sorted(losses.keys() & set(steps)), key=losses.__getitem__, default=None)
