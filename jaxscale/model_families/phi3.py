"""Phi-3: a Llama whose checkpoints fuse projections; RoPE may rotate only a part of a head."""

from typing import Any

from jaxscale.model_families.family import ROPE, Family, HfConfig, Model, TensorRule
from jaxscale.model_families.hf.config import (
    LLAMA_KEYS,
    llama_to_hf,
    optional_key,
    refuse_options,
    rope_from_hf,
    rope_given,
    sizes_from_hf,
)
from jaxscale.model_families.hf.tensors import LAYER, layer_norms, llama_outer, matrix


def _from_hf(hf: HfConfig) -> dict[str, Any]:
    rope = rope_given(hf)
    kind = rope.setdefault("rope_type", rope.pop("type", None) or "default")
    if kind in ("su", "yarn"):  # its first names
        rope["rope_type"] = "longrope"
    if rope["rope_type"] not in ("default", "longrope"):
        raise ValueError(
            f"config.json has rope_type = {kind!r}; for phi3 it can be 'default' or 'longrope'"
        )
    share = rope.pop("partial_rotary_factor", hf.read("partial_rotary_factor", 1.0))
    original = hf.read("original_max_position_embeddings", 4096)
    if rope["rope_type"] == "longrope":
        rope["original_max_position_embeddings"] = original
    return {**rope_from_hf(hf, given=rope), **sizes_from_hf(hf), "rope_share": share}


def _to_hf(model: Model) -> dict[str, Any]:
    scaled = model.rope_scaling == "longrope"
    if not scaled:
        refuse_options(model, rope_scaling="none")
    written = llama_to_hf(model)
    # As published, and the only value in transformers 4, which computes all three this way.
    factor = max(model.max_seq_len / model.rope_original_context, 1.0)
    if scaled and factor == model.rope_factor and not model.rope_attention_factor:
        lists = {key: written["rope_scaling"][key] for key in ("short_factor", "long_factor")}
        written["rope_scaling"] = {"type": "longrope", **lists}
    return {
        **written,
        "partial_rotary_factor": model.rope_share,
        "original_max_position_embeddings": (
            model.rope_original_context if scaled else model.max_seq_len
        ),
    }


def _tensors(model: Model) -> tuple[TensorRule, ...]:
    heads, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim

    def parts(name: str, **widths: int) -> list[TensorRule]:
        total, end, rules = sum(widths.values()), 0, []
        for param, width in widths.items():
            start, end = end, end + width
            rules.append(
                TensorRule(
                    f"layers/{param}",
                    f"{LAYER}.{name}.weight",
                    (total, model.d_model),
                    (1, 0),
                    (slice(start, end),),
                )
            )
        return rules

    qkv = {"attention/q": heads, "attention/k": keys, "attention/v": keys}
    return (
        *llama_outer(model),
        *layer_norms(model),
        *parts("self_attn.qkv_proj", **qkv),
        matrix("layers/attention/out", f"{LAYER}.self_attn.o_proj.weight", heads, model.d_model),
        *parts("mlp.gate_up_proj", **{"mlp/gate": model.d_ff, "mlp/up": model.d_ff}),
        matrix("layers/mlp/down", f"{LAYER}.mlp.down_proj.weight", model.d_ff, model.d_model),
    )


PHI3 = Family(
    name="phi3",
    paper="Phi-3, arXiv 2404.14219",
    settings={
        **ROPE,
        "rope_share": 1.0,
        "norm_eps": 1e-5,
        "activation": "silu",
        "sliding_window": 0,
        "tied_embeddings": False,
    },
    fixed={},
    hf_types=("phi3",),
    hf_defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    hf_architectures="Phi3ForCausalLM",
    read_hf=_from_hf,
    write_hf=_to_hf,
    tensors=_tensors,
    hf_keys=(*LLAMA_KEYS, optional_key("sliding_window", "sliding_window")),
    hf_expected={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "lm_head_bias": (False,),
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    },
)
