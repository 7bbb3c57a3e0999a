"""Shapes of published models by name, and of models that a user describes in a JSON file."""

import dataclasses
import pathlib
from dataclasses import replace
from typing import Any

from jaxscale.choices import did_you_mean
from jaxscale.planner.model.shape import LatentAttention, ModelShape, StateSpaceMixer
from jaxscale.storage.untrusted import load_json

NAMED = {
    # Llama 3 (arXiv 2407.21783, table 3).
    "llama3-8b": ModelShape(
        32, 4096, 32, 8, 128, 14336, gated=True, vocab=128256, tied=False, seq_len=8192
    ),
    "llama3-70b": ModelShape(
        80, 8192, 64, 8, 128, 28672, gated=True, vocab=128256, tied=False, seq_len=8192
    ),
    "llama3-405b": ModelShape(
        126, 16384, 128, 8, 128, 53248, gated=True, vocab=128256, tied=False, seq_len=8192
    ),
    "gpt3-175b": ModelShape(
        96,
        12288,
        96,
        96,
        128,
        49152,
        gated=False,
        vocab=51200,
        tied=True,
        seq_len=2048,
        biases=True,
        learned_positions=True,
    ),
    # Mixtral (arXiv 2401.04088, table 1; the model card of 8x22B, April 2024).
    "mixtral-8x7b": ModelShape(
        32,
        4096,
        32,
        8,
        128,
        0,
        gated=True,
        vocab=32000,
        tied=False,
        seq_len=32768,
        experts=8,
        top_k=2,
        expert_ff=14336,
    ),
    "mixtral-8x22b": ModelShape(
        56,
        6144,
        48,
        8,
        128,
        0,
        gated=True,
        vocab=32000,
        tied=False,
        seq_len=65536,
        experts=8,
        top_k=2,
        expert_ff=16384,
    ),
    # DeepSeek-V3 (arXiv 2412.19437, section 4.2), without multi-token prediction.
    "deepseek-v3": ModelShape(
        61,
        7168,
        128,
        128,
        128,
        18432,
        gated=True,
        vocab=129280,
        tied=False,
        seq_len=4096,
        experts=256,
        top_k=8,
        expert_ff=2048,
        shared_experts=1,
        dense_layers=3,
        latent=LatentAttention(1536, 512, 128, 64, 128),
    ),
    # Qwen3 (arXiv 2505.09388, table 2, and the model cards).
    "qwen3-30b-a3b": ModelShape(
        48,
        2048,
        32,
        4,
        128,
        0,
        gated=True,
        vocab=151936,
        tied=False,
        seq_len=4096,
        experts=128,
        top_k=8,
        expert_ff=768,
    ),
    "qwen3-235b-a22b": ModelShape(
        94,
        4096,
        64,
        4,
        128,
        0,
        gated=True,
        vocab=151936,
        tied=False,
        seq_len=4096,
        experts=128,
        top_k=8,
        expert_ff=1536,
    ),
    # T5 (arXiv 1910.10683, sections 3.1 and 3.7) and mT5 (2010.11934, tables 1 and 2 and section
    # 3.2: inputs of 1,024 tokens). Lengths: decoder, then encoder.
    "t5-11b": ModelShape(
        24,
        1024,
        128,
        128,
        128,
        65536,
        gated=False,
        vocab=32128,
        tied=True,
        seq_len=512,
        encoder_layers=24,
        encoder_seq_len=512,
    ),
    "mt5-xxl": ModelShape(
        24,
        4096,
        64,
        64,
        64,
        10240,
        gated=True,
        vocab=250112,
        tied=False,
        seq_len=512,
        encoder_layers=24,
        encoder_seq_len=1024,
    ),
    # NVIDIA Nemotron 3 (model cards of December 2025 and March 2026): state-space mixers,
    # experts with squared ReLU, and a few attention layers.
    "nemotron-3-nano": ModelShape(
        52,
        2688,
        32,
        2,
        128,
        0,
        gated=False,
        vocab=131072,
        tied=False,
        seq_len=8192,
        experts=128,
        top_k=6,
        expert_ff=1856,
        shared_experts=2,
        expert_gated=False,
        mixer=StateSpaceMixer(layers=23, heads=64, head_dim=64, state=128, groups=8),
        attention_layers=6,
        mlp_layers=23,
    ),
    "nemotron-3-super": ModelShape(
        88,
        4096,
        32,
        2,
        128,
        0,
        gated=False,
        vocab=131072,
        tied=False,
        seq_len=8192,
        experts=512,
        top_k=22,
        expert_ff=2688,
        expert_width=1024,
        shared_experts=1,
        shared_ff=5376,
        expert_gated=False,
        mixer=StateSpaceMixer(layers=40, heads=128, head_dim=64, state=128, groups=8),
        attention_layers=8,
        mlp_layers=40,
        extra_predictions=2,
    ),
}


