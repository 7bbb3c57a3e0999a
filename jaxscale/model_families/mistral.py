"""Mistral, a Llama with a sliding window; and Mixtral, a Mistral with experts."""

from collections.abc import Mapping
from typing import Any

from jaxscale.model_families.family import EXPERTS, ROPE, Family, HfConfig, Model, TensorRule
from jaxscale.model_families.hf.config import (
    LLAMA_KEYS,
    experts_from_hf,
    experts_to_hf,
    llama_from_hf,
    llama_to_hf,
    optional_key,
)
from jaxscale.model_families.hf.tensors import expert_tensors, llama_tensors

HF_DEFAULTS: Mapping[str, Any] = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}


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
    hf_defaults=HF_DEFAULTS,
    hf_architectures="MistralForCausalLM",
    read_hf=llama_from_hf,
    write_hf=llama_to_hf,
    tensors=llama_tensors,
    hf_keys=(*LLAMA_KEYS, optional_key("sliding_window", "sliding_window", 4096)),
    hf_expected={"attention_bias": (False,)},
)


def _mixtral_from_hf(hf: HfConfig) -> dict[str, Any]:
    ours = llama_from_hf(hf)
    return {**ours, **experts_from_hf(hf, experts=8, per_token=2, layers=ours["num_layers"])}


def _mixtral_to_hf(model: Model) -> dict[str, Any]:
    return {**llama_to_hf(model), **experts_to_hf(model)}


def _mixtral_tensors(model: Model) -> tuple[TensorRule, ...]:
    return expert_tensors(model, "block_sparse_moe", {"gate": "w1", "down": "w2", "up": "w3"})


MIXTRAL = Family(
    name="mixtral",
    paper="Mixtral of Experts, arXiv 2401.04088",
    settings={
        **ROPE,
        **EXPERTS,
        "rope_theta": 1_000_000.0,
        "norm_eps": 1e-5,
        "activation": "silu",
        "sliding_window": 0,
        "tied_embeddings": False,
        "num_experts": 8,
        "experts_per_token": 2,
        "balance_weight": 0.02,
    },
    # Their softmax over all experts, normalised over the selected, is a softmax over these.
    fixed={"router_scores": "softmax_of_chosen"},
    hf_types=("mixtral",),
    hf_defaults={**HF_DEFAULTS, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5},
    hf_architectures="MixtralForCausalLM",
    read_hf=_mixtral_from_hf,
    write_hf=_mixtral_to_hf,
    tensors=_mixtral_tensors,
    hf_keys=(*LLAMA_KEYS, optional_key("sliding_window", "sliding_window")),
    hf_expected={"attention_bias": (False,), "router_jitter_noise": (0.0,)},
)
