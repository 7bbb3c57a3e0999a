"""Names of settings, and conversion of their values to the types of the records."""

import ast
import contextlib
import dataclasses
import functools
import json
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence

import ml_collections

from jaxscale.choices import nearest, nearest_settings, settings_called
from jaxscale.config.batch_schedule import BatchSchedule
from jaxscale.config.data_source import Source, to_sources, to_validation
from jaxscale.config.model import ModelConfig
from jaxscale.config.optimizer import ParamGroup, to_param_groups
from jaxscale.config.records import Config


def leaves(model: type = ModelConfig) -> list[str]:
    """Every setting, as "section.key".

    Args:
      model: the record of the section "model".
    """
    return [
        f"{section.name}.{leaf.name}"
        for section in dataclasses.fields(Config)
        for leaf in dataclasses.fields(
            model if section.name == "model" else typing.cast(type, section.type)
        )
    ]


def section_record(name: str) -> type:
    records: dict[str, typing.Any] = {
        section.name: section.type for section in dataclasses.fields(Config)
    }
    records["model"] = ModelConfig
    if name not in records:
        near = settings_called(name, leaves()) or nearest(name, records)
        raise ValueError(f"unknown section config.{name}{suggestion(near, 'config.')}")
    return typing.cast(type, records[name])


def setting_type(record: type, section: str, key: str, prefix: str = "config.") -> typing.Any:
    """The type of a setting; `prefix` precedes the setting suggested for an unknown key."""
    found = {leaf.name: leaf.type for leaf in dataclasses.fields(record)}
    if key in found:
        # A custom model's module may postpone its annotations, which are then text.
        return typing.get_type_hints(record)[key] if isinstance(found[key], str) else found[key]
    known = leaves(record) if section == "model" else leaves()
    hint = suggestion(nearest_settings(f"{section}.{key}", known), prefix)
    raise ValueError(f"unknown key config.{section}.{key}{hint}")


def suggestion(near: Sequence[str], prefix: str) -> str:
    return f"; did you mean {' or '.join(prefix + one for one in near)}?" if near else ""


def parse_value(text: str, annotation: typing.Any) -> object:
    """Reads a command-line value; a tuple of strings may be written as a,b."""
    if annotation is str:
        return text
    if annotation == BatchSchedule:
        text = text if text.startswith(("(", "[", "{")) else f"{{{text}}}"
    if (
        typing.get_args(annotation)[:1] in ((int,), (float,))
        and typing.get_origin(annotation) is tuple
    ):
        text = text if text.startswith(("(", "[")) else f"({text},)"
    elif (
        typing.get_origin(annotation) is tuple
        and annotation != BatchSchedule
        and not text.startswith(("(", "[", "{'", '{"'))
    ):
        return tuple(text.split(","))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    if text.startswith(("{", "[")):  # JSON, with true, false or null
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    return text


_EXPECTED: dict[typing.Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    tuple: "a tuple",
    tuple[float, ...]: "a list of numbers",
    BatchSchedule: "steps with numbers of sequences, such as {0: 64, 2000: 128}",
    tuple[ParamGroup, ...]: "a list of mappings with a 'params'",
    tuple[Source, ...]: "a list of paths, or of mappings with a 'path'",
}


def convert_value(name: str, value: object, annotation: typing.Any) -> object:
    """The value, losslessly converted to the annotated type."""
    inner = typing.get_args(annotation)
    if types.NoneType in inner:
        if value is None:
            return None
        some = (one for one in inner if one is not types.NoneType)
        return convert_value(name, value, functools.reduce(operator.or_, some))
    origin = typing.get_origin(annotation)
    if annotation in (tuple[Source, ...], tuple[ParamGroup, ...]):
        records = (value,) if isinstance(value, dict) else value
        if isinstance(records, list | tuple):
            return _records(name, annotation)(records)
    elif tuple in (origin, annotation):
        if annotation == BatchSchedule and isinstance(value, Mapping | ml_collections.ConfigDict):
            value = tuple(value.items())
        if isinstance(value, list | tuple):
            return _convert_each(name, tuple(value), inner)
    elif (converted := _convert_scalar(name, value, annotation)) is not None:
        return converted
    raise ValueError(
        f"config.{name} = {value!r} is of type {type(value).__name__}; expected "
        f"{_EXPECTED.get(annotation, annotation)}"
    )


def _records(name: str, annotation: typing.Any) -> Callable[[Sequence], tuple]:
    """The reader of a list of records."""
    if annotation == tuple[ParamGroup, ...]:
        return to_param_groups
    return to_validation if name.partition(".")[2] == "validation" else to_sources


def _convert_scalar(name: str, value: object, target: type) -> object:
    """The value converted to a type, or None."""
    if typing.get_origin(target) is typing.Literal:
        return value if value in typing.get_args(target) else None
    if isinstance(value, bool) and target is not bool:
        return None
    if target is float and isinstance(value, int | float):
        if not math.isfinite(value):
            raise ValueError(f"config.{name} = {value} is not a finite number")
        return float(value)
    if target is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, target) else None


def _convert_each(name: str, values: tuple, inner: tuple) -> tuple:
    """The members of a tuple, converted to their types; without types in the record they are kept,
    with tuples for JSON's lists."""
    if not inner:
        return tuple(
            convert_value(name, one, tuple) if isinstance(one, list) else one for one in values
        )
    targets = inner[:1] * len(values) if inner[1:] == (...,) else inner
    if len(targets) != len(values):
        raise ValueError(
            f"config.{name} = {values} has {len(values)} members, and not {len(targets)}"
        )
    return tuple(convert_value(name, one, target) for one, target in zip(values, targets))
