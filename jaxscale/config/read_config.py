"""Reader of configuration files, overrides and a run's config.json into records, and back."""

import contextlib
import dataclasses
import functools
import inspect
import pathlib
import runpy
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import ml_collections

from jaxscale.choices import check_choice, check_kind, did_you_mean, nearest, nearest_settings
from jaxscale.config.data_source import to_plain
from jaxscale.config.model import ModelSettings, is_own_family, settings_record
from jaxscale.config.records import SECTIONS, WITHOUT_FILE, Config
from jaxscale.config.schedule_spec import AUTO
from jaxscale.config.values import (
    convert_value,
    leaves,
    parse_value,
    section_record,
    setting_type,
    suggestion,
)
from jaxscale.formatting import changed_values
from jaxscale.pipeline_schedules.shipped import find_schedule, is_foreign
from jaxscale.storage.untrusted import load_json

LENGTHS = ("steps", "epochs")
"""Settings of a run's length, which exclude each other."""

SHIPPED = pathlib.Path(__file__).parents[1] / "configs"
"""The shipped configurations, which are the repository's configs/."""


def load(path: str | pathlib.Path, overrides: Sequence[str] = ()) -> Config:
    """Loads a configuration file, applies overrides, and checks the result.

    Args:
      path: a Python file with `get_config(arg="")`, or the name of a shipped one ("quickstart");
        "FILE.py:ARG" passes ARG to it. Keys that the file leaves out keep the defaults of the
        records. Its section "layout" may be "auto". Or the config.json of a run.
      overrides: "section.key=value" each, as after `--config.` on the command line.

    Raises:
      ValueError: an unknown key (the nearest is named), a value of the wrong type, or values
        that are incompatible.
      FileNotFoundError: no such file.

    Examples:
      >>> jaxscale.load("tiny", ["optimizer.learning_rate=1e-3"]).optimizer.learning_rate
      0.001
    """
    advice = "pass a file, or the name of a shipped configuration"
    check_kind("path", path, (str, pathlib.PurePath), advice)
    path = str(path)
    if path.endswith(".json"):
        return from_dict(read_sections(pathlib.Path(_existing(path))), overrides)
    sections: dict[str, dict] = {section.name: {} for section in dataclasses.fields(Config)}
    for name, values in _read(path).items():
        section_record(name)
        if (name, values) == ("layout", "auto"):
            values = ml_collections.ConfigDict({"schedule": AUTO})
        if not isinstance(values, ml_collections.ConfigDict):
            raise ValueError(f"{path}: config.{name} must be a ConfigDict, got {values!r}")
        sections[name] = dict(values.items())
    return from_dict(sections, overrides)


def from_dict(
    sections: dict[str, dict], overrides: Sequence[str] = (), *, trust_foreign: bool = True
) -> Config:
    """Builds a Config from nested dictionaries, such as a run's config.json.

    Args:
      overrides: as for `load`.
      trust_foreign: whether to import code from outside the package, named in `model.family` or
        `layout.schedule`: a run's config.json may be from someone else.
    """
    changed = _split_overrides(overrides)
    texts = {f"{name}.{key}": text for name, key, text in changed}
    records, values = {name: section_record(name) for name in (*SECTIONS, *sections)}, {}
    for name, given in sections.items():
        if not isinstance(given, dict):
            raise ValueError(f"config.{name} = {given!r} is not a section of keys and values")
        values[name] = dict(_upgrade(given) if name == "model" else given)
    family = texts.get("model.family") or str(values.get("model", {}).get("family") or "")
    _check_trust("model.family", family, trust_foreign)
    if is_own_family(family):
        records["model"] = settings_record(family)
    for name, key, text in changed:
        annotation = setting_type(records[name], name, key, "--config.")
        values.setdefault(name, {})[key] = parse_value(text, annotation)
    _choose_length(values.get("run", {}), texts.keys())
    made = {name: _make_section(name, records[name], given) for name, given in values.items()}
    schedule = made["layout"].schedule_spec.name if "layout" in made else ""
    _check_trust("layout.schedule", schedule, trust_foreign)
    _import_schedule(schedule)
    return Config(**made)


