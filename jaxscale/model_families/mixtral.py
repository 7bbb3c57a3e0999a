"""Mixtral: a Mistral with experts."""

from collections.abc import Mapping
from typing import Any

from jaxscale.model_families.family import ROPE, Family, Model


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    raise NotImplementedError


def _to_hf(model: Model) -> dict[str, Any]:
    raise NotImplementedError


MIXTRAL = Family(
    name="mixtral",
    paper="Mixtral of Experts, arXiv 2401.04088",
    settings={
        **ROPE,
        "rope_theta": 1_000_000.0,
        "norm_eps": 1e-5,
        "activation": "silu",
        "sliding_window": 0,
        "tied_embeddings": False,
        "num_experts": 8,
        "experts_per_token": 2,
        "capacity_factor": 0.0,
        "balance": "sequence",
        "balance_weight": 0.01,
        "router_z_loss": 0.0,
        "dense_layers": 0,
        "shared_d_ff": 0,
        "router_bias": False,
        "balance_rate": 0.0,
        "router": "top_k",
    },
    fixed={"router_scores": "softmax_of_chosen"},
    hf_types=("mixtral",),
    hf_architectures="MixtralForCausalLM",
    read_hf=_from_hf,
    write_hf=_to_hf,
    tensors=lambda model: (),
)
