"""Saves of a run's state: when they are due, and retries after failures."""

import logging
import time
from typing import Any

import jax

from jaxscale import config as configs
from jaxscale.checkpoints.save import CheckpointWriter
from jaxscale.data.skipped_ranges import ranges_of
from jaxscale.distributed import phases, processes
from jaxscale.run.setup.text import Text
from jaxscale.sharding.resolve import leaf_name
from jaxscale.training.engine import Engine
from jaxscale.training.optimizer import frozen_params
from jaxscale.training.step import TrainState

log = logging.getLogger("jaxscale")

PAUSES_SECONDS = (1.0, 5.0)
"""Pauses between attempts to save the last state of a run."""

FINITE = ("params", "opt_state", "tables")
"""Parts of a state that must be finite to be saved; the guard's window has NaN until it is full of
good steps."""


class SaveError(RuntimeError):
    """The last state of a run could not be saved."""


def wait_for_write(checkpoints: CheckpointWriter, step: int) -> None:
    """Waits until no checkpoint is being written. While its files grow, a write may take any time:
    growth restarts the phase, and with it the deadline of the watchdog."""

    def begin() -> None:
        phases.enter_phase("writing the checkpoint", step)

    begin()
    checkpoints.wait(growing=begin)


def unchanged_params(engine: Engine) -> set[str]:
    """The paths in a state of the parameters that no step changes: frozen, not adjusted by the
    model."""
    names = () if engine.model.adjust else engine.model.frozen
    frozen = frozen_params(engine.config.optimizer.groups, engine.model.axes, names)
    leaves, _ = jax.tree_util.tree_flatten_with_path(frozen)
    return {f"params/{leaf_name(path)}" for path, is_frozen in leaves if is_frozen}


class Saves:
    """Saves a state when it is due. A failed save is retried after one step, then two, four, ...,
    while training continues.

    Every process of a run makes the same calls.

    Args:
      begin: the step that the run starts at, which is saved already.
    """

    def __init__(
        self,
        engine: Engine,
        text: Text,
        checkpoints: CheckpointWriter,
        begin: int,
    ) -> None:
        self._engine, self._text = engine, text
        self._checkpoints = checkpoints
        self._unchanged = unchanged_params(engine)
        self._begun = begin  # the step of the last save
        self._writing = False
        self._retry_in = 1
        self._retry_at: int | None = None

    def due(self, step: int) -> bool:
        """Whether to save the state after `step`: by `run.checkpoint_every`, at the last step, or
        as a retry; to be called after each step."""
        if self._writing:
            outcome = processes.from_first("outcome of a save", self._checkpoints.outcome())
            if outcome is not None:
                self._writing = False
                if outcome:
                    self._retry_at = step + self._retry_in - 1
                    self._retry_in *= 2
                else:
                    self._retry_at, self._retry_in = None, 1
        run = self._engine.config.run
        regular = run.checkpoint_every > 0 and step % run.checkpoint_every == 0
        regular |= step == run.steps
        return regular or (self._retry_at is not None and step >= self._retry_at)

    def save(self, step: int, state: TrainState) -> None:
        """Starts to save the state after `step`, in the background.

        Raises:
          FloatingPointError: it is not finite; nothing is written.
        """
        wait_for_write(self._checkpoints, step)
        phases.enter_phase("saving", step)
        with jax.transfer_guard("allow"):
            saved = self._engine.placement.to_canonical(state, on_host=True)
            self._checkpoints.save(
                step, saved, self._metadata(step), finite=FINITE, frozen=self._unchanged
            )
        self._begun, self._writing, self._retry_at = step, True, None

    def finish(self, step: int, state: TrainState) -> None:
        """Saves the state after `step`, with retries, and waits for it.

        Raises:
          FloatingPointError: it is not finite.
          SaveError: every attempt failed.
        """
        if self._begun < step:
            self.save(step, state)
        for pause in (*PAUSES_SECONDS, None):
            wait_for_write(self._checkpoints, step)
            outcome = processes.from_first("outcome of a save", self._checkpoints.outcome())
            if not outcome:
                return
            if pause is None:
                raise SaveError(f"{outcome}; the same command resumes there, or starts anew")
            time.sleep(pause)
            self.save(step, state)

    def _metadata(self, step: int) -> dict[str, Any]:
        next_example = self._engine.config.data.examples_of(step)
        data = {
            "fingerprint": self._text.train.fingerprint,
            "next_example": next_example,
            "passed_over": ranges_of(self._text.train),
            "tokenizer": self._text.tokenizer.fingerprint,
        }
        if ends := self._text.tokenizer.ends:
            data["stop_ids"] = list(ends)
        return {
            "config": configs.to_dict(self._engine.config),
            "data": data,
            "own_optimizer": self._engine.own_optimizer,
        }
