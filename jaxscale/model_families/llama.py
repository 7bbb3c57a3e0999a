"""Llama 2 and 3."""

from typing import Any

from jaxscale.model_families.family import ROPE, Family, HfConfig, Model
from jaxscale.model_families.hf.config import (
    activation_from_hf,
    activation_to_hf,
    bias_from_hf,
    refuse_options,
    rope_from_hf,
    rope_to_hf,
    sizes_from_hf,
    sizes_to_hf,
)
from jaxscale.model_families.hf.tensors import llama_tensors


def _from_hf(hf: HfConfig) -> dict[str, Any]:
    ours = {
        **rope_from_hf(hf),
        **sizes_from_hf(hf),
        "activation": activation_from_hf(hf, "hidden_act", "silu"),
        "norm_eps": hf.read("rms_norm_eps", 1e-6),
        "attention_bias": bias_from_hf(hf),
        "mlp_bias": hf.read("mlp_bias", False),
        "tied_embeddings": hf.read("tie_word_embeddings", False),
    }
    hf.expect("rope_interleaved", False)
    return ours


def _to_hf(model: Model) -> dict[str, Any]:
    refuse_options(model, qk_norm=False, sliding_window=0, logit_soft_cap=0.0, causal=True)
    if model.attention_bias == "qkv":
        raise ValueError(
            "model.attention_bias = 'qkv' cannot be written in Hugging Face's format of llama "
            "models, where it is 'none' or 'all'; set model.family = 'qwen2'"
        )
    return {
        **sizes_to_hf(model),
        **rope_to_hf(model),
        "hidden_act": activation_to_hf(model),
        "rms_norm_eps": model.norm_eps,
        "attention_bias": model.attention_bias == "all",
        "mlp_bias": model.mlp_bias,
        "tie_word_embeddings": model.tied_embeddings,
    }


LLAMA = Family(
    name="llama",
    paper="Llama 2, arXiv 2307.09288; Llama 3, arXiv 2407.21783",
    settings={
        **ROPE,
        "norm_eps": 1e-5,
        "activation": "silu",
        "attention_bias": "none",
        "mlp_bias": False,
        "tied_embeddings": False,
        # For experiments; no published Llama has these.
        "qk_norm": False,
        "sliding_window": 0,
        "logit_soft_cap": 0.0,
        "causal": True,
    },
    fixed={},
    hf_types=("llama",),
    hf_architectures="LlamaForCausalLM",
    read_hf=_from_hf,
    write_hf=_to_hf,
    tensors=llama_tensors,
)
