"""gpt-oss: experts with biases and clamped gates, attention sinks, every second layer local."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxscale.model_families.family import (
    EXPERTS,
    ROPE,
    Family,
    HfConfig,
    HfKey,
    Model,
    TensorRule,
)
from jaxscale.model_families.hf.config import (
    experts_from_hf,
    experts_to_hf,
    llama_to_hf,
    local_layers_from_hf,
    local_layers_to_hf,
    rope_from_hf,
    rope_given,
    sizes_from_hf,
)
from jaxscale.model_families.hf.tensors import (
    LAYER,
    attention_rules,
    layer_norms,
    llama_outer,
    matrix,
    vector,
)

ROPE_DEFAULTS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

HF_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
}
HF_FIXED: Mapping[str, Any] = {"hidden_act": "silu", "swiglu_alpha": 1.702, "attention_bias": True}
"""Keys that have one value in every model of the family."""


def _from_hf(hf: HfConfig) -> dict[str, Any]:
    sizes = sizes_from_hf(hf)
    # Published files have these in addition to equivalent keys.
    hf.ignore("experts_per_token", "initial_context_length")
    return {
        **rope_from_hf(hf, 150_000.0, rope_given(hf) or ROPE_DEFAULTS),
        **sizes,
        **experts_from_hf(hf, experts=128, per_token=4, layers=sizes["num_layers"]),
        **local_layers_from_hf(hf, sizes["num_layers"], hf.read("sliding_window"), period=2),
    }


def _to_hf(model: Model) -> dict[str, Any]:
    if not model.mlp_limit:
        raise ValueError(
            "model.mlp_limit = 0 cannot be written in Hugging Face's format of gpt_oss models, "
            "whose experts have a limit; set model.mlp_limit = 7.0 as in the published models"
        )
    written = {**llama_to_hf(model), **experts_to_hf(model), **HF_FIXED}
    # Without the key, transformers' default is YaRN.
    written["rope_scaling"] = written["rope_scaling"] or {"rope_type": "default"}
    return {**written, **local_layers_to_hf(model)}


def _expert_rules(model: Model) -> Iterator[TensorRule]:
    """The rules of the experts: one tensor for all of a layer, with gates and ups interleaved."""
    experts, width, hidden = model.num_experts, model.d_model, model.expert_d_ff or model.d_ff
    ours, theirs = "layers/mlp", f"{LAYER}.mlp"
    yield matrix(f"{ours}/router", f"{theirs}.router.weight", width, experts)
    yield vector(f"{ours}/logit_bias", f"{theirs}.router.bias", experts)
    for number, part in enumerate(("gate", "up")):
        name, take = f"{theirs}.experts.gate_up_proj", (slice(None), slice(None), slice(None))
        view, shape = (experts, width, hidden, 2), (experts, width, 2 * hidden)
        yield TensorRule(f"{ours}/{part}", name, view, (0, 1, 2), (*take, number), shape)
        view, shape = (experts, hidden, 2), (experts, 2 * hidden)
        taken = (*take[1:], number)
        yield TensorRule(f"{ours}/{part}_bias", f"{name}_bias", view, (0, 1), taken, shape)
    name, shape = f"{theirs}.experts.down_proj", (experts, hidden, width)
    yield TensorRule(f"{ours}/down", name, shape, (0, 1, 2))
    yield TensorRule(f"{ours}/down_bias", f"{name}_bias", (experts, width), (0, 1))


def _tensors(model: Model) -> tuple[TensorRule, ...]:
    sinks = vector("layers/attention/sinks", f"{LAYER}.self_attn.sinks", model.num_heads)
    layer = (*layer_norms(model), *attention_rules(model), sinks, *_expert_rules(model))
    return (*llama_outer(model), *layer)


GPT_OSS = Family(
    name="gpt_oss",
    paper="gpt-oss, arXiv 2508.10925",
    settings={
        **ROPE,
        **EXPERTS,
        "rope_theta": 150_000.0,
        "norm_eps": 1e-5,
        "sliding_window": 128,
        "layer_pattern": "LG",
        "tied_embeddings": False,
        "num_experts": 32,
        "experts_per_token": 4,
        "mlp_limit": 7.0,
    },
    fixed={
        "activation": "quick_gelu",
        "attention_bias": "all",
        "attention_sinks": True,
        "mlp_bias": True,
        "router_logit_bias": True,
        "router_scores": "softmax_of_chosen",
    },
    hf_types=("gpt_oss",),
    hf_defaults=HF_DEFAULTS,
    hf_architectures="GptOssForCausalLM",
    read_hf=_from_hf,
    write_hf=_to_hf,
    tensors=_tensors,
    hf_keys=(
        HfKey("swiglu_limit", "mlp_limit", 7.0),
        HfKey("rms_norm_eps", "norm_eps", 1e-5),
        HfKey("tie_word_embeddings", "tied_embeddings", False),
    ),
    hf_expected={key: (value,) for key, value in HF_FIXED.items()},
)
