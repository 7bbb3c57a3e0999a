"""Watts, joules, money, and the days that a run takes with its failures."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.step import StepSeconds
from jaxscale.planner.model.shape import ModelShape

Floats = Any  # a float, or float [N]

IDLE_SHARE = 0.45
"""Of a device's power limit, that it draws while it waits for a collective, whose kernels spin:
the constant part of P = TDP (0.45 + 0.55 u / 0.6), b.10 of the usual accounts; H100s that trained
7B fully sharded drew 658 W of 700 at 128 devices and about 620 at 2,048, where they waited for
more than a third of the time (arXiv 2411.13055)."""

BUSY_SHARE = 0.94
"""Of the limit while products run: those 658 of 700 W, with collectives hidden."""

WAITING_SHARE = 0.82
"""Of the limit while collectives run alone: what leaves 620 W on average in that study."""

BUILDING = 1.1
"""Of what devices and servers draw, that the building draws (PUE, as LLaMA's table has it)."""

MEAN_DEVICE_HOURS_BETWEEN_STOPS = 50_700.0
"""Of one device: 419 unexpected stops in 54 days on 16,384 H100 (Llama 3, arXiv 2407.21783)."""


def mean_watts(seconds: StepSeconds, cluster: Cluster) -> Floats:
    """What one device draws on average over a step.

    Products and other kernels draw nearly the limit; waiting for collectives, messages or other
    ranks less; bubbles and the end of a step as little as a spinning device.
    """
    limit = cluster.chip.tdp_watts or cluster.chip.system_watts
    terms = seconds.terms
    busy = sum(
        terms[name] for name in ("matmul", "attention", "elementwise", "recompute", "optimizer")
    )
    talking = sum(
        terms[name] for name in ("tensor", "context", "expert", "fsdp", "data", "pipeline")
    )
    idle = seconds.step_seconds - busy - talking
    drawn = BUSY_SHARE * busy + WAITING_SHARE * talking + IDLE_SHARE * idle
    return limit * drawn / seconds.step_seconds


def run_joules(device_hours: Floats, device_watts: Floats, overhead: float = BUILDING) -> Floats:
    """Of a whole run: device-hours at a power, times the building's overhead."""
    return device_hours * 3600 * device_watts * overhead


@dataclass(frozen=True)
class Goodput:
    """What failures and checkpoints leave of a run."""

    between_failures_seconds: float
    checkpoint_every_seconds: float  # Daly's optimum
    fraction: float  # of the time, that is useful work


def goodput(
    num_devices: int,
    *,
    checkpoint_seconds: float = 10.0,
    restart_seconds: float = 600.0,
    device_hours_between_stops: float = MEAN_DEVICE_HOURS_BETWEEN_STOPS,
) -> Goodput:
    """How often to save, and what is lost.

    Args:
      checkpoint_seconds: that a save stops training for.
      restart_seconds: to notice a failure, reschedule, load and compile.

    >>> round(100 * (1 - goodput(16384, restart_seconds=0).fraction), 1)
    4.2
    """
    mean = device_hours_between_stops * 3600 / num_devices
    cost = checkpoint_seconds
    if cost >= 2 * mean:
        return Goodput(mean, mean, 0.0)
    # Daly (2006), equation 37; Young's (1974) is its first term.
    every = math.sqrt(2 * cost * mean) * (1 + math.sqrt(cost / (2 * mean)) / 3 + cost / mean / 18)
    every -= cost
    lost = cost / every + every / (2 * mean) + restart_seconds / mean
    return Goodput(mean, every, max(0.0, 1 - lost))


@dataclass(frozen=True)
class RunCost:
    """Of a whole training run; floats or float [N]."""

    seconds: Floats
    joules: Floats
    usd: Floats  # nan where the device has no price
    goodput: Goodput


def run_cost(
    shape: ModelShape,
    cluster: Cluster,
    seconds: StepSeconds,
    tokens_per_step: Floats,
    tokens: float,
) -> RunCost:
    """What `tokens` tokens take, with failures, at the device's list price."""
    good = goodput(cluster.num_devices)
    total = tokens / tokens_per_step * seconds.step_seconds / max(good.fraction, 1e-9)
    device_hours = total * cluster.num_devices / 3600
    system = cluster.chip.system_watts or cluster.chip.tdp_watts
    # A server's other parts draw what they draw, whatever its devices do.
    around = max(0.0, system - cluster.chip.tdp_watts) if cluster.chip.tdp_watts else 0.0
    price = cluster.usd_per_hour or np.nan
    return RunCost(
        seconds=total,
        joules=run_joules(device_hours, mean_watts(seconds, cluster) + around),
        usd=device_hours * price,
        goodput=good,
    )
