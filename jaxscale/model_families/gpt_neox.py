"""GPT-NeoX and Pythia: attention and MLP in parallel, and RoPE on part of a head."""

from typing import Any

from jaxscale.model_families.family import ROPE, Family, HfConfig, HfKey, Model, TensorRule
from jaxscale.model_families.hf.config import (
    ATTENTION_BIAS,
    activation_key,
    plain_sizes_to_hf,
    rope_from_hf,
    rope_given,
    rope_to_hf,
    sizes_from_hf,
)
from jaxscale.model_families.hf.tensors import matrix, norm_rules, outer, vector

LAYER = "gpt_neox.layers.{layer}"


def _from_hf(hf: HfConfig) -> dict[str, Any]:
    rope = rope_given(hf)
    share = rope.pop("partial_rotary_factor", hf.read("rotary_pct", 0.25))
    hf.expect("partial_rotary_factor", share)  # transformers 4 writes both
    hf.ignore("is_decoder")
    base = hf.read("rotary_emb_base", 10_000.0)
    return {**rope_from_hf(hf, base, rope), **sizes_from_hf(hf), "rope_share": share}


def _to_hf(model: Model) -> dict[str, Any]:
    rope = rope_to_hf(model)
    return {
        **plain_sizes_to_hf(model),
        "rotary_emb_base": rope["rope_theta"],
        "rope_scaling": rope["rope_scaling"],
        "rotary_pct": model.rope_share,
    }


def _tensors(model: Model) -> tuple[TensorRule, ...]:
    d_model, heads, size = model.d_model, model.num_heads, model.head_dim
    fused, bias = f"{LAYER}.attention.query_key_value", model.attention_bias == "all"
    rules = [
        *outer(model, "gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm", "embed_out.weight")
    ]
    rules += norm_rules(model, "layers/attention_norm", f"{LAYER}.input_layernorm")
    rules += norm_rules(model, "layers/mlp_norm", f"{LAYER}.post_attention_layernorm")
    # Query, key and value of a head are adjacent.
    for index, letter in enumerate("qkv"):
        param, take = f"layers/attention/{letter}", (slice(None), index)
        view, shape = (heads, 3, size, d_model), (heads * 3 * size, d_model)
        rules.append(TensorRule(param, f"{fused}.weight", view, (2, 0, 1), take, shape))
        if bias:
            name = f"{fused}.bias"
            rules.append(TensorRule(f"{param}_bias", name, view[:3], (0, 1), take, shape[:1]))
    for param, name, inputs, outputs, biased in (
        ("attention/out", "attention.dense", heads * size, d_model, bias),
        ("mlp/up", "mlp.dense_h_to_4h", d_model, model.d_ff, True),
        ("mlp/down", "mlp.dense_4h_to_h", model.d_ff, d_model, True),
    ):
        rules.append(matrix(f"layers/{param}", f"{LAYER}.{name}.weight", inputs, outputs))
        if biased:
            rules.append(vector(f"layers/{param}_bias", f"{LAYER}.{name}.bias", outputs))
    return tuple(rules)


GPT_NEOX = Family(
    name="gpt_neox",
    paper="GPT-NeoX, arXiv 2204.06745; Pythia, arXiv 2304.01373",
    settings={
        **ROPE,
        "rope_share": 0.25,
        "norm_eps": 1e-5,
        "activation": "gelu",
        "attention_bias": "all",
        "parallel_block": True,
        "tied_embeddings": False,
    },
    fixed={"norm": "layer", "gated": False, "mlp_bias": True},
    hf_types=("gpt_neox",),
    hf_defaults={"attention_bias": True},
    hf_architectures="GPTNeoXForCausalLM",
    read_hf=_from_hf,
    write_hf=_to_hf,
    tensors=_tensors,
    hf_keys=(
        activation_key("hidden_act", "gelu"),
        HfKey("layer_norm_eps", "norm_eps", 1e-5),
        ATTENTION_BIAS,
        HfKey("use_parallel_residual", "parallel_block", True),
        HfKey("tie_word_embeddings", "tied_embeddings", False),
    ),
    hf_prefix="gpt_neox.",
    ignored=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
)
