"""The goldens of tools/hf_goldens.py."""

import json
import pathlib
from typing import Any

from jaxscale.config import ModelConfig
from jaxscale.model_families.family import Family
from jaxscale.model_families.shipped import SHIPPED

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
NAMES = sorted(path.name for path in GOLDENS.iterdir())


def read_settings(name: str) -> tuple[Family, dict[str, Any]]:
    """The family of a golden, and its config.json."""
    hf = json.loads((GOLDENS / name / "config.json").read_text())
    return next(family for family in SHIPPED if hf["model_type"] in family.hf_types), hf


def open_golden(name: str) -> tuple[ModelConfig, Family]:
    """The settings of a golden in float32."""
    family, hf = read_settings(name)
    types = {"compute_dtype": "float32", "param_dtype": "float32"}
    return ModelConfig(**family.from_hf(hf), **types), family
