"""The goldens of tools/hf_goldens.py as parameters and arrays of ours."""

import json
import math
import pathlib
from typing import Any

import jax
import numpy as np

from jaxscale.config import ModelConfig
from jaxscale.model_families.family import Family
from jaxscale.model_families.shipped import SHIPPED
from jaxscale.models.decoder import Decoder

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
NAMES = sorted(path.name for path in GOLDENS.iterdir())


def read_settings(name: str) -> tuple[Family, dict[str, Any]]:
    """The family of a golden, and its config.json."""
    hf = json.loads((GOLDENS / name / "config.json").read_text())
    return next(family for family in SHIPPED if hf["model_type"] in family.hf_types), hf


def read_arrays(name: str, file: str) -> dict[str, np.ndarray]:
    """The float32 and int32 arrays of a safetensors file."""
    data = (GOLDENS / name / file).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    arrays = {}
    for key, entry in json.loads(data[8:start]).items():
        if key != "__metadata__":
            first, last = entry["data_offsets"]
            dtype = {"F32": np.float32, "I32": np.int32}[entry["dtype"]]
            array = np.frombuffer(data[start + first : start + last], dtype)
            arrays[key] = array.reshape(entry["shape"])
    return arrays


def make_params(model: Decoder, family: Family, tensors: dict[str, np.ndarray]) -> Any:
    """Our parameters: every tensor is used, and every parameter is made once."""
    config, left = model.config, set(tensors)
    params = jax.eval_shape(model.init, jax.random.key(0))
    for rule in family.tensors(config):
        *path, last = rule.param.split("/")
        place = params
        for part in path:
            place = place[part]
        shape = place[last].shape
        stacked = path[0] == "layers"
        layers = [_apply(rule, tensors, layer) for layer in range(config.num_layers)]
        left -= {rule.name.format(layer=layer) for layer in range(config.num_layers)}
        value = np.stack(layers) if stacked else layers[0]
        padded = config.padded_vocab_size - config.vocab_size
        if math.prod(shape) != value.size:
            value = np.pad(
                value, [(0, padded if n == config.vocab_size else 0) for n in value.shape]
            )
        place[last] = value.reshape(shape)
    assert not left, f"no rule reads {sorted(left)}"
    made = jax.tree.map(lambda leaf: isinstance(leaf, np.ndarray), params)
    assert all(jax.tree.leaves(made)), made
    return params


def _apply(rule: Any, tensors: dict[str, np.ndarray], layer: int) -> np.ndarray:
    tensor = tensors[rule.name.format(layer=layer)]
    return tensor.reshape(rule.view)[rule.take].transpose(rule.order)


def open_golden(name: str) -> tuple[ModelConfig, Family]:
    """The settings of a golden in float32."""
    family, hf = read_settings(name)
    types = {"compute_dtype": "float32", "param_dtype": "float32"}
    return ModelConfig(**family.from_hf(hf), **types), family
