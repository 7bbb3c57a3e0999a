"""Qwen3-MoE: a Qwen3 with experts; the first layers, and others in a pattern, may be dense."""

from typing import Any

from jaxscale.model_families.family import EXPERTS, ROPE, Family, HfConfig, HfKey, Model
from jaxscale.model_families.hf.config import (
    ATTENTION_BIAS,
    LLAMA_KEYS,
    experts_from_hf,
    experts_to_hf,
    llama_from_hf,
    llama_to_hf,
)
from jaxscale.model_families.hf.tensors import expert_tensors

LONGEST_PATTERN = 8
"""The longest period of the pattern, in layers: a program has a body for each of them."""


def _from_hf(hf: HfConfig) -> dict[str, Any]:
    ours = llama_from_hf(hf)
    window = hf.read("sliding_window", 4096)
    hf.ignore("max_window_layers")  # in published files, but unused
    dense = _dense_layers_from_hf(hf, ours["num_layers"])
    pattern = dense["expert_pattern"] or "E"
    periods = (ours["num_layers"] - dense["dense_layers"]) // len(pattern)
    return {
        **ours,
        **experts_from_hf(hf, experts=128, per_token=8, layers=periods * pattern.count("E")),
        **dense,
        "expert_d_ff": hf.read("moe_intermediate_size", 768),
        "sliding_window": window or 0 if hf.read("use_sliding_window", False) else 0,
    }


def _dense_layers_from_hf(hf: HfConfig, num_layers: int) -> dict[str, Any]:
    """The settings of the dense layers: a number of first ones, and a pattern of the others.

    Raises:
      ValueError: all layers are dense, or the pattern is too long.
    """
    without = hf.read("mlp_only_layers", None) or []
    step = hf.read("decoder_sparse_step", 1)
    dense = [i for i in range(num_layers) if i in without or (i + 1) % step]
    letters = "".join("D" if i in dense else "E" for i in range(num_layers))
    for size in range(1, 1 + LONGEST_PATTERN):
        for first in range(letters.find("E") + 1):
            periods, rest_of_it = divmod(num_layers - first, size)
            pattern = letters[first : first + size]
            if not rest_of_it and pattern * periods == letters[first:]:
                return {"dense_layers": first, "expert_pattern": pattern if size > 1 else ""}
    raise ValueError(
        f"config.json has mlp_only_layers = {without} and decoder_sparse_step = {step}: of "
        f"{num_layers} layers {dense} have no experts; dense layers can be the first ones and a "
        f"pattern of at most {LONGEST_PATTERN} layers, but not all"
    )


def _to_hf(model: Model) -> dict[str, Any]:
    return {
        **llama_to_hf(model),
        **experts_to_hf(model, "num_experts"),
        "moe_intermediate_size": model.expert_d_ff or model.d_ff,
        "mlp_only_layers": [i for i in range(model.num_layers) if not model.has_experts(i)],
        "decoder_sparse_step": 1,
        "use_sliding_window": bool(model.sliding_window),
        "sliding_window": model.sliding_window or None,
    }


QWEN3_MOE = Family(
    name="qwen3_moe",
    paper="Qwen3, arXiv 2505.09388",
    settings={
        **ROPE,
        **EXPERTS,
        "rope_theta": 1_000_000.0,
        "norm_eps": 1e-6,
        "activation": "silu",
        "attention_bias": "none",
        "sliding_window": 0,
        "tied_embeddings": False,
        "num_experts": 128,
        "experts_per_token": 8,
        "expert_d_ff": 0,
        "dense_layers": 0,
        "expert_pattern": "",
        "router_normalized": True,
    },
    fixed={"qk_norm": True},
    hf_types=("qwen3_moe",),
    hf_defaults={"num_key_value_heads": 4, "max_position_embeddings": 32_768},
    hf_architectures="Qwen3MoeForCausalLM",
    read_hf=_from_hf,
    write_hf=_to_hf,
    tensors=expert_tensors,
    hf_keys=(*LLAMA_KEYS, ATTENTION_BIAS, HfKey("norm_topk_prob", "router_normalized", False)),
    hf_expected={
        "qkv_bias": (False,),
        "use_qk_norm": (True,),
        "shared_expert_intermediate_size": (0,),
    },
)
