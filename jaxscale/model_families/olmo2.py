"""OLMo 2: norms after attention and MLP, and of queries and keys over all heads."""

import functools
from collections.abc import Mapping
from typing import Any

from jaxscale.model_families.family import ROPE, Family, Model
from jaxscale.model_families.hf.config import (
    activation_to_hf,
    pop,
    pop_activation,
    pop_bias,
    pop_rope,
    pop_sizes,
    refuse_rest,
    rope_to_hf,
    sizes_to_hf,
)
from jaxscale.model_families.hf.tensors import llama_tensors


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    rest = dict(hf)
    ours = {
        **pop_rope(rest),
        **pop_sizes(rest),
        "activation": pop_activation(rest, "hidden_act", "silu"),
        "norm_eps": pop(rest, "rms_norm_eps", 1e-5),
        "attention_bias": pop_bias(rest),
        "tied_embeddings": pop(rest, "tie_word_embeddings", False),
    }
    refuse_rest(rest)
    return ours


def _to_hf(model: Model) -> dict[str, Any]:
    return {
        **sizes_to_hf(model),
        **rope_to_hf(model),
        "hidden_act": activation_to_hf(model),
        "rms_norm_eps": model.norm_eps,
        "attention_bias": model.attention_bias == "all",
        "tie_word_embeddings": model.tied_embeddings,
    }


OLMO2 = Family(
    name="olmo2",
    paper="2 OLMo 2 Furious, arXiv 2501.00656",
    settings={
        **ROPE,
        "rope_theta": 500_000.0,
        "norm_eps": 1e-6,
        "activation": "silu",
        "attention_bias": "none",
        "tied_embeddings": False,
    },
    fixed={"norm_placement": "after", "qk_norm": True, "qk_norm_over_heads": True},
    hf_types=("olmo2",),
    hf_architectures="Olmo2ForCausalLM",
    read_hf=_from_hf,
    write_hf=_to_hf,
    tensors=functools.partial(
        llama_tensors,
        norms={
            "attention_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
    ),
)
