"""Traces of models, each made once and kept on disk: a plan of a model that was traced before
imports no JAX."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from importlib import metadata
from typing import Any

from etils import epy

from jaxscale.config.model import ModelSettings, is_own_family
from jaxscale.config.read_config import read_settings
from jaxscale.sharding.model_trace import ModelTrace, ModelWork, ParamShape, StackTrace
from jaxscale.storage import durable
from jaxscale.storage.untrusted import load_json

with epy.lazy_imports():  # it imports JAX: only a model that was not traced before needs it
    from jaxscale.training import trace_model, trace_work

PACKAGE = pathlib.Path(__file__).parents[2]
SOURCES = ("config", "models", "ops", "sharding", "training")
"""Folders of the package on which a trace depends."""


@functools.lru_cache(maxsize=256)
def model_trace(settings: ModelSettings) -> ModelTrace:
    """What tracing a model finds. Traces of custom models are not kept on disk: their modules may
    change.

    Raises:
      ValueError: the family of a custom model cannot be imported.
    """
    name = os.environ.get("JAXSCALE_CACHE")  # as of compiled programs
    if name == "" or is_own_family(settings.family):
        return trace_model.trace_model(settings)
    folder = pathlib.Path(name or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/jaxscale")
    path = pathlib.Path(os.path.expanduser(folder)) / "traces" / f"{_digest(settings)}.json"
    try:
        return _from_json(load_json(path))
    except (OSError, ValueError, LookupError, TypeError):  # none yet, or a damaged one
        trace = trace_model.trace_model(settings)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.replace_file(path, json.dumps(dataclasses.asdict(trace)).encode())
    except OSError:
        pass  # a folder that cannot be written to: it is traced again the next time
    return trace


@functools.lru_cache(maxsize=256)
def model_work(settings: ModelSettings, seq_len: int, output_len: int) -> ModelWork:
    """What a model computes for a sequence: see `training.trace_work`."""
    return trace_work.trace_work(settings, seq_len, output_len)


def _digest(settings: ModelSettings) -> str:
    return hashlib.sha256(f"{_sources()} {read_settings(settings)}".encode()).hexdigest()[:32]


@functools.cache
def _sources() -> str:
    """A digest of the package's modules that make a trace."""
    versions = [metadata.version(name) for name in ("jax", "flax")]
    found = hashlib.sha256(" ".join(versions).encode())
    for folder in SOURCES:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def _from_json(values: Any) -> ModelTrace:
    def parameter(one: dict[str, Any]) -> ParamShape:
        rules = tuple((name, tuple(over)) for name, over in one["own_rules"])
        lists = {"axes": tuple(one["axes"]), "shape": tuple(one["shape"]), "own_rules": rules}
        return ParamShape(**{**one, **lists})

    return ModelTrace(
        tuple(map(parameter, values["parameters"])),
        tuple(StackTrace(**one) for one in values["stacks"]),
        tuple(values["borrowed"]),
        values["adjusts"],
    )
