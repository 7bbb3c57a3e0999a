"""Numbers and tables as text for a person."""

import math

import pytest

from jaxscale import formatting


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0123, "12 ms"),
        (0.9996, "1.0 s"),
        (3.44, "3.4 s"),
        (59.99, "1 min 00 s"),
        (320, "5 min 20 s"),
        (3599.7, "1 h 00 min"),
        (11100, "3 h 05 min"),
        (86399, "1 d 0 h"),
        (187200, "2 d 4 h"),
        (math.nan, "n/a"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0.00"),
        (9.999, "10.0"),
        (99.97, "100"),
        (950, "950"),
        (999.9, "1.00k"),
        (12345, "12.3k"),
        (4.56e6, "4.56M"),
        (2e13, "20.0T"),
    ],
)
def test_quantity(number: float, text: str) -> None:
    assert formatting.quantity(number) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40, "1 TiB"), (2.0**52, "4096 TiB")],
)
def test_human_bytes(size: float, text: str) -> None:
    assert formatting.human_bytes(size) == text


def test_control_characters_are_written_out() -> None:
    assert formatting.printable("a\tb\n\x1b[31mé\x00") == "a\tb\n\\x1b[31mé\\x00"


def test_a_table_aligns_numbers_to_the_right_and_text_to_the_left() -> None:
    rows = [("name", "bytes", "note"), ("a", "12.0 GB", "2 or more"), ("long", "-", "none")]
    assert formatting.table(rows) == (
        "  name    bytes  note\n  a     12.0 GB  2 or more\n  long        -  none"
    )
