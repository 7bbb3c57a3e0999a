"""The records that define a run, and how a configuration file is read into them.

Nothing here imports JAX: a mistyped key must be refused in a fraction of a second.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import json
import math
import operator
import pathlib
import runpy
import traceback
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_collections

from jaxscale.choices import (
    check_at_least,
    check_choice,
    check_kind,
    did_you_mean,
    nearest,
    nearest_settings,
    settings_called,
)
from jaxscale.data_source import Source, to_plain, to_sources, to_validation
from jaxscale.layout import AUTO, Layout
from jaxscale.model_config import (
    ModelConfig,
    is_own_family,
    settings_record,
)
from jaxscale.model_config.rope_scaling import BY_LENGTH
from jaxscale.model_families.shipped import find_family
from jaxscale.optimizer_config import OptimizerConfig, ParamGroup, to_param_groups
from jaxscale.pipeline_schedules.shipped import find_schedule, is_foreign

SHIPPED = pathlib.Path(__file__).parent / "configs"
"""The configurations that the package comes with: those of the repository's configs/."""


def check_seed(name: str, seed: int) -> None:
    """Raises ValueError for a seed that the generators of JAX and Grain cannot take."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"{name} = {seed} must be at least 0 and below 2**32")


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how it becomes batches.

    `source` lists entries, each a path (file, folder, glob, prepared folder) or a mapping with a
    `path` and the other keys of `Source`; `{stdlib}` stands for the source of Python's standard
    library. `tokenizer` is "bytes", a path to a Hugging Face tokenizer.json, or "bpe:4096", which
    trains a byte-pair tokenizer of that many tokens on the source before the first step.
    `objective` selects what is predicted, and from which tokens: see `data/objectives.py`.
    """

    source: tuple[Source, ...] = (Source(("{stdlib}/**/*.py",)),)
    tokenizer: str = "bytes"
    global_batch_size: int = 8  # sequences a step
    seq_len: int = 128  # of an encoder, where there is one
    target_len: int = 0  # tokens of its decoder; 0 where there is no encoder
    heldout: float = 0.05  # share of the documents, for evaluation only
    seed: int = 0
    objective: str = "causal"
    workers: int = 0  # processes that prefetch batches; 0 prefetches in a thread
    validation: tuple[Source, ...] = ()  # sets with a name, evaluated as a whole

    def __post_init__(self) -> None:
        check_choice("data.objective", self.objective, OBJECTIVES)
        check_at_least("data", self, global_batch_size=1, seq_len=2, target_len=0, workers=0)
        if self.target_len and self.objective not in PAIRED_OBJECTIVES:
            raise ValueError(
                f"data.target_len = {self.target_len} is for an encoder's decoder, which "
                f"data.objective = {self.objective!r} does not train; choose "
                f"{' or '.join(PAIRED_OBJECTIVES)}, or set data.target_len = 0"
            )
        check_seed("data.seed", self.seed)
        for name, read in (("source", to_sources), ("validation", to_validation)):
            entries = read(getattr(self, name))
            if self.target_len:
                entries = tuple(
                    self._for_encoder(f"data.{name}[{i}]", entry) for i, entry in enumerate(entries)
                )
            object.__setattr__(self, name, entries)
        for i, source in enumerate(self.source):
            if source.name:
                raise ValueError(
                    f"data.source[{i}]['name'] = {source.name!r} is for entries of "
                    "data.validation; leave it out"
                )
        if not 0 <= self.heldout < 1:
            raise ValueError(f"data.heldout = {self.heldout} must be at least 0 and below 1")

    def _for_encoder(self, name: str, source: Source) -> Source:
        """The entry of this name with what an encoder and its decoder need of pairs.

        Raises:
          ValueError: they do not train on it.
        """
        if source.messages:
            raise ValueError(
                f"{name}: messages = {source.messages!r} are conversations, and "
                f"data.target_len = {self.target_len} is for an encoder's decoder, which learns "
                "from texts, or from prompts with responses; give the fields prompt and response"
            )
        if source.response and self.objective != "prefix":
            raise ValueError(
                f"data.objective = {self.objective!r} chooses what a decoder writes, and so does "
                f"{name}: response = {source.response!r}; set data.objective = 'prefix'"
            )
        return dataclasses.replace(source, apart=bool(source.response))

    @property
    def tokens_per_step(self) -> int:
        """Positions of a global batch, padding included."""
        return self.global_batch_size * (self.seq_len + self.target_len)

    @property
    def output_len(self) -> int:
        """Tokens of the sequence that has targets: the decoder's."""
        return self.target_len or self.seq_len

    @property
    def one_document(self) -> bool:
        """Whether every row of a batch is one document, and padding after it."""
        return self.objective == "causal_across_documents"


