"""Retention of checkpoints: the newest, multiples of a step, the best."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """The rule by which checkpoints are kept."""

    last: int  # number of newest checkpoints
    every: int = 0  # also keeps steps that are a multiple of this; 0 keeps none
    best: bool = False  # also keeps the lowest loss on held-out text

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 0:
            raise ValueError(
                f"run.keep_last = {self.last} must be at least 1 and "
                f"run.keep_every = {self.every} at least 0"
            )

    def kept(self, steps: Collection[int], losses: Mapping[int, float]) -> set[int]:
        """The steps among `steps` whose checkpoints are kept.

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
    """The step with the lowest loss, the first of equal ones; None if no step has a loss."""
    return min(sorted(losses.keys() & set(steps)), key=losses.__getitem__, default=None)
