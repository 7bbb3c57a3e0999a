"""Untrusted input: JSON and file names from files of unknown origin.

Every reader of such JSON uses these functions, so that a hostile file is a ValueError of one line
and not a RecursionError, now or when the value is printed, compared or written again.
"""

import json
import pathlib
from typing import Any

MAX_DEPTH = 128  # nesting of lists and objects, as in the parser of safetensors and tokenizers
MAX_BYTES = 100_000_000  # of a file, as of a header in safetensors


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
      ValueError: it is not JSON (a `json.JSONDecodeError` has the position), is not UTF-8, or is
        nested more than `MAX_DEPTH` deep.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    if isinstance(text, str):
        begins = text.count("[") + text.count("{")
    else:
        begins = text.count(b"[") + text.count(b"{")
    if begins > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise _too_deep()
    return value


def load_json(path: pathlib.Path) -> Any:
    """The value of a JSON file.

    Raises:
      OSError: it cannot be read.
      ValueError: as `parse_json`, or it has more than `MAX_BYTES`; names the file.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} has {size:,} bytes; at most {MAX_BYTES:,} are read as JSON")
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def is_file_name(name: Any) -> bool:
    """Whether a value is the name of a file inside a folder, not a path out of it."""
    return (
        isinstance(name, str) and not {"/", "\\", "\0", ":"} & set(name) and name.strip(".") != ""
    )


def safe_name(name: str) -> str:
    """The name of an object, checked to be a path inside a folder.

    Raises:
      ValueError: it leads out of the folder.
    """
    parts = name.split("/")
    if {"", ".", ".."} & set(parts) or {"\\", "\0"} & set(name):
        raise ValueError(f"{name!r} is not the name of a file in a run's folder")
    return name


def _depth(value: Any) -> int:
    """The nesting depth of lists and objects, computed without recursion."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [x for one in level for x in (one.values() if isinstance(one, dict) else one)]
    return depth


def _too_deep() -> ValueError:
    return ValueError(f"nested more than {MAX_DEPTH} deep")