def _make_section(name: str, record: type, given: Mapping[str, Any]) -> Any:
    types = {key: setting_type(record, name, key) for key in given}
    return record(**{key: convert_value(f"{name}.{key}", given[key], types[key]) for key in given})


def _choose_length(run: dict[str, Any], overrides: Collection[str]) -> None:
    """Removes the length in a file if an override gives the other one.

    Raises:
      ValueError: a file, or the overrides, give both.
    """
    if not all(run.get(name) for name in LENGTHS):
        return
    left_out = [name for name in LENGTHS if f"run.{name}" not in overrides]
    if len(left_out) != 1:
        both = " and ".join(f"run.{name} = {run[name]}" for name in LENGTHS)
        raise ValueError(f"{both} exclude each other; leave one of them out")
    del run[left_out[0]]


def _split_overrides(overrides: Sequence[str]) -> list[tuple[str, str, str]]:
    """The section, key and value's text of each override."""
    if isinstance(overrides, str):
        raise ValueError(f"overrides = {overrides!r} are one text; pass a list: [{overrides!r}]")
    if isinstance(overrides, dict) or not all(isinstance(one, str) for one in overrides):
        raise ValueError(
            f"overrides = {overrides!r} are not a list of texts, such as ['layout.fsdp=2']"
        )
    return [_split_override(override) for override in overrides]


def _split_override(override: str) -> tuple[str, str, str]:
    override = f"layout.schedule={AUTO}" if override == "layout=auto" else override
    key, separator, text = override.partition("=")
    if key.startswith("--config."):
        raise ValueError(f"{override!r}: leave out '--config.', which is for the command line")
    name, dot, key = key.partition(".")
    if name not in SECTIONS:
        near = nearest_settings(f"{name}{dot}{key}", leaves()) or nearest(name, SECTIONS)
        raise ValueError(f"unknown section config.{name}{suggestion(near, '--config.')}")
    if not separator or not dot:
        raise ValueError(f"--config.{override}: expected --config.section.key=value")
    return name, key, text


def _check_trust(setting: str, name: str, trust: bool) -> None:
    if is_foreign(name) and not trust:
        raise ValueError(
            f"the run's config.json names code from outside the package, {setting} = {name!r}; "
            "if you trust it, pass --trust_family to import it, or plan it with --config FILE"
        )


def read_sections(path: pathlib.Path) -> dict[str, dict]:
    """The sections of a run's config.json.

    Raises:
      ValueError: the file is not a run's config.
    """
    sections = load_json(path)
    if isinstance(sections, dict) and "model_type" in sections:
        raise ValueError(
            f"{path} is of a Hugging Face model; convert it to a run first: python -m "
            f"jaxscale.convert --from_hf {path.parent} --output RUN; then train from it: python -m "
            "jaxscale.train --config RUN/config.json --config.model.init_from=RUN --workdir DIR"
        )
    if not isinstance(sections, dict) or not all(isinstance(s, dict) for s in sections.values()):
        raise ValueError(f"{path} is not the config of a run, sections of keys and values")
    if is_before_text_begin(sections):
        sections["data"]["text_begin"] = "boundary"
    return sections


