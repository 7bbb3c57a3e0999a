"""Qwen2, with biases of queries, keys and values; Qwen3, with norms of queries and keys."""

from collections.abc import Mapping
from typing import Any

from jaxscale.model_families.family import ROPE, Family, HfConfig, Model
from jaxscale.model_families.hf.config import (
    ATTENTION_BIAS,
    LLAMA_KEYS,
    layer_types,
    llama_from_hf,
    llama_to_hf,
    windows_from_hf,
)
from jaxscale.model_families.hf.tensors import llama_tensors

HF_DEFAULTS: Mapping[str, Any] = {"num_key_value_heads": 32, "max_position_embeddings": 32_768}


def _from_hf(hf: HfConfig) -> dict[str, Any]:
    ours = llama_from_hf(hf)
    return {**ours, **windows_from_hf(hf, ours["num_layers"])}


def _to_hf(model: Model) -> dict[str, Any]:
    windows = {
        "use_sliding_window": True,
        "sliding_window": model.sliding_window,
        "max_window_layers": 0,
        "layer_types": layer_types(model),
    }
    return {
        **llama_to_hf(model),
        **(windows if model.sliding_window else {"use_sliding_window": False}),
    }


HF_EXPECTED = {"use_mrope": (False,)}

SETTINGS: Mapping[str, Any] = {
    **ROPE,
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-6,
    "activation": "silu",
    "sliding_window": 0,
    "layer_pattern": "",
    "tied_embeddings": False,
}

QWEN2 = Family(
    name="qwen2",
    paper="Qwen2, arXiv 2407.10671",
    settings=SETTINGS,
    fixed={"attention_bias": "qkv"},
    hf_types=("qwen2",),
    hf_defaults=HF_DEFAULTS,
    hf_architectures="Qwen2ForCausalLM",
    read_hf=_from_hf,
    write_hf=_to_hf,
    tensors=llama_tensors,
    hf_keys=LLAMA_KEYS,
    hf_expected=HF_EXPECTED,
)

QWEN3 = Family(
    name="qwen3",
    paper="Qwen3, arXiv 2505.09388",
    settings={**SETTINGS, "attention_bias": "none"},
    fixed={"qk_norm": True},
    hf_types=("qwen3",),
    hf_defaults={**HF_DEFAULTS, "head_dim": 128},
    hf_architectures="Qwen3ForCausalLM",
    read_hf=_from_hf,
    write_hf=_to_hf,
    tensors=llama_tensors,
    hf_keys=(*LLAMA_KEYS, ATTENTION_BIAS),
    hf_expected=HF_EXPECTED,
)
