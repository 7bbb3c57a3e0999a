"""Untrusted input: JSON and file names from files that somebody else wrote.

Every reader of such JSON uses these functions, so that a hostile file is a ValueError of one line
and not a RecursionError, now or when the value is printed, compared or written again.
"""

import json
import pathlib
from typing import Any

MAX_DEPTH = (
    128  # of lists and objects in each other, as in the parser of safetensors and tokenizers
)
MAX_BYTES = 100_000_000  # of a file, as of a header in safetensors


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
      ValueError: it is not JSON (a `json.JSONDecodeError` names the place), not UTF-8, or is nested
        more than `MAX_DEPTH` deep.
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
        raise ValueError(f"{path} has {size:,} bytes; a JSON file may have {MAX_BYTES:,}")
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def is_file_name(name: Any) -> bool:
    """Whether a value names a file in a folder, and nothing outside of it."""
    return (
        isinstance(name, str) and not {"/", "\\", "\0", ":"} & set(name) and name.strip(".") != ""
    )


def safe_name(name: str) -> str:
    """The name of an object, which is to be a path inside a folder.

    Raises:
      ValueError: it leads out of the folder.
    """
    parts = name.split("/")
    if {"", ".", ".."} & set(parts) or {"\\", "\0"} & set(name):
        raise ValueError(f"{name!r} is not the name of a file in a run's folder")
    return name


def _depth(value: Any) -> int:
    """How many lists and objects are in each other; without recursion."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [x for one in level for x in (one.values() if isinstance(one, dict) else one)]
    return depth


def _too_deep() -> ValueError:
    return ValueError(f"nested more than {MAX_DEPTH} deep")
