"""GPT-2: LayerNorm, learned positions, GELU without a gate, and a bias on every matrix. M6-T: a GPT
whose MLPs are experts in sets ("prototypes"), with one expert of each set for a token."""

from typing import Any

from jaxscale.model_families.family import EXPERTS, Family, HfConfig, HfKey, Model, TensorRule
from jaxscale.model_families.hf.config import activation_key, refuse_options
from jaxscale.model_families.hf.tensors import norm_rules, outer, stored, vector

LAYER = "transformer.h.{layer}"


def _from_hf(hf: HfConfig) -> dict[str, Any]:
    d_model, heads = hf.read("n_embd"), hf.read("n_head")
    # An older name of n_positions, and the precision of scores, which is float32 in any case.
    hf.ignore("n_ctx", "reorder_and_upcast_attn")
    return {
        "d_ff": hf.read("n_inner", None) or 4 * d_model,
        "num_kv_heads": heads,
        "head_dim": d_model // heads,
        "attention_scale_dim": 0.0 if hf.read("scale_attn_weights", True) else 1.0,
    }


def _to_hf(model: Model) -> dict[str, Any]:
    refuse_options(
        model,
        num_kv_heads=model.num_heads,
        head_dim=model.d_model // model.num_heads,
        qk_norm=False,
        sliding_window=0,
        logit_soft_cap=0.0,
    )
    if model.attention_scale_dim not in (0, 1, model.head_dim):
        refuse_options(model, attention_scale_dim=model.head_dim)
    return {"n_inner": model.d_ff, "scale_attn_weights": model.attention_scale_dim != 1}


def _tensors(model: Model) -> tuple[TensorRule, ...]:
    d_model, fused = model.d_model, f"{LAYER}.attn.c_attn"
    rules = [*outer(model, "transformer.wte.weight", "transformer.ln_f", "lm_head.weight")]
    rules.append(stored("embed/positions", "transformer.wpe.weight", model.max_seq_len, d_model))
    rules += norm_rules(model, "layers/attention_norm", f"{LAYER}.ln_1")
    rules += norm_rules(model, "layers/mlp_norm", f"{LAYER}.ln_2")
    for index, letter in enumerate("qkv"):
        param, three = f"layers/attention/{letter}", (d_model, 3, d_model)
        take, shape = (slice(None), index), (d_model, 3 * d_model)
        rules += [
            TensorRule(param, f"{fused}.weight", three, (0, 1), take, shape),
            TensorRule(f"{param}_bias", f"{fused}.bias", three[1:], (0,), take[1:], shape[1:]),
        ]
    # Matrices are stored as [inputs, outputs], like ours.
    for param, name, inputs, outputs in (
        ("attention/out", "attn.c_proj", d_model, d_model),
        ("mlp/up", "mlp.c_fc", d_model, model.d_ff),
        ("mlp/down", "mlp.c_proj", model.d_ff, d_model),
    ):
        rules.append(stored(f"layers/{param}", f"{LAYER}.{name}.weight", inputs, outputs))
        rules.append(vector(f"layers/{param}_bias", f"{LAYER}.{name}.bias", outputs))
    return tuple(rules)


GPT = Family(
    name="gpt",
    paper="GPT-2, Language Models are Unsupervised Multitask Learners (2019)",
    settings={
        "norm_eps": 1e-5,
        "activation": "gelu_tanh",
        "attention_scale_dim": 0.0,
        "tied_embeddings": True,
        # For experiments; not in GPT-2.
        "qk_norm": False,
        "sliding_window": 0,
        "logit_soft_cap": 0.0,
    },
    fixed={
        "norm": "layer",
        "positions": "learned",
        "gated": False,
        "attention_bias": "all",
        "mlp_bias": True,
    },
    hf_types=("gpt2",),
    hf_architectures="GPT2LMHeadModel",
    read_hf=_from_hf,
    write_hf=_to_hf,
    tensors=_tensors,
    hf_keys=(
        HfKey("vocab_size", "vocab_size"),
        HfKey("n_embd", "d_model"),
        HfKey("n_layer", "num_layers"),
        HfKey("n_head", "num_heads"),
        HfKey("n_positions", "max_seq_len", 1024),
        activation_key("activation_function", "gelu_new"),
        HfKey("layer_norm_epsilon", "norm_eps", 1e-5),
        HfKey("tie_word_embeddings", "tied_embeddings", True),
    ),
    hf_expected={
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "is_encoder_decoder": (False,),
    },
    hf_prefix="transformer.",
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)


def _m6_t_to_hf(model: Model) -> dict[str, Any]:
    raise ValueError(
        f"model.family = {model.family!r} has no Hugging Face format; keep its checkpoints as runs"
    )


M6_T = Family(
    name="m6_t",
    paper="M6-T: Exploring Sparse Expert Models and Beyond, arXiv 2105.15082",
    settings={
        **EXPERTS,
        "norm_eps": 1e-5,
        "activation": "gelu_tanh",
        "tied_embeddings": True,
        "num_experts": 32,
        "experts_per_token": 2,
        "capacity_factor": 1.25,
        "balance_weight": 0.0,  # the paper's models are better without it
        "router_jitter": 0.0,
    },
    fixed={
        "norm": "layer",
        "positions": "learned",
        "gated": False,
        "attention_bias": "all",
        "router": "prototypes",
    },
    hf_types=(),
    hf_architectures="",
    read_hf=lambda hf: dict(hf.keys),
    write_hf=_m6_t_to_hf,
    tensors=lambda model: (),
)
