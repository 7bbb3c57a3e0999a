"""DeepSeek-V3: multi-head latent attention (MLA); routed experts, balanced by biases, and a shared
one, except in the first layers; optional multi-token prediction (MTP) modules at the end."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxscale.model_families.family import ROPE, Family, HfConfig, HfKey, Model, TensorRule
from jaxscale.model_families.hf.config import (
    llama_from_hf,
    llama_to_hf,
    optional_key,
    rope_given,
)
from jaxscale.model_families.hf.tensors import LAYER, expert_tensors, matrix, vector

FIXED: Mapping[str, Any] = {
    "router_scores": "sigmoid",
    "router_normalized": True,
    "router_bias": True,
}
HF_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "rope_interleave": (True,),
    "norm_topk_prob": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
"""Keys that have one value in every model of the family."""
UNREAD = (
    "aux_loss_alpha",
    "ep_size",
    "head_dim",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "output_router_logits",
    "qk_head_dim",
    "seq_aux",
)
"""Keys of training or of MTP modules, which are read if a run has some; and derived sizes."""


def _from_hf(hf: HfConfig) -> dict[str, Any]:
    hf.ignore(*UNREAD)
    turned, expert = hf.read("qk_rope_head_dim", 64), hf.read("moe_intermediate_size", 2048)
    other = hf.read("num_local_experts", 256)
    return {
        **llama_from_hf(hf),
        "rope_mscale": rope_given(hf).get("mscale_all_dim") or 0.0,
        "head_dim": hf.read("qk_nope_head_dim", 128) + turned,
        "rope_head_dim": turned,
        "value_head_dim": hf.read("v_head_dim", 128),
        "num_experts": hf.read("n_routed_experts", other),
        "expert_d_ff": expert,
        "shared_d_ff": hf.read("n_shared_experts", 1) * expert,
    }


def _to_hf(model: Model) -> dict[str, Any]:
    expert = model.expert_d_ff or model.d_ff
    if model.shared_d_ff % expert or not model.shared_d_ff:
        raise ValueError(
            f"model.shared_d_ff = {model.shared_d_ff} cannot be written in Hugging Face's format "
            f"of {model.family} models; make it a multiple of model.expert_d_ff = {expert}"
        )
    if model.num_experts == 1:  # transformers adds the two best scores of each group
        raise ValueError(
            f"model.num_experts = 1 cannot be written in Hugging Face's format of {model.family} "
            "models; it must be at least 2"
        )
    written = llama_to_hf(model)
    del written["head_dim"]
    if model.rope_mscale and written["rope_scaling"]:
        written["rope_scaling"]["mscale_all_dim"] = model.rope_mscale
    return {
        **written,
        "qk_nope_head_dim": model.head_dim - model.rope_head_dim,
        "qk_rope_head_dim": model.rope_head_dim,
        "v_head_dim": model.value_dim,
        "n_routed_experts": model.num_experts,
        "moe_intermediate_size": expert,
        "n_shared_experts": model.shared_d_ff // expert,
        "num_nextn_predict_layers": model.prediction_depth,
        **{key: value for key, (value,) in HF_FIXED.items()},
    }


def _attention_rules(model: Model) -> Iterator[TensorRule]:
    """Attention's rules: DeepSeek rotates pairs of neighbouring features, we rotate two halves."""
    heads, turned, rank = model.num_heads, model.rope_head_dim, model.kv_rank
    plain, query = model.head_dim - turned, model.query_rank or model.d_model
    ours, theirs = "layers/attention", f"{LAYER}.self_attn"
    if model.query_rank:
        yield matrix(f"{ours}/q_down", f"{theirs}.q_a_proj.weight", model.d_model, query)
        yield vector(f"{ours}/q_scale", f"{theirs}.q_a_layernorm.weight", query)
    name = f"{theirs}.{'q_b_proj' if model.query_rank else 'q_proj'}.weight"
    shape = (heads * model.head_dim, query)
    yield _part(f"{ours}/q_plain", name, shape, (heads, model.head_dim, query), slice(plain))
    yield TensorRule(
        f"{ours}/q_turned",
        name,
        (heads, model.head_dim // 2, 2, query),
        (3, 0, 2, 1),
        (slice(None), slice(plain // 2, None)),
        shape,
    )
    name, shape = f"{theirs}.kv_a_proj_with_mqa.weight", (rank + turned, model.d_model)
    yield TensorRule(f"{ours}/kv_down", name, shape, (1, 0), (slice(rank),), shape)
    pairs = ((rank + turned) // 2, 2, model.d_model)
    take = (slice(rank // 2, None),)
    yield TensorRule(f"{ours}/k_turned", name, pairs, (2, 1, 0), take, shape)
    yield vector(f"{ours}/kv_scale", f"{theirs}.kv_a_layernorm.weight", rank)
    name, width = f"{theirs}.kv_b_proj.weight", plain + model.value_dim
    shape, view = (heads * width, rank), (heads, width, rank)
    yield _part(f"{ours}/k_plain", name, shape, view, slice(plain))
    yield _part(f"{ours}/v", name, shape, view, slice(plain, None))
    values = heads * model.value_dim
    yield matrix(f"{ours}/out", f"{theirs}.o_proj.weight", values, model.d_model)


def _part(
    param: str, name: str, shape: tuple[int, ...], view: tuple[int, ...], features: slice
) -> TensorRule:
    """The rule of some features of each head, a slice of `view`'s last dimension."""
    return TensorRule(param, name, view, (2, 0, 1), (slice(None), features), shape)


def _tensors(model: Model) -> tuple[TensorRule, ...]:
    return expert_tensors(model, attention=_attention_rules)


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    paper="DeepSeek-V3, arXiv 2412.19437",
    settings={
        **ROPE,
        "rope_mscale": 0.0,
        "norm_eps": 1e-6,  # always this for the norms of compressed queries, keys and values
        # Sizes are as small as the default sizes of every family.
        "kv_rank": 32,
        "query_rank": 0,
        "rope_head_dim": 8,
        "value_head_dim": 0,
        "expert_d_ff": 0,
        "shared_d_ff": 256,
        "num_experts": 256,
        "experts_per_token": 8,
        "dense_layers": 1,
        "router_scale": 2.5,
        "router_groups": 8,
        "router_groups_kept": 4,
        "balance_rate": 0.001,
        "balance_weight": 0.0001,
        "prediction_depth": 0,
        "prediction_weight": 0.3,
    },
    fixed=FIXED,
    hf_types=("deepseek_v3",),
    hf_defaults={"max_position_embeddings": 4096},
    hf_architectures="DeepseekV3ForCausalLM",
    read_hf=_from_hf,
    write_hf=_to_hf,
    tensors=_tensors,
    hf_keys=(
        HfKey("rms_norm_eps", "norm_eps", 1e-6),
        HfKey("kv_lora_rank", "kv_rank", 512),
        optional_key("q_lora_rank", "query_rank", 1536),
        HfKey("num_experts_per_tok", "experts_per_token", 8),
        HfKey("first_k_dense_replace", "dense_layers", 3),
        HfKey("routed_scaling_factor", "router_scale", 2.5),
        HfKey("n_group", "router_groups", 8),
        HfKey("topk_group", "router_groups_kept", 4),
    ),
    hf_expected=HF_FIXED,
    # As in transformers; in the published model these layers are the MTP module.
    left_out=("model.layers.{layers}.*",),
)
