"""Learning-rate schedules, and their continuation in a resumed run."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxscale.config import Config, from_dict
from jaxscale.config.optimizer import OptimizerConfig

DECAY_SHARE = 0.2
"""The last share of a wsd schedule, in which the rate decays (arXiv 2405.18392 finds 20 %
enough)."""

RATE_SETTINGS = ("schedule", "learning_rate", "final_learning_rate", "warmup_steps")
"""Optimizer settings of the learning rate, in addition to the length of the schedule."""


def schedule(
    name: str, *, learning_rate: float, final: float, warmup_steps: int, steps: int
) -> Callable[[Any], Any]:
    """The learning rate as a function of the number of updates already made, int or array.

    Warm-up is linear; its last update is the first at the full rate. Then "constant" is constant,
    "linear" and "cosine" (arXiv 1608.03983) decay, and "wsd" (warm-up, stable, decay; arXiv
    2404.06395) is constant until the last fifth and decays with 1 - sqrt (arXiv 2405.18392).

    Args:
      name: one of the above.
      learning_rate: at the peak.
      final: at the end of the schedule, as a share of the peak; not for "constant".
      warmup_steps: updates of warm-up.
      steps: length of the schedule in updates; beyond it the rate has its final value.
    """
    begin = max(warmup_steps, round(steps * (1 - DECAY_SHARE))) if name == "wsd" else warmup_steps
    falls = {
        "constant": lambda xp, progress: 0 * progress,
        "linear": lambda xp, progress: progress,
        "cosine": lambda xp, progress: (1 - xp.cos(math.pi * progress)) / 2,
        "wsd": lambda xp, progress: xp.sqrt(progress),
    }
    if name not in falls:
        raise ValueError(f"optimizer.schedule = {name!r}; it can be {', '.join(falls)}")

    def rate(step: Any) -> Any:
        # On the host for an int: printing a rate must not wait for the devices.
        xp = np if isinstance(step, int) else jnp
        step = xp.asarray(step, jnp.result_type(float))
        warm = xp.minimum((step + 1) / max(warmup_steps, 1), 1)
        fallen = falls[name](xp, xp.clip((step - begin) / max(steps - begin, 1), 0, 1))
        return learning_rate * warm * ((1 - fallen) + fallen * final)  # exact at both ends

    return rate


def schedule_of(config: OptimizerConfig, steps: int) -> Callable[[Any], Any]:
    """The `schedule` of a run's settings, over `steps` updates."""
    return schedule(
        config.schedule,
        learning_rate=config.learning_rate,
        final=config.final_learning_rate,
        warmup_steps=config.warmup_steps,
        steps=steps,
    )


def with_schedule(config: Config, saved: dict[str, dict]) -> Config:
    """The config with the length of its schedule: as set, else the checkpoint's, else `run.steps`.
    Longer training does not stretch a started schedule.

    Args:
      saved: the checkpoint's config, or {}.
    """
    if config.optimizer.schedule_steps is not None:
        return config
    steps = _saved_schedule(saved).schedule_steps if saved else config.run.steps
    optimizer = dataclasses.replace(config.optimizer, schedule_steps=steps)
    return dataclasses.replace(config, optimizer=optimizer)


def early_end(optimizer: OptimizerConfig, run_steps: int) -> str:
    """A line about a schedule that ends before a new run, or "": the config.json of another run has
    the steps of that run.

    Args:
      optimizer: of a run without a checkpoint.
    """
    steps = optimizer.schedule_steps or run_steps
    if steps >= run_steps or optimizer.schedule == "constant":
        return ""
    last = schedule_of(optimizer, steps)(steps)
    return (
        f"optimizer.schedule_steps = {steps} is below run.steps = {run_steps}: from step "
        f"{steps + 1} on the learning rate is {last:.3g}. If the configuration is from an earlier "
        "run, --config.optimizer.schedule_steps=None spreads the schedule over run.steps"
    )


def rate_change(
    saved: dict[str, dict], optimizer: OptimizerConfig, run_steps: int, begin: int
) -> str:
    """A line on the learning rate of the next step under changed settings, or "".

    Args:
      saved: the config of the checkpoint.
      optimizer, run_steps: of the present config.
      begin: steps done.
    """
    saved_config = _saved_schedule(saved)
    steps = saved_config.schedule_steps
    settings = {name: getattr(saved_config.optimizer, name) for name in RATE_SETTINGS}
    before = dataclasses.replace(optimizer, schedule_steps=steps, **settings)
    if before == optimizer:
        return ""
    past = schedule_of(before, steps)
    now = schedule_of(optimizer, optimizer.schedule_steps or run_steps)
    return (
        f"learning rate: {past(begin - 1):.3g} at step {begin}, {now(begin):.3g} at step "
        f"{begin + 1}, where it would have been {past(begin):.3g}"
    )


def _saved_schedule(saved: dict[str, dict]) -> Config:
    """The learning-rate settings of a checkpoint's config, checked. Without `schedule_steps`, in
    older ones, the length is `run.steps`."""
    names = {"optimizer": (*RATE_SETTINGS, "schedule_steps"), "run": ("steps",)}
    parts = {part: saved.get(part, {}) for part in names}
    return from_dict(
        {part: {n: parts[part][n] for n in names[part] if n in parts[part]} for part in names}
    )
