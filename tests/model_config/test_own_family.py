"""Models of one's own by name, as `model.family` has them."""

import sys
import types
from dataclasses import make_dataclass

from jaxscale.config import from_dict
from jaxscale.model_config import ModelSettings, find_make
from jaxscale.models.decoder import Decoder


def test_a_model_that_a_cell_defines_anew_is_the_new_one(monkeypatch):
    cell = types.ModuleType("cell")
    monkeypatch.setitem(sys.modules, "cell", cell)
    for name in ("width", "depth"):
        settings = make_dataclass("Settings", [(name, int, 3)], bases=(ModelSettings,), frozen=True)
        cell.Mine = type("Mine", (Decoder,), {"__annotations__": {"settings": settings}})
        config = from_dict({"model": {"family": "cell:Mine"}})
        assert getattr(config.model, name) == 3
        assert find_make(config.model.family) is cell.Mine
