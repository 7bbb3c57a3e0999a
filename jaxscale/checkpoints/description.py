"""The description of a checkpoint (description.json): its arrays, files and metadata of the run.

It is untrusted input: every field is checked before use."""

import json
from collections.abc import Mapping
from typing import Any

from jaxscale.storage import durable
from jaxscale.storage.untrusted import parse_json, safe_name

FORMAT = 1

FROZEN = "frozen"
"""The folder of a checkpoint for frozen arrays, which training does not change; several checkpoints
may share its files by hard links."""


def write_description(values: Mapping[str, Any]) -> str:
    """The JSON text of a description: its values, and their digest."""
    values = {"format": FORMAT} | dict(values)
    return json.dumps(values | {"digest": durable.json_digest(values)})


def read_description(text: str | bytes) -> dict[str, Any]:
    """The values of a description: "arrays", "metadata" and, except in old ones, "files".

    Raises:
      ValueError: it changed since it was written, or is not a description; a short reason.
    """
    try:
        values = parse_json(text)
        digest = values.pop("digest")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError("its description is corrupt") from error
    if digest != durable.json_digest(values):
        raise ValueError("its description changed since it was saved")
    if values.get("format") != FORMAT:
        raise ValueError(f"its format is {values.get('format')!r:.40}, not {FORMAT}")
    for part, is_good in (("arrays", _is_array), ("files", _is_file)):
        found = values.setdefault("files", {}) if part == "files" else values.get(part)
        if not isinstance(found, dict) or not all(map(is_good, found.items())):
            raise ValueError(f"its description has no proper {part!r}")
    if not isinstance(values.get("metadata"), dict):
        raise ValueError("its description has no proper 'metadata'")
    return values


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Checks the metadata that a run adds to the description of its checkpoints.

    Raises:
      ValueError: a field is missing or has another type.
    """
    config, data = metadata.get("config"), metadata.get("data")
    if not isinstance(config, dict) or not all(isinstance(part, dict) for part in config.values()):
        raise ValueError("its description has no proper 'config'")
    if not isinstance(data, dict) or not (
        isinstance(data.get("fingerprint"), str)
        and _is_count(data.get("next_example"))
        and isinstance(data.get("tokenizer", ""), str)
        and _are_ranges(data.get("passed_over", ()))
        and _are_counts(data.get("stop_ids", ()))
    ):
        raise ValueError("its description has no proper 'data'")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_counts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_count, value))


def _are_ranges(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(pair, list) and len(pair) == 2 and _are_counts(pair) for pair in value
    )


def _is_array(item: tuple[str, Any]) -> bool:
    about = item[1]
    return (
        isinstance(about, dict)
        and isinstance(about.get("shape"), list)
        and all(map(_is_count, about["shape"]))
        and isinstance(about.get("dtype"), str)
        and _is_count(about.get("checksum"))
        and isinstance(about.get("frozen", False), bool)
    )


def _is_file(item: tuple[str, Any]) -> bool:
    name, about = item
    if not isinstance(about, list) or len(about) != 2:
        return False
    safe_name(name)
    return _is_count(about[0]) and isinstance(about[1], str)
