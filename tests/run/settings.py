"""A trainer with other settings than it was opened with."""

import dataclasses
from typing import Any

from jaxscale.run.setup.step_programs import StepPrograms
from jaxscale.run.trainer import Trainer


def with_run(trainer: Trainer, **changes: Any) -> Trainer:
    """The trainer with these settings of `run`."""
    config = trainer.config
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, **changes))
    return dataclasses.replace(trainer, engine=dataclasses.replace(trainer.engine, config=config))


def with_step(trainer, step):
    """The trainer with a function of the test's as its step."""
    programs = StepPrograms(trainer.programs.engines, trainer.config, step, trainer.begin)
    return dataclasses.replace(trainer, programs=programs)
