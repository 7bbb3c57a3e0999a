"""Mistral, a Llama with a sliding window; and Mixtral, a Mistral with experts."""

from collections.abc import Mapping
from typing import Any

from jaxscale.model_families.family import EXPERTS, ROPE, Family, Model, TensorRule
from jaxscale.model_families.hf.config import (
    activation_to_hf,
    balance_to_hf,
    expect,
    pop,
    pop_activation,
    pop_experts,
    pop_rope,
    pop_sizes,
    refuse_rest,
    rope_to_hf,
    sizes_to_hf,
)
from jaxscale.model_families.hf.tensors import expert_tensors, llama_tensors


def _mistral_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
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
    expect(rest, "attention_bias", False)
    refuse_rest(rest)
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
    hf_architectures="MistralForCausalLM",
    read_hf=_mistral_from_hf,
    write_hf=_mistral_to_hf,
    tensors=llama_tensors,
)


def _mixtral_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    rest = {"num_key_value_heads": 8, **hf}
    sizes = pop_sizes(rest)
    ours = {
        **pop_rope(rest, theta=1_000_000.0),
        **sizes,
        **pop_experts(rest, experts=8, per_token=2, layers=sizes["num_layers"]),
        "activation": pop_activation(rest, "hidden_act", "silu"),
        "norm_eps": pop(rest, "rms_norm_eps", 1e-5),
        "sliding_window": pop(rest, "sliding_window", None) or 0,
        "tied_embeddings": pop(rest, "tie_word_embeddings", False),
    }
    expect(rest, "router_jitter_noise", 0.0)
    expect(rest, "attention_bias", False)
    refuse_rest(rest)
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
    hf_architectures="MixtralForCausalLM",
    read_hf=_mixtral_from_hf,
    write_hf=_mixtral_to_hf,
    tensors=_mixtral_tensors,
)
