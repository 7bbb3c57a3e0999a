"""A run of a study: one configuration, trained to its end in a folder.

The folder is that of `python -m jaxscale.train --workdir`: a run that was interrupted resumes from
its newest checkpoint, and one that is complete is read.
"""

import pathlib
from typing import Any, NamedTuple

from etils import epy

from jaxscale.config import Config

with epy.lazy_imports():  # they import JAX, which studies of predictions do not need
    from jaxscale.run import compilation_cache, metrics, trainer, training_loop


class TrainedRun(NamedTuple):
    """The results of a complete run."""

    steps: list[dict[str, Any]]  # records of metrics.jsonl with a loss, one a step
    eval_losses: dict[int, float]  # step -> held-out loss, nats per token; {} without such text

    @property
    def eval_loss(self) -> float:
        """The held-out loss after the last step.

        Raises:
          ValueError: the run holds no text out.
        """
        if not self.eval_losses:
            raise ValueError("the run has no held-out loss; set data.heldout, such as 0.05")
        return self.eval_losses[max(self.eval_losses)]

    @property
    def step_seconds(self) -> float:
        """The sum over steps, without evaluations, saves and compilation."""
        return sum(one["step_seconds"] for one in self.steps)


def train_run(config: Config, folder: pathlib.Path) -> TrainedRun:
    """Trains a configuration in a folder, which resumes, or reads it if it is complete.

    Args:
      config: `run.checkpoint_every` limits the work that an interruption loses.

    Raises:
      FloatingPointError: the loss is not finite.
      Stopped: by a signal, after a checkpoint.
      ValueError: settings that do not fit the devices or the folder's checkpoint.
    """
    compilation_cache.keep_compiled_programs()
    ready = trainer.open_trainer(config, folder)
    if ready is not None:
        training_loop.fit(ready, trackers=())
    records = metrics.read(folder / metrics.METRICS)
    return TrainedRun([one for one in records if "loss" in one], metrics.heldout_losses(records))
