"""Gemma 2 and 3: norms before and after attention and MLP, GeGLU, local and global layers."""

import functools
from collections.abc import Mapping
from typing import Any

from jaxscale.model_families.family import ROPE, Family, HfConfig, Model
from jaxscale.model_families.hf.config import (
    GLOBAL,
    LOCAL,
    activation_from_hf,
    activation_to_hf,
    bias_from_hf,
    layer_types,
    pattern_of,
    rope_from_hf,
    rope_to_hf,
    ropes_by_layer_from_hf,
    sizes_from_hf,
    sizes_to_hf,
)
from jaxscale.model_families.hf.tensors import llama_tensors

FIXED = {"norm_offset": True, "norm_placement": "both", "scaled_embedding": True}


def _both_from_hf(hf: HfConfig, period: int, cap: float | None) -> dict[str, Any]:
    sizes = sizes_from_hf(hf)
    types = hf.read("layer_types", None) or [
        LOCAL if (i + 1) % period else GLOBAL for i in range(sizes["num_layers"])
    ]
    window = hf.read("sliding_window", 4096) or 0
    hf.expect("sliding_window_size", window)  # its first name, in Gemma 2 9B-it beside it
    hf.expect("use_bidirectional_attention", None, False)
    return {
        **sizes,
        "activation": activation_from_hf(hf, "hidden_activation", "gelu_pytorch_tanh"),
        "norm_eps": hf.read("rms_norm_eps", 1e-6),
        "attention_bias": bias_from_hf(hf),
        "attention_scale_dim": hf.read("query_pre_attn_scalar", 256),
        "logit_soft_cap": hf.read("final_logit_softcapping", cap) or 0.0,
        "sliding_window": window,
        "layer_pattern": pattern_of(types) if window else "",
        "tied_embeddings": hf.read("tie_word_embeddings", True),
    }


def _gemma2_from_hf(hf: HfConfig) -> dict[str, Any]:
    # The older name of the activation, which transformers does not read.
    hf.ignore("hidden_act")
    soft_cap = hf.read("attn_logit_softcapping", 50.0) or 0.0
    rope = rope_from_hf(hf)
    return {**rope, **_both_from_hf(hf, 2, 30.0), "attention_soft_cap": soft_cap}


def _gemma3_from_hf(hf: HfConfig) -> dict[str, Any]:
    hf.expect("attn_logit_softcapping", None)
    near = hf.read("rope_local_base_freq", 10_000.0)
    rope = ropes_by_layer_from_hf(hf, 1_000_000.0, near)
    period = hf.read("sliding_window_pattern", None) or hf.read("_sliding_window_pattern", 6)
    hf.ignore("_sliding_window_pattern")
    ours = _both_from_hf(hf, period, None)
    return {**rope, **ours}


def _both_to_hf(model: Model) -> dict[str, Any]:
    return {
        **sizes_to_hf(model),
        **rope_to_hf(model),
        "hidden_activation": activation_to_hf(model),
        "rms_norm_eps": model.norm_eps,
        "attention_bias": model.attention_bias == "all",
        "query_pre_attn_scalar": _whole_scale(model),
        "final_logit_softcapping": model.logit_soft_cap or None,
        "sliding_window": model.sliding_window or None,
        "layer_types": layer_types(model),
        "tie_word_embeddings": model.tied_embeddings,
    }


def _whole_scale(model: Model) -> int:
    """What scores are divided by the root of; transformers refuses a float, even a whole one."""
    scale = model.attention_scale_dim or model.head_dim
    if scale != int(scale):
        raise ValueError(
            f"model.attention_scale_dim = {scale} cannot be written in Hugging Face's format of "
            f"{model.family} models, where it is a whole number; set one"
        )
    return int(scale)


def _gemma2_to_hf(model: Model) -> dict[str, Any]:
    return {**_both_to_hf(model), "attn_logit_softcapping": model.attention_soft_cap or None}


def _gemma3_to_hf(model: Model) -> dict[str, Any]:
    return {**_both_to_hf(model), "rope_local_base_freq": model.local_rope_theta}


_tensors = functools.partial(
    llama_tensors,
    norms={
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
)

HF_DEFAULTS: Mapping[str, Any] = {"num_key_value_heads": 4, "head_dim": 256}

SETTINGS: Mapping[str, Any] = {
    **ROPE,
    "norm_eps": 1e-6,
    "activation": "gelu_tanh",
    "attention_bias": "none",
    "attention_scale_dim": 0.0,
    "tied_embeddings": True,
}

GEMMA2 = Family(
    name="gemma2",
    paper="Gemma 2, arXiv 2408.00118",
    settings={
        **SETTINGS,
        "sliding_window": 4096,
        "layer_pattern": "LG",
        "attention_soft_cap": 50.0,
        "logit_soft_cap": 30.0,
    },
    fixed=FIXED,
    hf_types=("gemma2",),
    hf_defaults={**HF_DEFAULTS, "max_position_embeddings": 8192},
    hf_architectures="Gemma2ForCausalLM",
    read_hf=_gemma2_from_hf,
    write_hf=_gemma2_to_hf,
    tensors=_tensors,
)

GEMMA3 = Family(
    name="gemma3",
    paper="Gemma 3, arXiv 2503.19786",
    settings={
        **SETTINGS,
        "rope_theta": 1_000_000.0,
        "local_rope_theta": 10_000.0,
        "sliding_window": 1024,
        "layer_pattern": "LLLLLG",
        "logit_soft_cap": 0.0,
    },
    fixed={**FIXED, "qk_norm": True},
    hf_types=("gemma3_text",),
    hf_defaults={**HF_DEFAULTS, "max_position_embeddings": 131_072},
    hf_architectures="Gemma3ForCausalLM",
    read_hf=_gemma3_from_hf,
    write_hf=_gemma3_to_hf,
    tensors=_tensors,
)