def published_shape(model: str, seq_len: int) -> ModelShape | None:
    """The shape of the known name that `model` begins with; None where there is none."""
    name = _normalised(model)
    found = [shape for known, shape in NAMED.items() if name.startswith(known)]
    return replace(found[0], seq_len=seq_len) if found else None


def _normalised(model: str) -> str:
    """A name in any case, with _ for - or without one before a version, as `NAMED` has it."""
    return model.lower().replace("_", "-").replace("nemotron3", "nemotron-3")


def has_shape(model: str) -> bool:
    """Whether a model is a name of `NAMED`, or a JSON file of sizes."""
    return model.endswith(".json") or _normalised(model) in NAMED


def find_shape(model: str) -> ModelShape:
    """The shape of a name, in any case and with _ for -, or of a user's JSON file.

    Raises:
      ValueError: an unknown model, or a field that is unknown, missing or of another type; names
        the nearest.
    """
    if model.endswith(".json"):
        return read_shape(pathlib.Path(model))
    name = _normalised(model)
    if name in NAMED:
        return NAMED[name]
    raise ValueError(
        f"model {model!r} is not known; it can be {', '.join(NAMED)}, or a JSON file of a model's "
        f"sizes, such as model.json{did_you_mean(name, NAMED, count=3, cutoff=0.4)}"
    )


def read_shape(path: pathlib.Path) -> ModelShape:
    """A shape from a JSON object of its fields; those with a default may be left out.

    Raises:
      ValueError: as `find_shape`.
    """
    given = load_json(path)
    for name, kind in (("latent", LatentAttention), ("mixer", StateSpaceMixer)):
        if isinstance(given, dict) and given.get(name) is not None:
            given[name] = _record(kind, given[name], f"{path}: {name}")
    return _record(ModelShape, given, str(path))


TYPES: dict[Any, tuple[type, ...]] = {int: (int,), bool: (bool,), float: (int, float)}
"""Of a field -> what JSON may give for it."""


def _record(kind: Any, given: Any, where: str) -> Any:
    """A dataclass from a JSON object of its numbers; fields that are records are made already."""
    if not isinstance(given, dict):
        raise ValueError(f"{where} is {given!r}; it must be an object of {kind.__name__}'s fields")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name, value in given.items():
        if name not in fields:
            raise ValueError(
                f"{where}: {name!r} is not a field; there are {', '.join(fields)}"
                f"{did_you_mean(name, fields)}"
            )
        allowed = TYPES.get(fields[name].type, ())
        if allowed and type(value) not in allowed:
            raise ValueError(f"{where}: {name} = {value!r} must be {allowed[-1].__name__}")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in given:
            raise ValueError(f"{where}: {name!r} is missing; every model has one")
    return kind(**given)


def check_shape(shape: ModelShape, name: str) -> None:
    """Refuses impossible sizes.

    Raises:
      ValueError: names the field.
    """
    least = {
        "layers": 1,
        "d_model": 1,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 1,
        "vocab": 2,
        "seq_len": 2,
    }
    if shape.experts:
        least |= {"top_k": 1, "expert_ff": 1}
    if shape.encoder_layers:
        least |= {"encoder_seq_len": 1}
    if not shape.experts and shape.with_mlp:
        least |= {"d_ff": 1}
    for field, bound in least.items():
        if getattr(shape, field) < bound:
            raise ValueError(f"{name}: {field} = {getattr(shape, field)}; at least {bound}")
    for field, whole in (("kv_heads", "heads"), ("top_k", "experts"), ("dense_layers", "layers")):
        if getattr(shape, field) > getattr(shape, whole):
            raise ValueError(
                f"{name}: {field} = {getattr(shape, field)} is more than {whole} = "
                f"{getattr(shape, whole)}"
            )
    if shape.heads % shape.kv_heads:
        raise ValueError(
            f"{name}: heads = {shape.heads} is not a multiple of kv_heads = {shape.kv_heads}"
        )
