"""Llama 2 and 3."""

from typing import Any

from jaxscale.model_families.family import ROPE, Family, HfKey, Model
from jaxscale.model_families.hf.config import (
    ATTENTION_BIAS,
    LLAMA_KEYS,
    llama_from_hf,
    llama_to_hf,
    refuse_options,
)
from jaxscale.model_families.hf.tensors import llama_tensors


def _to_hf(model: Model) -> dict[str, Any]:
    refuse_options(model, qk_norm=False, sliding_window=0, logit_soft_cap=0.0, causal=True)
    if model.attention_bias == "qkv":
        raise ValueError(
            "model.attention_bias = 'qkv' cannot be written in Hugging Face's format of llama "
            "models, which has 'none' or 'all'; set model.family = 'qwen2'"
        )
    return llama_to_hf(model)


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
        # For experiments; not in published Llamas.
        "qk_norm": False,
        "sliding_window": 0,
        "logit_soft_cap": 0.0,
        "causal": True,
    },
    fixed={},
    hf_types=("llama",),
    hf_architectures="LlamaForCausalLM",
    read_hf=llama_from_hf,
    write_hf=_to_hf,
    tensors=llama_tensors,
    hf_keys=(*LLAMA_KEYS, ATTENTION_BIAS, HfKey("mlp_bias", "mlp_bias", False)),
    hf_expected={"rope_interleaved": (False,)},
)
