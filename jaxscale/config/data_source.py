"""Entries of `data.source`: files, the unit that is a document, tolerated errors.

Nothing here imports JAX or reads a file: a mistyped key must be refused in a fraction of a second.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxscale.choices import check_choice, did_you_mean
from jaxscale.formatting import changed_fields, changed_values

RECORD_FORMATS = ("jsonl", "json", "parquet", "arrow", "arrayrecord", "fasta")
FORMATS = ("text", *RECORD_FORMATS, "shards")
TEXT = "text"
"""The default field of a record that is read as a document."""
BOUNDARIES = ("file", "line", "paragraph", "record")
LONG_DOCUMENTS = ("split", "refuse")

NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""Names of validation sets, which become part of the names of metrics."""

Weight = float | tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Source:
    """Files that are read with the same settings, and their weight in a mixture.

    `path` lists files, folders, globs or object-store URLs, or is one prepared folder. With
    `boundary` None a document is a whole file of text, a sequence of FASTA, or a record of other
    formats. With `weight` None the weight is the amount of text; in a list of (step, weight) each
    weight applies from its step. Errors name only the key; the caller adds the setting.
    """

    path: tuple[str, ...]
    format: str | None = None  # None: by the suffix
    field: str = TEXT  # of a record; "a.b" is b inside a
    prompt: str = ""  # fields of a record: loss is on the response only
    response: str = ""
    apart: bool = False  # tokenises prompt and response separately, for an encoder-decoder
    messages: str = ""  # field of a conversation: loss is on the assistant's messages
    boundary: str | None = None
    max_document_bytes: int = 0  # of UTF-8; 0 means no limit
    long_documents: str = "split"  # documents beyond the limit; or "refuse"
    skip_share: float = 0.0  # largest share of bad documents, which are left out
    weight: Weight | None = None
    name: str = ""  # of a validation set

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        if not self.path or "" in self.path:
            raise ValueError(
                f"path = {self.path} is empty or has an empty path; give files, folders or globs"
            )
        self._check_boundary()
        check_choice("long_documents", self.long_documents, LONG_DOCUMENTS)
        if self.max_document_bytes < 0 or 0 < self.max_document_bytes < 4:
            raise ValueError(
                f"max_document_bytes = {self.max_document_bytes} is less than some characters "
                "take; at least 4, or 0 for no limit"
            )
        if not 0 <= self.skip_share < 1:
            raise ValueError(f"skip_share = {self.skip_share} must be at least 0 and below 1")
        if self.apart and not self.response:
            raise ValueError("apart = True needs the fields of prompt and response")
        if self.marks_loss:
            self._check_dialogue()
        for field in self.fields:
            if "" in field.split("."):
                raise ValueError(f"field {field!r} must be a name, or names with .")
        if self.weight is not None:
            _check_weight(self.weight)

    def _check_boundary(self) -> None:
        if self.format is not None:
            check_choice("format", self.format, FORMATS)
        if self.boundary is not None:
            check_choice("boundary", self.boundary, BOUNDARIES)
        if self.format in RECORD_FORMATS and self.boundary not in (None, "record"):
            raise ValueError(
                f"boundary = {self.boundary!r} is for text; with format = {self.format!r} a "
                "document is a record"
            )
        if self.format == "text" and self.boundary == "record":
            raise ValueError(
                "boundary = 'record' is not for text; give 'file', 'line' or 'paragraph'"
            )

    @property
    def listed_in(self) -> str:
        """The setting of this entry, for errors; only validation sets have names."""
        return f"data.validation {self.name!r}" if self.name else "data.source"

    @property
    def marks_loss(self) -> bool:
        """Whether only part of a document carries loss."""
        return bool(self.prompt or self.response or self.messages)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a record that are read."""
        if self.messages:
            return (self.messages,)
        return (self.prompt, self.response) if self.marks_loss else (self.field,)

    @property
    def may_have(self) -> tuple[str, ...]:
        """The optional fields of a record: the tools of a conversation."""
        if not self.messages:
            return ()
        inside, dot, _ = self.messages.rpartition(".")
        return (f"{inside}{dot}tools",)

    def _check_dialogue(self) -> None:
        """Refuses settings of plain text together with `prompt` and `response`, or `messages`."""
        named = f"prompt = {self.prompt!r}, response = {self.response!r}"
        if self.messages and (self.prompt or self.response):
            raise ValueError(f"messages = {self.messages!r} excludes {named}; give one of them")
        if not self.messages and not (self.prompt and self.response):
            raise ValueError(f"{named}; give the fields of both")
        if self.field != TEXT:
            raise ValueError(
                f"field = {self.field!r} is for plain text; leave it out of an entry "
                "with prompt and response, or messages"
            )
        if self.format in ("text", "fasta", "shards"):
            raise ValueError(
                f"format = {self.format!r} has no fields for prompt and response, or "
                "messages; it can be jsonl, json, parquet, arrow or arrayrecord"
            )
        if self.max_document_bytes and self.long_documents == "split":
            raise ValueError(
                f"max_document_bytes = {self.max_document_bytes} would split a "
                "response from its prompt; set long_documents = 'refuse', or leave it out"
            )


def to_sources(value: Sequence[object]) -> tuple[Source, ...]:
    """Reads entries of a configuration: paths, mappings with a `path`, or records.

    Raises:
      ValueError: an unknown key (the nearest is named) or a value that is not allowed.
    """
    if not value:
        raise ValueError(f"data.source = {value} is empty; give files, folders or globs")
    return tuple(_to_source(f"data.source[{i}]", entry) for i, entry in enumerate(value))


def to_validation(value: Sequence[object]) -> tuple[Source, ...]:
    """Reads entries of `data.validation`, each with a unique name and no weight.

    Raises:
      ValueError: as `to_sources`, or a name is missing, repeated, or not one word.
    """
    sources = tuple(_to_source(f"data.validation[{i}]", entry) for i, entry in enumerate(value))
    names = [source.name for source in sources]
    for i, source in enumerate(sources):
        key = f"data.validation[{i}]"
        if not NAME.fullmatch(source.name):
            raise ValueError(
                f"{key}['name'] = {source.name!r} must be letters, digits, _, - and ., such as "
                "{'name': 'code', 'path': 'code/**/*.py'}"
            )
        if names.index(source.name) < i:
            raise ValueError(f"{key}['name'] = {source.name!r} is the name of an earlier entry")
        if source.weight is not None:
            raise ValueError(
                f"{key}['weight'] is for data.source; leave it out of a validation set"
            )
    return sources


def setting(key: str) -> str:
    """The name of an entry's key in an error, for runs and for `prepare`.

    >>> setting("field")
    "'field' in its entry of data.source or data.validation (--field of prepare)"
    """
    return f"{key!r} in its entry of data.source or data.validation (--{key} of prepare)"


def to_plain(source: Source) -> str | dict[str, Any]:
    """The shortest form that `to_sources` reads: a path, or the keys without their defaults."""
    changed = changed_values(source)
    path = source.path[0] if len(source.path) == 1 else list(source.path)
    if isinstance(path, str) and changed.keys() == {"path"}:
        return path
    return changed | {"path": path}


def _to_source(name: str, entry: object) -> Source:
    if isinstance(entry, Source):
        return entry
    if isinstance(entry, str):
        entry = {"path": entry}
    if not isinstance(entry, Mapping):
        raise ValueError(
            f"{name} = {entry!r} is of type {type(entry).__name__}; expected a path, or a mapping "
            "such as {'path': 'a.jsonl', 'field': 'text'}"
        )
    known = [field.name for field in dataclasses.fields(Source)]
    for key in entry:
        if key not in known:
            raise ValueError(
                f"{name} has an unknown key {key!r}; it can be {', '.join(known)}"
                f"{did_you_mean(key, known)}"
            )
    if "path" not in entry:
        raise ValueError(f"{name} = {dict(entry)} has no 'path'; add it")
    values = {str(key): _convert(f"{name}[{key!r}]", key, entry[key]) for key in entry}
    try:
        return Source(**values)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _convert(name: str, key: str, value: Any) -> Any:
    """The value of a key, converted to the record's type without loss."""
    if value is None and key in ("weight", "format", "boundary"):
        return None
    convert, expected = _CONVERSIONS.get(key, (_text, "text"))
    converted = convert(value)
    if converted is None:
        raise ValueError(
            f"{name} = {value!r} is of type {type(value).__name__}; expected {expected}"
        )
    return converted


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _paths(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return (value,)
    listed = isinstance(value, list | tuple) and all(isinstance(path, str) for path in value)
    return tuple(value) if listed else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def _weights(value: Any) -> Weight | None:
    listed = isinstance(value, list | tuple) and all(_is_pair(pair) for pair in value)
    return tuple((int(step), float(weight)) for step, weight in value) if listed else _number(value)


_CONVERSIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "path": (_paths, "a path or a list of paths"),
    "weight": (_weights, "a number, or a list of [step, weight]"),
    "apart": (lambda value: value if isinstance(value, bool) else None, "True or False"),
    "max_document_bytes": (
        lambda value: int(value) if _number(value) is not None and _is_whole(value) else None,
        "a whole number",
    ),
    "skip_share": (_number, "a number"),
}
"""Key of a source -> conversion to the record's type (None for other types), and the type in
errors."""


def _is_pair(pair: object) -> bool:
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(isinstance(x, int | float) and not isinstance(x, bool) for x in pair)
        and _is_whole(pair[0])
    )


def _is_whole(value: float) -> bool:
    return isinstance(value, int) or value.is_integer()


def _check_weight(weight: Weight) -> None:
    pairs = ((0, weight),) if isinstance(weight, int | float) else weight
    steps = [step for step, _ in pairs]
    if not pairs or steps[0] != 0 or steps != sorted(set(steps)):
        raise ValueError(
            f"weight = {weight} must begin at step 0, with increasing steps, such as "
            "[[0, 1.0], [1000, 0.5]]"
        )
    if not all(math.isfinite(weight) and weight >= 0 for _, weight in pairs):
        raise ValueError(f"weight = {weight} must be finite and at least 0")
