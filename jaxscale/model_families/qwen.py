"""Qwen2, with biases of queries, keys and values; Qwen3, with norms of queries and keys."""

from collections.abc import Mapping
from typing import Any

from jaxscale.model_families.family import ROPE, Family, Model
from jaxscale.model_families.hf.config import (
    activation_to_hf,
    expect,
    layer_types,
    pop,
    pop_activation,
    pop_bias,
    pop_rope,
    pop_sizes,
    pop_windows,
    refuse_rest,
    rope_to_hf,
    sizes_to_hf,
)
from jaxscale.model_families.hf.tensors import llama_tensors


def _both_from_hf(rest: dict[str, Any]) -> dict[str, Any]:
    sizes = {**pop_rope(rest), **pop_sizes(rest)}
    ours = {
        **sizes,
        **pop_windows(rest, sizes["num_layers"]),
        "activation": pop_activation(rest, "hidden_act", "silu"),
        "norm_eps": pop(rest, "rms_norm_eps", 1e-6),
        "tied_embeddings": pop(rest, "tie_word_embeddings", False),
    }
    expect(rest, "use_mrope", False)
    refuse_rest(rest)
    return ours


def _qwen2_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return _both_from_hf({"num_key_value_heads": 32, **hf})


def _qwen3_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    rest = {"num_key_value_heads": 32, "head_dim": 128, **hf}
    bias = pop_bias(rest)
    return {**_both_from_hf(rest), "attention_bias": bias}


def _to_hf(model: Model) -> dict[str, Any]:
    windows = {
        "use_sliding_window": True,
        "sliding_window": model.sliding_window,
        "max_window_layers": 0,
        "layer_types": layer_types(model),
    }
    bias = {"attention_bias": model.attention_bias == "all"}
    return {
        **sizes_to_hf(model),
        **rope_to_hf(model),
        **(windows if model.sliding_window else {"use_sliding_window": False}),
        **(bias if model.family == "qwen3" else {}),
        "hidden_act": activation_to_hf(model),
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
    }


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
    hf_architectures="Qwen2ForCausalLM",
    read_hf=_qwen2_from_hf,
    write_hf=_to_hf,
    tensors=llama_tensors,
)

QWEN3 = Family(
    name="qwen3",
    paper="Qwen3, arXiv 2505.09388",
    settings={**SETTINGS, "attention_bias": "none"},
    fixed={"qk_norm": True},
    hf_types=("qwen3",),
    hf_architectures="Qwen3ForCausalLM",
    read_hf=_qwen3_from_hf,
    write_hf=_to_hf,
    tensors=llama_tensors,
)