OBJECTIVES = (
    "causal",
    "causal_across_documents",
    "prefix",
    "span_corruption",
    "ul2",
    "masked",
)
PAIRED_OBJECTIVES = ("prefix", "span_corruption", "ul2")
"""Those that also train an encoder with a decoder."""


MOST_STEPS = 2**31 - 1
"""The counts of steps in the state are int32."""


@dataclass(frozen=True)
class RunConfig:
    """How long a run is, and what it writes when. A period of zero is never, but the last step is
    evaluated and saved in any case."""

    steps: int = 100
    seed: int = 0
    eval_every: int = 0
    eval_batches: int = 8  # of the held-out text; validation sets are read as a whole
    checkpoint_every: int = 0  # 0 saves the last step only
    keep_last: int = 3
    keep_every: int = 0  # also keep each checkpoint whose step is a multiple of this
    metrics_by_layer: bool = False  # also those that are means over layers, such as experts' loads
    deterministic: bool = False  # bitwise reproducible, also on GPUs, at some cost of speed
    # A step whose loss or gradient norm is not finite updates nothing; after so many in a row the
    # run returns to its newest checkpoint, and passes over their examples. 0 stops at the first.
    skip_bad_steps: int = 0
    # Also those whose loss or gradient norm is this many robust standard deviations above the
    # median of the steps before; 0 is never.
    spike_score: float = 0.0
    max_hours: float = 0.0  # stop with a checkpoint after this long; 0 is never
    hang_seconds: float = 0.0  # end when nothing goes on for this long; 0: learnt from the run

    def __post_init__(self) -> None:
        check_at_least(
            "run",
            self,
            steps=1,
            eval_every=0,
            eval_batches=1,
            checkpoint_every=0,
            keep_last=1,
            keep_every=0,
            skip_bad_steps=0,
            max_hours=0,
            hang_seconds=0,
        )
        check_seed("run.seed", self.seed)
        if self.steps > MOST_STEPS:
            raise ValueError(f"run.steps = {self.steps} is too large; at most {MOST_STEPS}")
        if not 0 <= self.spike_score < math.inf:
            raise ValueError(f"run.spike_score = {self.spike_score} must be at least 0, such as 8")
        if self.spike_score and not self.skip_bad_steps:
            raise ValueError(
                f"run.spike_score = {self.spike_score} is for run.skip_bad_steps above 0, which "
                "is 0; set it, such as 5, or run.spike_score = 0"
            )
        if self.keep_every and (
            not self.checkpoint_every or self.keep_every % self.checkpoint_every
        ):
            period = self.checkpoint_every
            change = (
                f"run.keep_every = {-(-self.keep_every // period) * period}"
                if period
                else f"run.checkpoint_every = {self.keep_every}"
            )
            raise ValueError(
                f"run.keep_every = {self.keep_every} is not a multiple of run.checkpoint_every = "
                f"{period}, so no such checkpoint is written; set {change}"
            )


CONFIG_ADVICE = "pass what jaxscale.load(FILE) returns"


