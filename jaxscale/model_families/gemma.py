"""Gemma 2 and 3: norms before and after attention and MLP, GeGLU, local and global layers."""

import functools
from collections.abc import Mapping
from typing import Any

from jaxscale.model_families.family import ROPE, Family, HfConfig, HfKey, Model
from jaxscale.model_families.hf.config import (
    ATTENTION_BIAS,
    activation_key,
    llama_to_hf,
    local_layers_from_hf,
    local_layers_to_hf,
    optional_key,
    rope_from_hf,
    ropes_by_layer_from_hf,
    sizes_from_hf,
)
from jaxscale.model_families.hf.tensors import llama_tensors

FIXED = {"norm_offset": True, "norm_placement": "both", "scaled_embedding": True}


def _both_from_hf(hf: HfConfig, period: int) -> dict[str, Any]:
    sizes = sizes_from_hf(hf)
    window = hf.read("sliding_window", 4096) or 0
    hf.expect("sliding_window_size", window)  # the old name; Gemma 2 9B-it has both
    return {
        **sizes,
        "attention_scale_dim": hf.read("query_pre_attn_scalar", 256),
        **local_layers_from_hf(hf, sizes["num_layers"], window, period),
    }


def _gemma2_from_hf(hf: HfConfig) -> dict[str, Any]:
    # An older name of the activation, which transformers ignores.
    hf.ignore("hidden_act")
    return {**rope_from_hf(hf), **_both_from_hf(hf, 2)}


def _gemma3_from_hf(hf: HfConfig) -> dict[str, Any]:
    near = hf.read("rope_local_base_freq", 10_000.0)
    rope = ropes_by_layer_from_hf(hf, 1_000_000.0, near)
    period = hf.read("sliding_window_pattern", None) or hf.read("_sliding_window_pattern", 6)
    hf.ignore("_sliding_window_pattern")
    return {**rope, **_both_from_hf(hf, period)}


def _both_to_hf(model: Model) -> dict[str, Any]:
    return {
        **llama_to_hf(model),
        "query_pre_attn_scalar": _whole_scale(model),
        **local_layers_to_hf(model),
    }


def _whole_scale(model: Model) -> int:
    """The dimension whose root divides the scores, as an int: transformers refuses a float."""
    scale = model.attention_scale_dim or model.head_dim
    if scale != int(scale):
        raise ValueError(
            f"model.attention_scale_dim = {scale} cannot be written in Hugging Face's format of "
            f"{model.family} models; set a whole number"
        )
    return int(scale)


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
HF_KEYS = (
    activation_key("hidden_activation", "gelu_pytorch_tanh"),
    HfKey("rms_norm_eps", "norm_eps", 1e-6),
    ATTENTION_BIAS,
    optional_key("final_logit_softcapping", "logit_soft_cap", off=0.0),
    HfKey("tie_word_embeddings", "tied_embeddings", True),
)
HF_EXPECTED = {"use_bidirectional_attention": (None, False)}

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
    hf_defaults={
        **HF_DEFAULTS,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
    },
    hf_architectures="Gemma2ForCausalLM",
    read_hf=_gemma2_from_hf,
    write_hf=_both_to_hf,
    tensors=_tensors,
    hf_keys=(
        *HF_KEYS,
        optional_key("attn_logit_softcapping", "attention_soft_cap", 50.0, off=0.0),
    ),
    hf_expected=HF_EXPECTED,
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
    hf_keys=HF_KEYS,
    hf_expected={**HF_EXPECTED, "attn_logit_softcapping": (None,)},
)
