"""Mistral, a Llama with a sliding window; and Mixtral, a Mistral with experts."""

from collections.abc import Mapping
from typing import Any

from jaxscale.model_families.family import EXPERTS, ROPE, Family, HfConfig, Model, TensorRule
from jaxscale.model_families.hf.config import (
    activation_from_hf,
    activation_to_hf,
    balance_to_hf,
    experts_from_hf,
    rope_from_hf,
    rope_to_hf,
    sizes_from_hf,
    sizes_to_hf,
)
from jaxscale.model_families.hf.tensors import expert_tensors, llama_tensors

HF_DEFAULTS: Mapping[str, Any] = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}


def _mistral_from_hf(hf: HfConfig) -> dict[str, Any]:
    ours = {
        **rope_from_hf(hf),
        **sizes_from_hf(hf),
        "activation": activation_from_hf(hf, "hidden_act", "silu"),
        "norm_eps": hf.read("rms_norm_eps", 1e-6),
        "sliding_window": hf.read("sliding_window", 4096) or 0,
        "tied_embeddings": hf.read("tie_word_embeddings", False),
    }
    hf.expect("attention_bias", False)
    return ours


def _mistral_to_hf(model: Model) -> dict[str, Any]:
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
    hf_defaults=HF_DEFAULTS,
    hf_architectures="MistralForCausalLM",
    read_hf=_mistral_from_hf,
    write_hf=_mistral_to_hf,
    tensors=llama_tensors,
)


def _mixtral_from_hf(hf: HfConfig) -> dict[str, Any]:
    sizes = sizes_from_hf(hf)
    ours = {
        **rope_from_hf(hf, theta=1_000_000.0),
        **sizes,
        **experts_from_hf(hf, experts=8, per_token=2, layers=sizes["num_layers"]),
        "activation": activation_from_hf(hf, "hidden_act", "silu"),
        "norm_eps": hf.read("rms_norm_eps", 1e-5),
        "sliding_window": hf.read("sliding_window", None) or 0,
        "tied_embeddings": hf.read("tie_word_embeddings", False),
    }
    hf.expect("router_jitter_noise", 0.0)
    hf.expect("attention_bias", False)
    return ours


def _mixtral_to_hf(model: Model) -> dict[str, Any]:
    return {
        **sizes_to_hf(model),
        **rope_to_hf(model),
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        **balance_to_hf(model),
        "hidden_act": activation_to_hf(model),
        "rms_norm_eps": model.norm_eps,
        "sliding_window": model.sliding_window or None,
        "tie_word_embeddings": model.tied_embeddings,
    }


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
    # Their softmax over all experts, divided by the sum of the chosen, is one over the chosen.
    fixed={"router_scores": "softmax_of_chosen"},
    hf_types=("mixtral",),
    hf_defaults=HF_DEFAULTS,
    hf_architectures="MixtralForCausalLM",
    read_hf=_mixtral_from_hf,
    write_hf=_mixtral_to_hf,
    tensors=_mixtral_tensors,
)