@dataclass(frozen=True)
class Config:
    """Everything that defines a run."""

    # Of a shipped family; or the record of a model of one's own, which extends `ModelSettings`.
    model: Any = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    layout: Layout = field(default_factory=Layout)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if self.optimizer.warmup_steps > self.schedule_steps:
            given = self.optimizer.schedule_steps is not None
            name = "optimizer.schedule_steps" if given else "run.steps"
            raise ValueError(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps} is more than "
                f"{name} = {self.schedule_steps}; lower optimizer.warmup_steps, or raise {name}"
            )
        if isinstance(self.model, ModelConfig):
            self._take_length(self.model)
            self._check_family(self.model)
        if self.optimizer.keep_state and not getattr(self.model, "init_from", ""):
            raise ValueError(
                "optimizer.keep_state = True keeps the optimizer's state of the run in "
                "model.init_from, which is empty; name a run there, or set "
                "optimizer.keep_state = False"
            )

    def _take_length(self, model: ModelConfig) -> None:
        if model.rope_scaling not in BY_LENGTH:
            return
        if not model.rope_length:
            model = dataclasses.replace(model, rope_length=self.data.seq_len)
            object.__setattr__(self, "model", model)
        if model.rope_length < self.data.seq_len:
            raise ValueError(
                f"model.rope_length = {model.rope_length} is less than data.seq_len = "
                f"{self.data.seq_len}; set model.rope_length = 0, which follows it"
            )

    def _check_family(self, model: ModelConfig) -> None:
        expert = self.layout.expert
        if expert != 1 and not model.num_experts:
            raise ValueError(
                f"layout.expert = {expert}, but model.family = {model.family!r} has no experts "
                "here; set layout.expert = 1"
            )
        if model.positions == "learned" and self.data.seq_len > model.max_seq_len:
            raise ValueError(
                f"data.seq_len = {self.data.seq_len} is more than model.max_seq_len = "
                f"{model.max_seq_len}, the learned positions there are; lower data.seq_len or "
                "raise model.max_seq_len"
            )
        if not model.gated and "mlp_gate" in self.layout.remat:
            raise ValueError(
                f"layout.remat = {self.layout.remat!r} names mlp_gate, and the MLP of "
                f"model.family = {model.family!r} has no gate; leave it out"
            )
        if (self.data.objective == "masked") == model.causal:
            needs, is_now, others = (
                (
                    "bidirectional",
                    "causal",
                    "causal, causal_across_documents, prefix, span_corruption or ul2",
                )
                if model.causal
                else ("causal", "not causal", "masked")
            )
            setting = "causal" in find_family(model.family).settings
            raise ValueError(
                f"data.objective = {self.data.objective!r} needs {needs} attention, and "
                f"model.family = {model.family!r} is {is_now} here; choose {others}"
                + (f", or set model.causal = {not model.causal}" if setting else "")
            )
        if self.data.target_len and not model.num_encoder_layers:
            raise ValueError(
                f"data.target_len = {self.data.target_len} is for an encoder's decoder, which "
                f"model.family = {model.family!r} does not have; set data.target_len = 0"
            )

    @property
    def schedule_steps(self) -> int:
        """Length of the learning rate's schedule, in steps."""
        return self.optimizer.schedule_steps or self.run.steps


SECTIONS = tuple(section.name for section in dataclasses.fields(Config))


