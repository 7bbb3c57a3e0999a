"""`jaxscale.plan`: the best layouts of a model on a cluster."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxscale import config as configs
from jaxscale.config import Config
from jaxscale.planner.dealing import improved
from jaxscale.planner.machine import cluster
from jaxscale.planner.plans import Answer, judge
from jaxscale.planner.search import search
from jaxscale.planner.space import Query, check_pins
from jaxscale.planner.why import nothing_fits


def plan(
    config: Config | str, hardware: str, devices: int, *, pins: Mapping[str, Any] | None = None,
    max_memory_bytes: float = 0.0, batch_tokens: int = 0, top: int = 10, **overrides: Any,
) -> Answer:  # fmt: skip
    """The best layouts of a model on a cluster, as `jaxscale.plan`.

    >>> answer = plan("configs/llama2_7b.py", "H100-SXM", 64, pins={"tensor": 1, "pipeline": 1})
    >>> answer.plans[0].fits
    True

    Args:
      config: a Config, or a file; its layout is not looked at.
      hardware: a device of `hardware.csv`, or a file of its columns that describes one.
      pins: fields of a Layout that shall have these values.
      max_memory_bytes: of a device; 0 for what it has.
      batch_tokens: of a step; 0 for what the config says.
      overrides: of the device's figures, as `planner.machine.cluster` takes them.

    Raises:
      ValueError: an unknown device, a pin that cannot be, or no layout that fits; says what would.
    """
    if isinstance(config, str):
        config = configs.load(config)
    config = with_batch(config, batch_tokens)
    pins = dict(pins or {})
    query = Query(config, cluster(hardware, devices, **overrides), pins, max_memory_bytes)
    check_pins(query)
    found = search(query, top)
    judged = (improved(query, judge(query, one)) for one in found.layouts)
    plans = sorted(judged, key=lambda one: one.step_seconds)
    if not plans:
        raise ValueError(nothing_fits(query, found))
    return Answer(query, tuple(plans), found)


def with_batch(config: Config, batch_tokens: int) -> Config:
    """The config with a step of so many tokens.

    Raises:
      ValueError: they are not whole sequences; names the nearest that are.
    """
    if not batch_tokens:
        return config
    sequences, rest = divmod(batch_tokens, config.data.seq_len)
    if rest or not sequences:
        near = max(1, round(batch_tokens / config.data.seq_len))
        raise ValueError(
            f"--batch_tokens {batch_tokens} is no whole number of sequences of data.seq_len = "
            f"{config.data.seq_len}; the nearest is {near * config.data.seq_len}, {near} sequences"
        )
    data = dataclasses.replace(config.data, global_batch_size=sequences)
    return dataclasses.replace(config, data=data)
