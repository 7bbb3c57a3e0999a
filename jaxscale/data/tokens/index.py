"""The index of a folder of prepared shards: its contents and its tokenizer."""

import dataclasses
import hashlib
import json
import os
import pathlib
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxscale.config.data_source import Source
from jaxscale.data.text.file_io import exists, read_file
from jaxscale.storage.object_store import is_remote
from jaxscale.storage.untrusted import is_file_name, parse_json

FORMAT = "jaxscale shards 1"
"""Raised when the same documents and tokenizer would give other shards."""

INDEX = "index.json"
NAMES = ("file", "loss_file", "tokenizer_file", "fingerprint")
"""Fields that are used as names of files, and must stay inside the folder."""

UNFINISHED = ".unfinished"
"""The subfolder of unfinished shards."""


@dataclass(frozen=True)
class Shard:
    """A .npy file of consecutive tokens of whole documents."""

    file: str
    num_tokens: int
    num_documents: int
    file_bytes: int
    digest: str  # of the file
    loss_file: str = ""  # if only some tokens carry loss: bytes, 1 if the next token does
    loss_bytes: int = 0
    loss_digest: str = ""

    @property
    def files(self) -> dict[str, int]:
        """The names of its files, with their bytes."""
        marks = {self.loss_file: self.loss_bytes} if self.loss_file else {}
        return {self.file: self.file_bytes} | marks


@dataclass(frozen=True)
class Index:
    """The description of a prepared folder with its shards and the arrays of `Corpus`."""

    tokenizer: str  # the name in the command or the configuration
    tokenizer_file: str  # in the same folder; empty for "bytes"
    tokenizer_fingerprint: str
    vocab_size: int
    boundary: int
    special: dict[str, int]
    dtype: str
    num_documents: int
    num_tokens: int
    num_bytes: int  # of UTF-8 text
    written_bytes: float  # bytes of the tokens by the tokenizer's table
    max_id: int
    num_left_out: int  # bad documents, allowed by skip_share
    shards: tuple[Shard, ...]
    key: str  # digest of the files and settings
    fingerprint: str  # of the content
    text_begin: str = ""  # list of the ids before prompts; "": empty, or of an older version

    def to_json(self) -> str:
        """The text of index.json."""
        values = {"format": FORMAT} | dataclasses.asdict(self)
        return json.dumps(values | {"digest": digest_values(values)}, indent=1) + "\n"


def content_fingerprint(
    tokenizer_fingerprint: str, offsets: str, hashes: str, shards: Sequence[Shard]
) -> str:
    """A hash of a folder's content, from the digests of its parts."""
    digests = [offsets, hashes, *(shard.digest for shard in shards)]
    digests += [shard.loss_digest for shard in shards if shard.loss_digest]
    return digest_values([FORMAT, tokenizer_fingerprint, offsets, hashes, digests])


def digest_values(values: object) -> str:
    """A hash of a JSON value."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=8).hexdigest()


def path_in(folder: str, name: str) -> str:
    """The path of a file in a local folder, or its URL."""
    return f"{folder.rstrip('/')}/{name}"


def find_prepared(source: Source) -> str | None:
    """The prepared folder of an entry of `data.source`; None for an entry of text.

    Raises:
      ValueError: `format` is "shards" and the folder is not prepared, or it is unfinished, shares
        its entry with other paths, or the entry has settings of text.
    """
    for path in map(os.path.expanduser, source.path):
        there = _is_prepared(path)
        folder, _, name = path.rpartition("/")
        if name.startswith("tokens-") and name.endswith(".npy") and _is_prepared(folder or "."):
            raise ValueError(
                f"{source.listed_in}: {path} is one of the shards of a prepared folder; name the "
                f"folder, {folder or '.'}"
            )
        if source.format == "shards" and not there:
            raise ValueError(
                f"{source.listed_in}: {path} has no prepared shards (no readable {INDEX} that "
                f"lists any); make them with python -m jaxscale.prepare --output {path}"
            )
        if there and len(source.path) > 1:
            raise ValueError(
                f"{source.listed_in}: {path} is one of {len(source.path)} paths of its entry; give "
                "a folder of prepared shards a separate entry"
            )
        if there:
            _refuse_unread(source)
            return path
    return None


def _refuse_unread(source: Source) -> None:
    """Raises if the entry of a prepared folder has settings of text."""
    form = source.format and "shards"
    plain = Source(source.path, form, weight=source.weight, name=source.name)
    for key, value in vars(source).items():
        if value != getattr(plain, key):
            raise ValueError(
                f"{source.listed_in}: {key} = {value!r} is a setting of text, and "
                f"{source.path[0]} has prepared shards; remove it, or prepare the text again "
                f"with --{key}"
            )


def read_index(folder: str) -> Index:
    """Reads the index of a prepared folder.

    Raises:
      ValueError: it cannot be read, or is of another version.
      AwayError: it cannot be read now.
    """
    path = path_in(folder, INDEX)
    values = _load(path)
    if values is None:
        raise ValueError(f"{path} is not an index of prepared shards")
    digest = values.pop("digest", None)  # older versions wrote none
    if digest is not None and digest != digest_values(values):
        raise ValueError(f"{path} is damaged: it changed since it was written; prepare again")
    if values.pop("format") != FORMAT:
        raise ValueError(f"{path} is of another version than {FORMAT!r}; prepare the text again")
    try:
        shards = tuple(_checked(Shard(**shard)) for shard in values.pop("shards"))
        return _checked(Index(shards=shards, **values))
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}; prepare the text again") from error


def _checked[Record: Shard | Index](record: Record) -> Record:
    """The record, after a check of the declared types of its values.

    Raises:
      ValueError: names the first value of another type.
    """
    for field in dataclasses.fields(record):
        value, kind = getattr(record, field.name), typing.get_origin(field.type) or field.type
        if kind is float:
            kind = int | float
        if not isinstance(value, typing.cast(type, kind)) or isinstance(value, bool):
            raise ValueError(f"{field.name} is {value!r}")
        if field.name in NAMES and value and not is_file_name(value):
            raise ValueError(f"{field.name} = {value!r} is not the name of a file in the folder")
    if isinstance(record, Index) and record.dtype not in ("uint16", "uint32"):
        raise ValueError(f"dtype is {record.dtype!r}")
    return record


def _is_prepared(path: str) -> bool:
    place = path_in(path, INDEX)
    unfinished = pathlib.Path(path) / UNFINISHED
    try:
        there = exists(place)
        is_unfinished = not there and not is_remote(path) and unfinished.is_dir()
    except PermissionError:  # reported when its files are listed
        return False
    if is_unfinished:
        raise ValueError(
            f"{path} has unfinished shards; run the command that prepares them again, and it "
            "resumes where it stopped"
        )
    return there and _load(place) is not None


def _load(path: str) -> dict[str, Any] | None:
    """The values of an index; None for any other file of that name."""
    try:
        values = parse_json(read_file(path))
    except ValueError as error:
        raise ValueError(f"{path} is not a complete index of shards: {error}") from error
    ours = isinstance(values, dict) and str(values.get("format")).startswith("jaxscale shards")
    return values if ours else None
