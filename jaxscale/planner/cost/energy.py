"""Power, energy, cost and duration of a run, failures included."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.step import StepSeconds

Floats = Any  # a float, or float [N]

IDLE_SHARE = 0.45
"""Share of a device's power limit that it draws while idle in a step, with spinning kernels: an
assumption, the constant part of P = TDP (0.45 + 0.55 u / 0.6) at a utilisation u. H100s that
trained 7B fully sharded drew 658 of 700 W at 128 devices and about 620 W at 2,048, where more than
a third of the time was exposed communication (arXiv 2411.13055)."""

BUSY_SHARE = 0.94
"""The same while matmuls run: those 658 of 700 W, with collectives overlapped."""

EXPOSED_SHARE = 0.82
"""The same during exposed communication: gives the mean of 620 W in that study."""

BUILDING = 1.1
"""Power usage effectiveness (PUE): power of the building over that of the servers, as assumed for
LLaMA (arXiv 2302.13971)."""

DEVICE_HOURS_BETWEEN_FAILURES = 50_700.0
"""Mean time between failures of one device: 419 unexpected interruptions in 54 days on 16,384 H100
(Llama 3, arXiv 2407.21783)."""


def mean_watts(seconds: StepSeconds, cluster: Cluster) -> Floats:
    """Mean power of one device over a step.

    Compute draws nearly the limit, exposed communication less, bubbles and fixed costs as little as
    a spinning device. nan where no power of the device is known.
    """
    limit = cluster.chip.tdp_watts or cluster.chip.system_watts or np.nan
    terms = seconds.terms
    busy = sum(
        terms[name]
        for name in ("matmul", "attention", "elementwise", "weights", "recompute", "optimizer")
    )
    exposed = sum(terms[name] for name in ("tensor", "context", "expert", "fsdp", "data"))
    idle = seconds.step_seconds - busy - exposed
    drawn = BUSY_SHARE * busy + EXPOSED_SHARE * exposed + IDLE_SHARE * idle
    return limit * drawn / seconds.step_seconds


def run_joules(device_hours: Floats, device_watts: Floats, overhead: float = BUILDING) -> Floats:
    """Energy of a run: device-hours at a power, times the PUE."""
    return device_hours * 3600 * device_watts * overhead


@dataclass(frozen=True)
class Goodput:
    """Useful share of a run with failures and checkpoints."""

    between_failures_seconds: float
    checkpoint_every_seconds: float  # Daly's optimum (2006)
    fraction: float  # of the time that is useful work


def goodput(
    num_devices: int,
    *,
    checkpoint_seconds: float = 10.0,
    restart_seconds: float = 600.0,
) -> Goodput:
    """The best interval of checkpoints, and the share of time that is not lost.

    Args:
      checkpoint_seconds: time for which a save stops training.
      restart_seconds: time to notice a failure, reschedule, load and compile.

    >>> round(100 * (1 - goodput(16384, restart_seconds=0).fraction), 1)
    4.2
    """
    mean = DEVICE_HOURS_BETWEEN_FAILURES * 3600 / num_devices
    cost = checkpoint_seconds
    if cost >= 2 * mean:
        return Goodput(mean, mean, 0.0)
    # Daly, A higher order estimate of the optimum checkpoint interval (2006), equation 37.
    every = math.sqrt(2 * cost * mean) * (1 + math.sqrt(cost / (2 * mean)) / 3 + cost / mean / 18)
    every -= cost
    lost = cost / every + every / (2 * mean) + restart_seconds / mean
    return Goodput(mean, every, max(0.0, 1 - lost))


@dataclass(frozen=True)
class RunCost:
    """Duration, energy and cost of a training run; floats or float [N]."""

    seconds: Floats
    joules: Floats  # nan where no power of the device is known
    usd: Floats  # nan where the device has no price
    goodput: Goodput


def run_cost(
    cluster: Cluster,
    seconds: StepSeconds,
    tokens_per_step: Floats,
    tokens: float,
) -> RunCost:
    """Duration, energy and cost of training on `tokens` tokens, at the device's list price."""
    good = goodput(cluster.num_devices)
    total = tokens / tokens_per_step * seconds.step_seconds / max(good.fraction, 1e-9)
    device_hours = total * cluster.num_devices / 3600
    system = cluster.chip.system_watts or cluster.chip.tdp_watts
    # The server's other parts draw constant power.
    around = max(0.0, system - cluster.chip.tdp_watts) if cluster.chip.tdp_watts else 0.0
    price = cluster.usd_per_hour or np.nan
    return RunCost(
        seconds=total,
        joules=run_joules(device_hours, mean_watts(seconds, cluster) + around),
        usd=device_hours * price,
        goodput=good,
    )
