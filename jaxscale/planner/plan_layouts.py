"""`jaxscale.plan`: the best layouts of a model on a cluster."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxscale import config as configs
from jaxscale.config import Config
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.model.named_models import check_shape, find_shape
from jaxscale.planner.model.shape import ModelShape
from jaxscale.planner.report.why_not import nothing_fits
from jaxscale.planner.search.balance_layers import rebalance_layers
from jaxscale.planner.search.plan import RankedPlans, predict_plan
from jaxscale.planner.search.search import search_layouts
from jaxscale.planner.search.sized_model import SizedModel
from jaxscale.planner.search.space import Query, check_pins


def plan_layouts(
    model: Config | ModelShape | str,
    hardware: str,
    devices: int,
    *,
    pins: Mapping[str, Any] | None = None,
    max_memory_bytes: float = 0.0,
    batch_tokens: int = 0,
    seq_len: int = 0,
    top: int = 10,
    **overrides: Any,
) -> RankedPlans:
    """The best layouts of a model on a cluster, as `jaxscale.plan`.

    >>> answer = plan("configs/llama2_7b.py", "H100-SXM", 64, pins={"tensor": 1, "pipeline": 1})
    >>> answer.plans[0].fits
    True
    >>> asked = {"batch_tokens": 2**24, "pins": {"pipeline": 1}}
    >>> plan("deepseek-v3", "H100-SXM", 512, **asked).plans[0].layout.expert
    4

    Args:
      model: a Config, or a file of one, whose layout is not looked at; or the sizes of a model
        that this version need not be able to train: a `planner.shape.Shape`, a name of
        `planner.shapes.NAMED`, or a JSON file of a Shape's fields.
      hardware: a device of `hardware.csv`, or a file of its columns that describes one.
      pins: fields of a Layout that shall have these values.
      max_memory_bytes: of a device; 0 for what it has.
      batch_tokens: of a step; 0 for what a config says.
      seq_len: of a model that is no config; 0 for what its shape says.
      overrides: of the device's figures, as `planner.machine.cluster` takes them.

    Raises:
      ValueError: an unknown model or device, a pin that cannot be, or no layout that fits; says
        what would.
    """
    pins = dict(pins or {})
    asked = resolve_model(model, batch_tokens, seq_len)
    query = Query(asked, make_cluster(hardware, devices, **overrides), pins, max_memory_bytes)
    check_pins(query)
    found = search_layouts(query, top)
    judged = (rebalance_layers(query, predict_plan(query, one)) for one in found.layouts)
    plans = sorted(judged, key=lambda one: one.step_seconds)
    if not plans:
        raise ValueError(nothing_fits(query, found))
    return RankedPlans(query, tuple(plans), found)


def resolve_model(
    model: Config | ModelShape | str, batch_tokens: int, seq_len: int
) -> Config | SizedModel:
    """The model and its batch, of any of the ways to say them.

    Raises:
      ValueError: an unknown name or a shape that cannot be, a batch that is missing or no whole
        number of sequences, or a length that the config says.
    """
    name = model if isinstance(model, str) else "the model"
    if isinstance(model, str):
        model = configs.load(model) if ".py" in model else find_shape(model)
    if isinstance(model, Config):
        if seq_len:
            raise ValueError(
                f"--seq_len {seq_len} is of a --model; a config says data.seq_len: set "
                f"--config.data.seq_len={seq_len}"
            )
        return with_batch(model, batch_tokens)
    shape = dataclasses.replace(model, seq_len=seq_len or model.seq_len)
    check_shape(shape, name)
    if not batch_tokens:
        raise ValueError(
            "--batch_tokens is missing: sizes of a model do not say how many tokens a step has, "
            "such as --batch_tokens 4M"
        )
    return SizedModel(shape, whole_sequences(batch_tokens, shape.seq_len, "seq_len"), name)


def with_batch(config: Config, batch_tokens: int) -> Config:
    """The config with a step of so many tokens.

    Raises:
      ValueError: they are not whole sequences; names the nearest that are.
    """
    if not batch_tokens:
        return config
    sequences = whole_sequences(batch_tokens, config.data.seq_len, "data.seq_len")
    data = dataclasses.replace(config.data, global_batch_size=sequences)
    return dataclasses.replace(config, data=data)


def whole_sequences(batch_tokens: int, seq_len: int, name: str) -> int:
    """How many sequences a step of so many tokens has.

    Raises:
      ValueError: as `with_batch`.
    """
    sequences, rest = divmod(batch_tokens, seq_len)
    if rest or not sequences:
        near = max(1, round(batch_tokens / seq_len))
        raise ValueError(
            f"--batch_tokens {batch_tokens} is no whole number of sequences of {name} = "
            f"{seq_len}; the nearest is {near * seq_len}, {near} sequences"
        )
    return sequences
