"""Llama: RMSNorm, rotary positions, SwiGLU."""

from typing import Any

from jaxscale.model_families.tensor_rule import TensorRule

HF_TYPE = "llama"
HF_ARCHITECTURE = "LlamaForCausalLM"
IGNORED = ("*.rotary_emb.inv_freq",)
UNUSED = (
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "model_type",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "pretraining_tp",
)


def from_hf(hf: dict[str, Any]) -> dict[str, Any]:
    """Our settings, from those of config.json."""
    settings = {
        "family": "llama",
        "num_layers": hf["num_hidden_layers"],
        "d_model": hf["hidden_size"],
        "num_heads": hf["num_attention_heads"],
        "num_kv_heads": hf.get("num_key_value_heads", hf["num_attention_heads"]),
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        "d_ff": hf["intermediate_size"],
        "vocab_size": hf["vocab_size"],
        "rope_theta": float(hf.get("rope_theta", 10_000.0)),
        "tied_embeddings": hf.get("tie_word_embeddings", False),
    }
    known = {
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "rope_theta",
        "tie_word_embeddings",
        "hidden_act",
        "attention_bias",
        "mlp_bias",
        "attention_dropout",
        "rms_norm_eps",
        "rope_scaling",
        *UNUSED,
    }
    for name in hf:
        if name not in known:
            raise ValueError(f"unknown setting {name}")
    return settings


def to_hf(model: Any) -> dict[str, Any]:
    """config.json of a model."""
    return {
        "architectures": [HF_ARCHITECTURE],
        "model_type": HF_TYPE,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.d_model,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.d_ff,
        "vocab_size": model.vocab_size,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-6,
    }


def tensors(model: Any) -> tuple[TensorRule, ...]:
    """Where each parameter is."""
    d, f, v = model.d_model, model.d_ff, model.vocab_size
    n, k, h = model.num_heads, model.num_kv_heads, model.head_dim
    layer = "model.layers.{layer}."

    def heads(param: str, name: str, count: int) -> TensorRule:
        name = f"{layer}self_attn.{name}.weight"
        return TensorRule(param, name, (count * h, d), (1, 0))

    def matrix(param: str, name: str, shape: tuple[int, int]) -> TensorRule:
        return TensorRule(param, name, shape, (1, 0))

    def vector(param: str, name: str) -> TensorRule:
        return TensorRule(param, name, (d,), (0,))

    embedding = TensorRule("embed/tokens", "model.embed_tokens.weight", (v, d), (0, 1))
    if model.tied_embeddings:
        head = TensorRule("embed/tokens", "lm_head.weight", (v, d), (0, 1))
    else:
        head = matrix("head/output", "lm_head.weight", (v, d))
    out = f"{layer}self_attn.o_proj.weight"
    return (
        embedding,
        vector("layers/attention_norm/scale", f"{layer}input_layernorm.weight"),
        heads("layers/attention/q", "q_proj", n),
        heads("layers/attention/k", "k_proj", k),
        heads("layers/attention/v", "v_proj", k),
        TensorRule("layers/attention/out", out, (d, n * h), (1, 0)),
        vector("layers/mlp_norm/scale", f"{layer}post_attention_layernorm.weight"),
        matrix("layers/mlp/gate", f"{layer}mlp.gate_proj.weight", (f, d)),
        matrix("layers/mlp/up", f"{layer}mlp.up_proj.weight", (f, d)),
        matrix("layers/mlp/down", f"{layer}mlp.down_proj.weight", (d, f)),
        vector("head/norm/scale", "model.norm.weight"),
        head,
    )
