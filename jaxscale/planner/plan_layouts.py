"""`jaxscale.plan_layouts`: the fastest layouts of a model on a cluster."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale import config as configs
from jaxscale.choices import check_count, check_kind
from jaxscale.config import Config
from jaxscale.config.records import SECTIONS
from jaxscale.formatting import gigabytes
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.model.named_models import check_shape, find_shape, has_shape
from jaxscale.planner.model.shape import ModelShape
from jaxscale.planner.report.why_not import nothing_fits
from jaxscale.planner.search.balance_layers import rebalance_layers
from jaxscale.planner.search.plan import RankedPlans, predict_plan
from jaxscale.planner.search.search import search_layouts
from jaxscale.planner.search.sized_model import SizedModel
from jaxscale.planner.search.space import Query, check_pins
from jaxscale.storage.untrusted import load_json


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
    """Ranks the layouts of a model on a cluster by predicted step time. Needs no device.

    Args:
      model: a Config, a config file or the name of a shipped one, whose layout is ignored; or the
        sizes of a model that this version may not be able to train: a
        `planner.model.shape.ModelShape`, a name of `planner.model.named_models.NAMED` (before a
        shipped config of that name), or a JSON file of a ModelShape's fields. A JSON file of a
        config's sections, such as a run's config.json, is that config.
      hardware: a device of `hardware.csv`, or a CSV or JSON file of its columns.
      pins: fixed fields of the layout, such as {"tensor": 8}.
      max_memory_bytes: per device, at most its own; 0 for what a program may use of it.
      batch_tokens: per step; 0 for that of the config.
      seq_len: of a model given by its sizes; 0 for that of its shape.
      overrides: of the device's figures, as `planner.cost.cluster.make_cluster` takes them.

    Raises:
      ValueError: an unknown model or device, an impossible pin, more memory than a device has, or
        no layout that fits; names the change that would.

    Examples:
      >>> pins = {"tensor": 1, "pipeline": 1}
      >>> answer = jaxscale.plan_layouts("llama2_7b", "H100-SXM", 64, pins=pins)
      >>> answer.plans[0].fits
      True
      >>> asked = {"batch_tokens": 2**24, "pins": {"pipeline": 1}}
      >>> jaxscale.plan_layouts("deepseek-v3", "H100-SXM", 512, **asked).plans[0].layout.expert
      8
    """
    pins = dict(pins or {})
    check_count("devices", devices, 1)
    check_count("top", top, 1)
    asked = resolve_model(model, batch_tokens, seq_len)
    cluster = make_cluster(hardware, devices, **overrides)
    if max_memory_bytes > cluster.memory_bytes:
        raise ValueError(
            f"--max_memory {gigabytes(max_memory_bytes)} is more than the "
            f"{gigabytes(cluster.memory_bytes)} of {cluster.name}; give as much or less, or leave "
            "it out"
        )
    query = Query(asked, cluster, pins, max_memory_bytes)
    check_pins(query)
    found = search_layouts(query, top)
    predicted = (rebalance_layers(query, predict_plan(query, one)) for one in found.layouts)
    plans = sorted(predicted, key=lambda one: one.step_seconds)
    if not plans:
        raise ValueError(nothing_fits(query, found))
    return RankedPlans(query, tuple(plans), found)


def resolve_model(
    model: Config | ModelShape | str, batch_tokens: int, seq_len: int
) -> Config | SizedModel:
    """The model with its batch, from a config, a shape, a name or a file.

    Raises:
      ValueError: an unknown name, an impossible shape, a batch that is missing or not a whole
        number of sequences, or a sequence length with a config.
    """
    name = model if isinstance(model, str) else "the model"
    if isinstance(model, str):
        shipped = not has_shape(model) and model in configs.shipped_configs()
        if shipped or ".py" in model:
            model = configs.load(model)
        else:
            model = run_config(model) or find_shape(model)
    if isinstance(model, Config):
        if seq_len:
            raise ValueError(
                f"--seq_len {seq_len} is for a model given by its sizes; for a config set "
                f"--config.data.seq_len={seq_len}"
            )
        return with_batch(model, batch_tokens)
    advice = "pass a config of jaxscale.load, or the name of a model or of a file"
    check_kind("model", model, ModelShape, advice)
    shape = dataclasses.replace(model, seq_len=seq_len or model.seq_len)
    check_shape(shape, name)
    if not batch_tokens:
        raise ValueError(
            "--batch_tokens is missing: a model given by its sizes has no batch; set for example "
            "--batch_tokens 4M"
        )
    return SizedModel(shape, whole_sequences(batch_tokens, shape.seq_len, "seq_len"), name)


def run_config(model: str, overrides: Sequence[str] = ()) -> Config | None:
    """The config of a JSON file of its sections; None where the model is something else.

    Raises:
      ValueError: it is the config of a Hugging Face model, or as `configs.from_dict`; code from
        outside the package is refused, since somebody else may have written the file.
    """
    given = load_json(pathlib.Path(model)) if model.endswith(".json") else None
    if not isinstance(given, dict) or given.keys().isdisjoint((*SECTIONS, "model_type")):
        return None
    sections = configs.read_sections(pathlib.Path(model))
    return configs.from_dict(sections, overrides, trust_foreign=False)


def with_batch(config: Config, batch_tokens: int) -> Config:
    """The config with `batch_tokens` tokens per step.

    Raises:
      ValueError: they are not a whole number of sequences; names the nearest batch that is.
    """
    if not batch_tokens:
        return config
    sequences = whole_sequences(batch_tokens, config.data.seq_len, "data.seq_len")
    data = dataclasses.replace(config.data, global_batch_size=sequences)
    return dataclasses.replace(config, data=data)


def whole_sequences(batch_tokens: int, seq_len: int, name: str) -> int:
    """Sequences of a step of `batch_tokens` tokens.

    Raises:
      ValueError: as `with_batch`.
    """
    sequences, rest = divmod(batch_tokens, seq_len)
    if rest or not sequences:
        near = max(1, round(batch_tokens / seq_len))
        raise ValueError(
            f"--batch_tokens {batch_tokens} is not a whole number of sequences of {name} = "
            f"{seq_len}; the nearest is {near * seq_len}, {near} sequences"
        )
    return sequences
