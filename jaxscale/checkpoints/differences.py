"""Differences between a checkpoint and a run (settings, arrays), as lines of text."""

from collections.abc import Mapping
from typing import Any

from jaxscale import config as configs
from jaxscale.config.model import is_own_family

LINES = 20
"""Differences that a message lists; further ones are only counted."""


def describe_difference(saved: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """One line per key that differs between two nested configs, such as "model.d_model = ..."."""
    before, now = _flat(_written_now(saved)), _flat(config)
    lines = []
    for key in sorted(before.keys() | now.keys()):
        if key not in now:
            lines.append(f"{key} = {before[key]!r} when saved, not read now")
        elif key not in before:
            lines.append(f"{key} = {now[key]!r} now, not read when saved")
        elif before[key] != now[key]:
            lines.append(f"{key} = {before[key]!r} when saved, {now[key]!r} now")
    return lines


def _written_now(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved config without settings that older versions wrote and nothing reads."""
    try:
        if is_own_family(saved.get("model", {}).get("family", "")):
            return saved  # the module of a custom model is not imported for a message
        written = configs.to_dict(configs.from_dict(dict(saved)))
    except (ValueError, TypeError, AttributeError):
        return saved  # of another version, or corrupt
    return written if written.keys() == saved.keys() else saved


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix: list(tree) if isinstance(tree, tuple) else tree}
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def array_differences(saved: dict[str, dict], wanted: dict[str, dict], *, part: bool) -> list[str]:
    """One line per array that differs, parameters before the optimizer's state.

    Args:
      saved, wanted: "shape" and "dtype" of each array by name.
      part: whether the checkpoint may have further arrays.
    """
    lines = []
    for name in sorted(saved.keys() | wanted.keys(), key=lambda name: (name.count("/"), name)):
        if name not in saved:
            lines.append(f"{name}: not in the checkpoint")
        elif name not in wanted:
            if not part:
                lines.append(f"{name}: only in the checkpoint")
        else:
            changes = [
                f"{key} {saved[name][key]} saved, {wanted[name][key]} wanted"
                for key in ("shape", "dtype")
                if saved[name][key] != wanted[name][key]
            ]
            lines += [f"{name}: {'; '.join(changes)}"] if changes else []
    return lines


def listing(title: str, found: list[str], changed: list[str]) -> str:
    """A message with the arrays that differ and the settings that changed, one per line."""
    lines = [f"{title}; {len(found)} arrays differ:", *(f"  {line}" for line in found[:LINES])]
    if len(found) > LINES:
        lines.append(f"  and {len(found) - LINES} more")
    if changed:
        lines += ["  settings that changed since it was saved:"]
        lines += [f"    config.{line}" for line in changed[:LINES]]
    return "\n".join(lines)