def is_before_text_begin(sections: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a saved config is older than `data.text_begin`, when prompts began as documents."""
    data = sections.get("data", {})
    return data.get("tokenizer", WITHOUT_FILE[0]) not in WITHOUT_FILE and "text_begin" not in data


def _upgrade(model: dict) -> dict:
    """The settings of an older run, whose rope_scaling was Llama 3's factor."""
    factor = model.get("rope_scaling")
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        return model
    scaling = {"rope_scaling": "none"} if factor == 1 else {"rope_scaling": "llama3"}
    return model | scaling | ({} if factor == 1 else {"rope_factor": factor})


def _import_schedule(name: str) -> None:
    """Imports a schedule from outside the package, to refuse it here if it cannot be found."""
    if is_foreign(name):
        try:
            find_schedule(name)
        except ValueError as error:
            raise ValueError(f"layout.{error}") from None


def to_dict(config: Config) -> dict[str, dict]:
    """The nested dictionaries of `from_dict`: every setting, except those of other model families
    and unread defaults."""
    sections = {name: read_settings(getattr(config, name)) for name in SECTIONS}
    for key in ("source", "validation"):
        sections["data"][key] = tuple(map(to_plain, sections["data"][key]))
    sections["optimizer"]["groups"] = tuple(map(changed_values, config.optimizer.groups))
    return sections


def read_settings(record: Any) -> dict[str, Any]:
    """The fields of a section's record and their values, without `unread` fields at their defaults;
    enough to make the record again."""
    changed = changed_values(record, record.defaults if isinstance(record, ModelSettings) else {})
    left_out = record.unread - changed.keys()
    names = (field.name for field in dataclasses.fields(record))
    return {name: getattr(record, name) for name in names if name not in left_out}


def _read(path: str) -> ml_collections.ConfigDict:
    name, colon, argument = path.partition(":")
    name, _, argument = f"{_existing(name)}{colon}{argument}".partition(":")
    with _blame(name):
        module = runpy.run_path(name)
    get_config, sizes = module.get("get_config"), module.get("SIZES")
    if sizes and argument:
        check_choice(f"--config {path}: size ", argument, sizes, equals="")
    if not callable(get_config):
        raise ValueError(f"{name} has no get_config(); a configuration file defines one")
    if argument and not inspect.signature(get_config).parameters:
        raise ValueError(f"--config {path}: get_config() of {name} takes no argument")
    with _blame(name):
        values = get_config(argument) if argument else get_config()
    if not isinstance(values, ml_collections.ConfigDict):
        raise ValueError(f"{name}: get_config() must return a ConfigDict, got {values!r}")
    return values


@functools.cache
def shipped_configs() -> dict[str, str]:
    """Name -> the argument of `load`: a file, or one of its `SIZES`, as "llama2.py:7b"."""
    found: dict[str, str] = {}
    for file in sorted(SHIPPED.glob("*.py")):
        sizes = runpy.run_path(str(file)).get("SIZES", ())
        found |= {f"{file.stem}_{size}": f"{file}:{size}" for size in sizes} or {
            file.stem: str(file)
        }
    return found


def _existing(name: str) -> str:
    """The file of this name, or the shipped configuration."""
    if pathlib.Path(name).is_file():
        return name
    shipped = shipped_configs()
    if name not in shipped and (file := pathlib.Path(name, "config.json")).is_file():
        read_sections(file)  # refuses a Hugging Face model's
        raise FileNotFoundError(f"--config {name} is a folder; give the file in it, {file}")
    if name not in shipped:
        found = {str(file) for file in pathlib.Path(name).parent.glob("*.py")}
        found |= {str(file) for file in pathlib.Path("configs").glob("*.py")} | shipped.keys()
        # configs/tiny.py exists in a checkout only; `tiny` is shipped with the package.
        stem = pathlib.PurePath(name).stem
        hint = "" if stem in shipped else did_you_mean(name, sorted(found), cutoff=0.5)
        hint = hint or did_you_mean(stem, sorted(shipped), cutoff=0.5)
        raise FileNotFoundError(
            f"--config {name}: there is no such file{hint or '.'} The shipped configurations are "
            f"{', '.join(shipped)}"
        )
    return shipped[name]


@contextlib.contextmanager
def _blame(name: str) -> Iterator[None]:
    """Adds the configuration file and line to any error that its code raises."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == name]
        where = f"{name}, line {lines[-1]}" if lines else name
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
