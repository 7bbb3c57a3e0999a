"""Model shapes in JSON: published models of `named_models.json`, and a user's files."""

import dataclasses
import pathlib
from dataclasses import replace
from typing import Any

from jaxscale.choices import did_you_mean
from jaxscale.planner.model.shape import LatentAttention, ModelShape, StateSpaceMixer
from jaxscale.storage.untrusted import load_json


def published_shape(model: str, seq_len: int) -> ModelShape | None:
    """The shape whose name `model` begins with; None where there is none."""
    name = _normalised(model)
    found = [shape for known, shape in NAMED.items() if name.startswith(known)]
    return replace(found[0], seq_len=seq_len) if found else None


def _normalised(model: str) -> str:
    """The spelling in `NAMED` of a name in any case, with _ for -, or without - before a
    version."""
    return model.lower().replace("_", "-").replace("nemotron3", "nemotron-3")


def has_shape(model: str) -> bool:
    """Whether a model is a name of `NAMED`, or a JSON file of sizes."""
    return model.endswith(".json") or _normalised(model) in NAMED


def find_shape(model: str) -> ModelShape:
    """The shape of a name, in any case and with _ for -, or of a user's JSON file.

    Raises:
      ValueError: an unknown model, or a field that is unknown, missing or of another type; names
        the nearest.
    """
    if model.endswith(".json"):
        return read_shape(load_json(pathlib.Path(model)), model)
    name = _normalised(model)
    if name in NAMED:
        return NAMED[name]
    raise ValueError(
        f"model {model!r} is not known; it can be {', '.join(NAMED)}, or a JSON file of a model's "
        f"sizes, such as model.json{did_you_mean(name, NAMED, count=3, cutoff=0.4)}"
    )


def read_shape(given: Any, where: str) -> ModelShape:
    """A shape from a JSON object of its fields, as `named_models.json` has one for each name.

    Fields with a default may be left out; "source" says where the sizes are from.

    Raises:
      ValueError: as `find_shape`.
    """
    fields = [field.name for field in dataclasses.fields(ModelShape)]
    if not isinstance(given, dict) or given.keys().isdisjoint(fields):
        raise ValueError(
            f"{where} does not describe a model; it must be an object with the fields of a "
            f"ModelShape ({', '.join(fields)}), or a run's config.json"
        )
    given = {name: value for name, value in given.items() if name != "source"}
    for name, kind in (("latent", LatentAttention), ("mixer", StateSpaceMixer)):
        if given.get(name) is not None:
            given[name] = _record(kind, given[name], f"{where}: {name}")
    return _record(ModelShape, given, where)


TYPES: dict[Any, tuple[type, ...]] = {int: (int,), bool: (bool,), float: (int, float)}
"""Type of a field -> types that JSON may give for it."""


def _record(kind: Any, given: Any, where: str) -> Any:
    """A dataclass from a JSON object of its fields; nested records are already made."""
    if not isinstance(given, dict):
        raise ValueError(f"{where} is {given!r}; it must be an object of {kind.__name__}'s fields")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name, value in given.items():
        if name not in fields:
            raise ValueError(
                f"{where}: {name!r} is not a field; it can be {', '.join(fields)}"
                f"{did_you_mean(name, fields)}"
            )
        allowed = TYPES.get(fields[name].type, ())
        if allowed and type(value) not in allowed:
            raise ValueError(f"{where}: {name} = {value!r} must be {allowed[-1].__name__}")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in given:
            raise ValueError(f"{where}: {name!r} is missing; every model has one")
    return kind(**given)


_FILE = pathlib.Path(__file__).with_suffix(".json")
NAMED = {name: read_shape(given, f"{_FILE}: {name}") for name, given in load_json(_FILE).items()}
"""Published models."""


def check_shape(shape: ModelShape, name: str) -> None:
    """Refuses impossible sizes.

    Raises:
      ValueError: names the field.
    """
    least = {
        "layers": 1,
        "d_model": 1,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 1,
        "vocab": 2,
        "seq_len": 2,
    }
    if shape.experts:
        least |= {"top_k": 1, "expert_ff": 1}
    if shape.encoder_layers:
        least |= {"encoder_seq_len": 1}
    if not shape.experts and shape.with_mlp:
        least |= {"d_ff": 1}
    for field, bound in least.items():
        if getattr(shape, field) < bound:
            raise ValueError(f"{name}: {field} = {getattr(shape, field)}; at least {bound}")
    for field, whole in (("kv_heads", "heads"), ("top_k", "experts"), ("dense_layers", "layers")):
        if getattr(shape, field) > getattr(shape, whole):
            raise ValueError(
                f"{name}: {field} = {getattr(shape, field)} is more than {whole} = "
                f"{getattr(shape, whole)}"
            )
    if shape.heads % shape.kv_heads:
        raise ValueError(
            f"{name}: heads = {shape.heads} is not a multiple of kv_heads = {shape.kv_heads}"
        )
