"""GPT-NeoX and Pythia: attention and MLP in parallel, and rotary positions on part of a head."""

from typing import Any

from jaxscale.model_families.family import ROPE, Family, HfConfig, Model, TensorRule
from jaxscale.model_families.hf.config import (
    activation_from_hf,
    activation_to_hf,
    bias_from_hf,
    head_size_of,
    refuse_options,
    rope_from_hf,
    rope_given,
    rope_to_hf,
    sizes_from_hf,
    sizes_to_hf,
)
from jaxscale.model_families.hf.tensors import matrix, norm_rules, outer, vector

LAYER = "gpt_neox.layers.{layer}"


def _from_hf(hf: HfConfig) -> dict[str, Any]:
    rope = rope_given(hf)
    share = rope.pop("partial_rotary_factor", hf.read("rotary_pct", 0.25))
    hf.expect("partial_rotary_factor", share)  # which transformers 4 writes beside it
    ours = {
        **rope_from_hf(hf, hf.read("rotary_emb_base", 10_000.0), rope),
        **sizes_from_hf(hf),
        "rope_share": share,
        "activation": activation_from_hf(hf, "hidden_act", "gelu"),
        "norm_eps": hf.read("layer_norm_eps", 1e-5),
        "attention_bias": bias_from_hf(hf, True),
        "parallel_block": hf.read("use_parallel_residual", True),
        "tied_embeddings": hf.read("tie_word_embeddings", False),
    }
    hf.ignore("is_decoder")
    return ours


def _to_hf(model: Model) -> dict[str, Any]:
    refuse_options(model, num_kv_heads=model.num_heads, head_dim=head_size_of(model))
    sizes, rope = sizes_to_hf(model), rope_to_hf(model)
    del sizes["num_key_value_heads"], sizes["head_dim"]
    return {
        **sizes,
        "rotary_emb_base": rope["rope_theta"],
        "rope_scaling": rope["rope_scaling"],
        "rotary_pct": model.rope_share,
        "hidden_act": activation_to_hf(model),
        "layer_norm_eps": model.norm_eps,
        "attention_bias": model.attention_bias == "all",
        "use_parallel_residual": model.parallel_block,
        "tie_word_embeddings": model.tied_embeddings,
    }


def _tensors(model: Model) -> tuple[TensorRule, ...]:
    d_model, heads, size = model.d_model, model.num_heads, model.head_dim
    fused, bias = f"{LAYER}.attention.query_key_value", model.attention_bias == "all"
    rules = [
        *outer(
            model,
            "gpt_neox.embed_in.weight",
            "gpt_neox.final_layer_norm",
            "embed_out.weight",
        )
    ]
    rules += norm_rules(model, "layers/attention_norm", f"{LAYER}.input_layernorm")
    rules += norm_rules(model, "layers/mlp_norm", f"{LAYER}.post_attention_layernorm")
    # Query, key and value of a head lie side by side.
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
    hf_architectures="GPTNeoXForCausalLM",
    read_hf=_from_hf,
    write_hf=_to_hf,
    tensors=_tensors,
    hf_prefix="gpt_neox.",
    ignored=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
)