def load(path: str | pathlib.Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration file, applies overrides, and checks everything once.

    Args:
      path: a Python file with `get_config(arg="")`, or the name of a shipped one ("quickstart");
        "FILE.py:ARG" passes ARG to it. Keys that the file leaves out keep the defaults of this
        module. Its section "layout" may be "auto". Or the config.json of a run.
      overrides: "section.key=value" each, as after `--config.` on the command line.

    Raises:
      ValueError: an unknown key (the nearest is named), a value of the wrong type, or values
        that are incompatible.
      FileNotFoundError: no such file.
    """
    advice = "pass a file, or the name of a shipped configuration"
    check_kind("path", path, (str, pathlib.PurePath), advice)
    path = str(path)
    if path.endswith(".json"):
        return from_dict(read_sections(_existing(path)), overrides)
    sections: dict[str, dict] = {section.name: {} for section in dataclasses.fields(Config)}
    for name, values in _read(path).items():
        _section(name)
        if (name, values) == ("layout", "auto"):
            values = ml_collections.ConfigDict({"schedule": AUTO})
        if not isinstance(values, ml_collections.ConfigDict):
            raise ValueError(f"{path}: config.{name} must be a ConfigDict, got {values!r}")
        sections[name] = dict(values.items())
    return from_dict(sections, overrides)


def from_dict(
    sections: dict[str, dict], overrides: Sequence[str] = (), *, trust_foreign: bool = True
) -> Config:
    """Builds a Config from nested dictionaries, such as a run's config.json; `load` has the
    overrides.

    Args:
      trust_foreign: whether to import the code from outside the package that `model.family` or
        `layout.schedule` names: somebody else may have written a run's config.json.
    """
    if isinstance(overrides, str):
        raise ValueError(f"overrides are a list, such as [{overrides!r}], and not one text")
    if isinstance(overrides, dict) or not all(isinstance(one, str) for one in overrides):
        raise ValueError(
            f"overrides = {overrides!r} are not a list of texts, such as ['layout.fsdp=2']"
        )
    changed = [_split_override(override) for override in overrides]
    texts = {f"{name}.{key}": text for name, key, text in changed}
    given = sections.get("model", {})
    family = texts.get("model.family") or str(
        (isinstance(given, dict) and given.get("family")) or ""
    )
    _check_trust("model.family", family, trust_foreign)
    model = settings_record(family) if is_own_family(family) else ModelConfig
    values = {name: dict(given) for name, given in sections.items() if isinstance(given, dict)}
    for name, given in sections.items():
        _section(name)
        if not isinstance(given, dict):
            raise ValueError(f"config.{name} = {given!r} is not a section of keys and values")
    if "model" in values:
        values["model"] = _upgrade(values["model"])
    for name, key, text in changed:
        record = model if name == "model" else _section(name)
        annotation = _field(record, name, key, "--config.")
        values.setdefault(name, {})[key] = _parse(text, annotation)
    built = {}
    for name, given in values.items():
        record: Any = model if name == "model" else _section(name)
        built[name] = record(
            **{
                key: _convert(f"{name}.{key}", value, _field(record, name, key))
                for key, value in given.items()
            }
        )
    config = Config(**built)
    _check_trust("layout.schedule", config.layout.schedule_spec.name, trust_foreign)
    _import_schedule(config)
    return config


def _split_override(override: str) -> tuple[str, str, str]:
    """The section, the key, and the text of the value."""
    override = f"layout.schedule={AUTO}" if override == "layout=auto" else override
    key, separator, text = override.partition("=")
    if key.startswith("--config."):
        raise ValueError(f"{override!r}: leave out '--config.', which belongs to the command line")
    name, dot, key = key.partition(".")
    if name not in SECTIONS:
        near = nearest_settings(f"{name}{dot}{key}", leaves()) or nearest(name, SECTIONS)
        raise ValueError(f"unknown section config.{name}{_hint(near, '--config.')}")
    if not separator or not dot:
        raise ValueError(f"--config.{override}: expected --config.section.key=value")
    return name, key, text


def _check_trust(setting: str, name: str, trust: bool) -> None:
    if is_foreign(name) and not trust:
        raise ValueError(
            f"the run's config.json names code from outside the package, {setting} = {name!r}; "
            "where you trust it, pass --trust_family to import it"
        )


def read_sections(path: pathlib.Path) -> dict[str, dict]:
    """The sections of a run's config.json.

    Raises:
      ValueError: the file is not one.
    """
    try:
        sections = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if isinstance(sections, dict) and "model_type" in sections:
        raise ValueError(
            f"{path} is that of a Hugging Face model; make a run of it first: python -m "
            f"jaxscale.convert --from_hf {path.parent} --output RUN"
        )
    if not isinstance(sections, dict) or not all(isinstance(s, dict) for s in sections.values()):
        raise ValueError(f"{path} is not the config of a run: sections of keys and values")
    return sections


def _upgrade(model: dict) -> dict:
    """The settings of a run that was written when rope_scaling was Llama 3's factor."""
    factor = model.get("rope_scaling")
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        return model
    scaling = {"rope_scaling": "none"} if factor == 1 else {"rope_scaling": "llama3"}
    return model | scaling | ({} if factor == 1 else {"rope_factor": factor})


def _import_schedule(config: Config) -> None:
    """Imports a schedule from outside the package, so that one that cannot be found is refused
    here."""
    if is_foreign(name := config.layout.schedule_spec.name):
        try:
            find_schedule(name)
        except ValueError as error:
            raise ValueError(f"layout.{error}") from None


def to_dict(config: Config) -> dict[str, dict]:
    """The nested dictionaries of `from_dict`: every leaf, but those of other model families,
    optimizers and objectives, and defaults that nothing reads, as of mesh axes of size 1."""
    sections = dataclasses.asdict(config)
    sections["model"], sections["optimizer"] = config.model.settings, config.optimizer.settings
    sections["layout"] = config.layout.leaves
    for key in ("source", "validation"):
        sections["data"][key] = tuple(map(to_plain, getattr(config.data, key)))
    if config.data.objective not in PAIRED_OBJECTIVES:
        del sections["data"]["target_len"]  # always 0
    if not getattr(config.model, "init_from", ""):
        del sections["optimizer"]["keep_state"]  # always False
    if not config.run.skip_bad_steps:
        del sections["run"]["spike_score"]  # always 0
    return sections


def _read(path: str) -> ml_collections.ConfigDict:
    name, _, argument = path.partition(":")
    name = str(_existing(name))
    with _blame(name):
        get_config = runpy.run_path(name).get("get_config")
    if not callable(get_config):
        raise ValueError(f"{name} has no get_config(); a configuration file defines one")
    if argument and not inspect.signature(get_config).parameters:
        raise ValueError(f"--config {path}: get_config() of {name} takes no argument")
    with _blame(name):
        values = get_config(argument) if argument else get_config()
    if not isinstance(values, ml_collections.ConfigDict):
        raise ValueError(f"{name}: get_config() must return a ConfigDict, got {values!r}")
    return values


def _existing(name: str) -> pathlib.Path:
    """The file of this name, or the shipped configuration."""
    if pathlib.Path(name).is_file():
        return pathlib.Path(name)
    shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.py"))}
    if name not in shipped and (file := pathlib.Path(name, "config.json")).is_file():
        raise FileNotFoundError(f"--config {name} is a folder; name the file in it, {file}")
    if name not in shipped:
        found = {str(file) for file in pathlib.Path(name).parent.glob("*.py")}
        found |= {f"configs/{stem}.py" for stem in shipped} | shipped.keys()
        hint = did_you_mean(name, sorted(found), cutoff=0.5)
        raise FileNotFoundError(
            f"--config {name}: there is no such file{hint or '.'} The shipped configurations are "
            f"{', '.join(shipped)}"
        )
    return shipped[name]


@contextlib.contextmanager
def _blame(name: str) -> Iterator[None]:
    """Names the configuration file and line in any error that its code raises."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == name]
        where = f"{name}, line {lines[-1]}" if lines else name
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error


def _section(name: str) -> type:
    records: dict[str, typing.Any] = {
        section.name: section.type for section in dataclasses.fields(Config)
    }
    records["model"] = ModelConfig
    if name not in records:
        near = settings_called(name, leaves()) or nearest(name, records)
        raise ValueError(f"unknown section config.{name}{_hint(near, 'config.')}")
    return typing.cast(type, records[name])


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


def _field(record: type, section: str, key: str, prefix: str = "config.") -> typing.Any:
    """The type of a setting; `prefix` goes before the one that an unknown key may mean."""
    found = {leaf.name: leaf.type for leaf in dataclasses.fields(record)}
    if key in found:
        # The module of a model of one's own may postpone its annotations: they are text.
        return typing.get_type_hints(record)[key] if isinstance(found[key], str) else found[key]
    known = leaves(record) if section == "model" else leaves()
    hint = _hint(nearest_settings(f"{section}.{key}", known), prefix)
    raise ValueError(f"unknown key config.{section}.{key}{hint}")


def _hint(near: Sequence[str], prefix: str) -> str:
    return f"; did you mean {' or '.join(prefix + one for one in near)}?" if near else ""


def _parse(text: str, annotation: typing.Any) -> object:
    """Reads a command-line value; a tuple of strings may be written as a,b."""
    if annotation is str:
        return text
    if (
        typing.get_args(annotation)[:1] in ((int,), (float,))
        and typing.get_origin(annotation) is tuple
    ):
        text = text if text.startswith(("(", "[")) else f"({text},)"
    elif typing.get_origin(annotation) is tuple and not text.startswith(("(", "[", "{'", '{"')):
        return tuple(text.split(","))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    if text.startswith(("{", "[")):  # JSON, with true, false or null
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    return text


def _convert(name: str, value: object, annotation: typing.Any) -> object:
    """The value in the annotated type; only lossless conversions."""
    inner = typing.get_args(annotation)
    if types.NoneType in inner:
        if value is None:
            return None
        annotation = functools.reduce(
            operator.or_, (one for one in inner if one is not types.NoneType)
        )
    origin = typing.get_origin(annotation) or annotation
    if annotation == tuple[Source, ...]:
        if isinstance(value, dict):
            value = (value,)
        if isinstance(value, list | tuple):
            key = name.partition(".")[2]
            return to_validation(value) if key == "validation" else to_sources(value)
    elif annotation == tuple[ParamGroup, ...]:
        if isinstance(value, dict):
            value = (value,)
        if isinstance(value, list | tuple):
            return to_param_groups(value)
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return _convert_each(name, tuple(value), inner)
    elif origin is typing.Literal:
        if value in inner:
            return value
    elif annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif annotation is float and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"config.{name} = {value} is not a finite number")
    elif annotation is int and isinstance(value, float) and value.is_integer():
        return int(value)
    elif isinstance(value, annotation) and (annotation is bool or not isinstance(value, bool)):
        return value
    expected: dict[typing.Any, str] = {
        int: "a whole number",
        float: "a number",
        bool: "True or False",
        str: "text",
        tuple: "a tuple",
        tuple[float, ...]: "a list of numbers",
        tuple[ParamGroup, ...]: "a list of mappings with a 'params'",
        tuple[Source, ...]: "a list of paths, or of mappings with a 'path'",
    }
    raise ValueError(
        f"config.{name} = {value!r} is of type {type(value).__name__}; expected "
        f"{expected.get(annotation, annotation)}"
    )


def _convert_each(name: str, values: tuple, inner: tuple) -> tuple:
    """The members of a tuple: of one type each, of any number of one, or, where the record does not
    say, as they are, with tuples for JSON's lists."""
    if not inner:
        return tuple(_convert(name, one, tuple) if isinstance(one, list) else one for one in values)
    kinds = inner[:1] * len(values) if inner[1:] == (...,) else inner
    if len(kinds) != len(values):
        raise ValueError(
            f"config.{name} = {values} has {len(values)} members, and not {len(kinds)}"
        )
    return tuple(_convert(name, one, kind) for one, kind in zip(values, kinds))
