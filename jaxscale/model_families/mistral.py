"""Mistral: a Llama with a sliding window."""

from collections.abc import Mapping
from typing import Any

from jaxscale.model_families.family import ROPE, Family, Model
from jaxscale.model_families.hf_config import (
    activation_to_hf,
    pop,
    pop_activation,
    pop_rope,
    pop_sizes,
    refuse_rest,
    rope_to_hf,
    sizes_to_hf,
)
from jaxscale.model_families.hf_tensors import llama_tensors


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    rest = dict(hf)
    rest.setdefault("num_key_value_heads", 8)
    ours = {
        **pop_rope(rest),
        **pop_sizes(rest),
        "activation": pop_activation(rest, "hidden_act", "silu"),
        "norm_eps": pop(rest, "rms_norm_eps", 1e-6),
        "sliding_window": pop(rest, "sliding_window", 4096) or 0,
        "tied_embeddings": pop(rest, "tie_word_embeddings", False),
    }
    refuse_rest(rest)
    return ours


def _to_hf(model: Model) -> dict[str, Any]:
    return {
        **sizes_to_hf(model),
        **rope_to_hf(model),
        "hidden_act": activation_to_hf(model),
        "rms_norm_eps": model.norm_eps,
        "sliding_window": model.sliding_window or None,
        "tie_word_embeddings": model.tied_embeddings,
    }


MISTRAL = Family(
    name="mistral",
    paper="Mistral 7B, arXiv 2310.06825",
    settings={
        **ROPE,
        "norm_eps": 1e-5,
        "activation": "silu",
        "sliding_window": 4096,
        "tied_embeddings": False,
    },
    fixed={},
    hf_types=("mistral",),
    hf_architectures="MistralForCausalLM",
    read_hf=_from_hf,
    write_hf=_to_hf,
    tensors=llama_tensors,
)
