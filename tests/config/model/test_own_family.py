"""Custom models by name, as in `model.family`, and their settings."""

import json
import sys
import types
from dataclasses import make_dataclass
from typing import Any, Literal

import pytest

from jaxscale.config import from_dict, to_dict
from jaxscale.config.model import ModelSettings, find_make
from jaxscale.models.decoder import Decoder

MINE = {"model": {"family": "cell:Mine"}}


@pytest.fixture
def cell(monkeypatch):
    """A notebook's cell that defines a model."""
    module: Any = types.ModuleType("cell")
    monkeypatch.setitem(sys.modules, "cell", module)

    def define(name: str, kind: Any, default: Any) -> type:
        fields = [(name, kind, default)]
        module.Settings = make_dataclass("Settings", fields, bases=(ModelSettings,), frozen=True)
        module.Mine = type("Mine", (Decoder,), {"__annotations__": {"settings": module.Settings}})
        return module.Mine

    return define


def test_a_model_that_a_cell_defines_anew_is_the_new_one(cell):
    for name in ("width", "depth"):
        mine = cell(name, int, 3)
        config = from_dict(MINE)
        assert getattr(config.model, name) == 3
        assert find_make(config.model.family) is mine


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("float", "2", 2.0),  # as `from __future__ import annotations` leaves it
        (int | None, "2", 2),
        (float | None, "2", 2.0),
        (float | None, "None", None),
        (str | None, "abc", "abc"),
        (Literal["a", "b"], "b", "b"),
        (tuple, "(1, (2, 3))", (1, (2, 3))),
        (tuple[int, ...], "3,4", (3, 4)),
        (tuple[int, ...], "[3]", (3,)),
        (tuple[int, float], "(3, 4)", (3, 4.0)),
        (tuple[str, ...], "a,b", ("a", "b")),
    ],
)
def test_settings_are_read_again_as_the_record_has_them(cell, kind, text, value):
    cell("own", kind, value)
    for config in (from_dict(MINE), from_dict(MINE, [f"model.own={text}"])):
        assert repr(config.model.own) == repr(value)
        assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (Literal["a", "b"], "c", r"model.own = 'c' is of type str; expected .*\['a', 'b'\]"),
        (tuple[int, ...], "a", r"is of type str; expected tuple\[int, ...\]"),
        (tuple[int, int], "(1,)", r"model.own = \(1,\) has 1 members, and not 2"),
        (tuple, "3", "model.own = 3 is of type int; expected a tuple"),
        (
            list[int],
            "[3]",
            r"Settings.own is of type list\[int\]; settings must be hashable: make it a tuple",
        ),
    ],
)
def test_other_settings_are_refused(cell, kind, text, said):
    cell("own", kind, ())
    with pytest.raises(ValueError, match=said):
        from_dict(MINE, [f"model.own={text}"])


def test_settings_that_are_no_dataclass_are_refused(cell):
    cell("own", int, 1)
    module: Any = sys.modules["cell"]
    plain = type("Plain", (module.Settings,), {"__annotations__": {"more": int}})
    module.Mine = type("Mine", (Decoder,), {"__annotations__": {"settings": plain}})
    with pytest.raises(ValueError, match="YourSettings is a frozen dataclass that extends"):
        from_dict(MINE)
