"""Cache of models' traces on disk: planning a model that was traced before imports no JAX."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import shutil
import typing
from collections.abc import Callable
from importlib import metadata
from typing import Any

from etils import epy

from jaxscale.config.model import ModelSettings, find_make, is_own_family
from jaxscale.config.read_config import read_settings
from jaxscale.sharding.model_trace import ModelTrace, ModelWork, SavedValues
from jaxscale.storage import durable
from jaxscale.storage.untrusted import load_json
from jaxscale.storage.user_cache import cache_folder

with epy.lazy_imports():  # it imports JAX, needed only for a model that was not traced before
    from jaxscale.training.tracing import trace_model, trace_saved, trace_work

PACKAGE = pathlib.Path(__file__).parents[2]
SOURCES = ("config", "models", "ops", "pipeline", "sharding", "training")
"""Folders of the package on which a trace depends."""
VERSIONS = 4
"""The number of versions of the package whose traces are kept."""


def model_trace(settings: ModelSettings) -> ModelTrace:
    """The parameters and stacks of a model, by `trace_model`.

    Raises:
      ValueError: the family of a custom model cannot be imported.
    """
    return _trace(ModelTrace, settings, _made_by(settings))


def model_work(
    settings: ModelSettings,
    seq_len: int,
    output_len: int,
    make: Callable[[Any, Any], Any] | None = None,
) -> ModelWork:
    """The work of a model for a sequence, by `trace_work`.

    Args:
      make: the function that makes the model; None: by `model.family`.

    Raises:
      ValueError: the family of a custom model cannot be imported.
    """
    return _trace(ModelWork, settings, make or _made_by(settings), seq_len, output_len)


def saved_values(
    settings: ModelSettings,
    seq_len: int,
    output_len: int,
    remat: str,
    *,
    piped: bool,
    in_parts: bool = False,
) -> SavedValues:
    """The arrays that a model's layers save, by `trace_saved`.

    Raises:
      ValueError: the family of a custom model cannot be imported.
    """
    how = remat, piped, in_parts
    return _trace(SavedValues, settings, _made_by(settings), seq_len, output_len, *how)


def _made_by(settings: ModelSettings) -> Any:
    """The function that makes a custom model, which a notebook cell may redefine; else None."""
    return find_make(settings.family) if is_own_family(settings.family) else None


@functools.lru_cache(maxsize=512)
def _trace(record: type, settings: ModelSettings, make: Any, *more: Any) -> Any:
    """A trace, from disk if stored. Traces of custom models are not stored, since their modules may
    change."""
    folder = None
    with contextlib.suppress(RuntimeError):  # a user without a home
        folder = cache_folder()
    if folder is None or make:
        return _make(record)(settings, *more, make=make)
    key = f"{record.__name__} {read_settings(settings)} {more}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    path = folder / "traces" / _sources()[:16] / f"{digest}.json"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # missing or corrupt
        return _from_json(record, load_json(path))
    trace = _make(record)(settings, *more)
    with contextlib.suppress(OSError):  # a folder that cannot be written to
        if not path.parent.exists():
            _remove_oldest(folder / "traces")
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.replace_file(path, json.dumps(dataclasses.asdict(trace)).encode())
    return trace


def _remove_oldest(folder: pathlib.Path) -> None:
    """Removes the traces of versions of the package, except the last ones in use."""
    versions = sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime)
    for path in versions[: 1 - VERSIONS]:
        shutil.rmtree(path, ignore_errors=True)


def _make(record: type) -> Callable[..., Any]:
    if record is ModelTrace:
        return trace_model.trace_model
    return trace_work.trace_work if record is ModelWork else trace_saved.trace_saved


@functools.cache
def _sources() -> str:
    """A digest of the package's modules on which a trace depends."""
    versions = [metadata.version(name) for name in ("jax", "flax")]
    found = hashlib.sha256(" ".join(versions).encode())
    for folder in SOURCES:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def _from_json(target: Any, value: Any) -> Any:
    """A record of records, tuples and numbers, from the JSON of `dataclasses.asdict`."""
    if dataclasses.is_dataclass(target):
        types, make = typing.get_type_hints(target), typing.cast(Any, target)
        return make(**{name: _from_json(types[name], each) for name, each in value.items()})
    if typing.get_origin(target) is tuple:
        inside = typing.get_args(target)
        if inside[-1] is not Ellipsis:
            return tuple(map(_from_json, inside, value))
        return tuple(_from_json(inside[0], each) for each in value)
    return value
