"""Text of numbers, sizes, durations, tables and records."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any


def human_bytes(size: float) -> str:
    """A size in binary units.

    >>> human_bytes(1536)
    '1.5 KiB'
    """
    if size < 1024:
        return f"{size:.0f} B"
    power = min(int(math.log2(size) // 10), 4)
    return f"{size / 1024**power:.4g} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def gigabytes(size: float) -> str:
    """A size in decimal gigabytes, as vendors state the memory of a device.

    >>> gigabytes(80e9)
    '80.00 GB'
    """
    return f"{size / 1e9:,.2f} GB"


def duration(seconds: float) -> str:
    """A duration as text: "12 ms", "3.4 s", "5 min 20 s", "3 h 05 min", "2 d 4 h"."""
    if not math.isfinite(seconds):
        return "n/a"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def quantity(number: float) -> str:
    """Three digits and a suffix: "950", "12.3k", "4.56M"."""
    for suffix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * size:
            return f"{_three_digits(number / size)}{suffix}"
    return _three_digits(number)


def file_size(size: float) -> str:
    """A size in decimal units, as file managers show it.

    >>> [file_size(size) for size in (240, 12_345, 4_560_000)]
    ['240 B', '12.3 kB', '4.56 MB']
    """
    if size < 1000:
        return f"{size:.0f} B"
    text = quantity(size)
    return f"{text[:-1]} {text[-1]}B"


def _three_digits(number: float) -> str:
    return f"{number:.{2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0}f}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns; columns of numbers are aligned to the right.

    >>> print(table([("name", "bytes"), ("weights", "12"), ("batch", "3")]))
      name     bytes
      weights     12
      batch        3
    """
    columns = range(len(rows[0]))
    widths = [max(len(row[i]) for row in rows) for i in columns]
    numeric = [all(re.match(r"[-+]?\d|-?$", row[i]) for row in rows[1:]) for i in columns]

    def cell(text: str, i: int) -> str:
        return text.rjust(widths[i]) if numeric[i] else text.ljust(widths[i])

    return "\n".join(
        "  " + "  ".join(cell(text, i) for i, text in enumerate(row)).rstrip() for row in rows
    )


def changed_values(record: Any, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, with their values.

    Args:
      defaults: field -> default, where it differs from the class's.
    """
    changed = {}
    for field in dataclasses.fields(record):
        value, default = getattr(record, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        default = (defaults or {}).get(field.name, default)
        if default is dataclasses.MISSING or value != default:
            changed[field.name] = value
    return changed


def changed_fields(record: Any, defaults: Mapping[str, Any] | None = None) -> str:
    """A dataclass as its constructor call, without fields at their defaults: a whole config would
    fill a page of a notebook."""
    changed = changed_values(record, defaults).items()
    return f"{type(record).__name__}({', '.join(f'{name}={value!r}' for name, value in changed)})"


def printable(text: str) -> str:
    """The text with control characters escaped, which a terminal would obey."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)
