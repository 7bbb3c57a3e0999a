"""OLMo 2: norms after attention and MLP, and of queries and keys over all heads; OLMo 3: an OLMo 2
with a sliding window in three of four layers, in which RoPE is not scaled."""

import functools
from collections.abc import Mapping
from typing import Any

from jaxscale.model_families.family import ROPE, Family, HfConfig, Model
from jaxscale.model_families.hf.config import (
    ATTENTION_BIAS,
    GLOBAL,
    LLAMA_KEYS,
    LOCAL,
    llama_from_hf,
    llama_to_hf,
    local_layers_from_hf,
    local_layers_to_hf,
    ropes_by_layer_from_hf,
    sizes_from_hf,
)
from jaxscale.model_families.hf.tensors import llama_tensors


def _olmo3_from_hf(hf: HfConfig) -> dict[str, Any]:
    window = hf.read("sliding_window", 4096)
    ours = {**ropes_by_layer_from_hf(hf, 500_000.0), **sizes_from_hf(hf)}
    return {**ours, **local_layers_from_hf(hf, ours["num_layers"], window, period=4)}


def _olmo3_to_hf(model: Model) -> dict[str, Any]:
    hf = llama_to_hf(model)
    far = hf["rope_scaling"] or {"rope_type": "default"}
    near = {"rope_type": "default", "rope_theta": model.local_rope_theta}
    both = {GLOBAL: {**far, "rope_theta": model.rope_theta}, LOCAL: near}
    if model.local_rope_theta != model.rope_theta:  # transformers 4 has a single base
        del hf["rope_theta"], hf["rope_scaling"]
    return {**hf, **local_layers_to_hf(model), "rope_parameters": both}


SETTINGS: Mapping[str, Any] = {
    **ROPE,
    "rope_theta": 500_000.0,
    "norm_eps": 1e-6,
    "activation": "silu",
    "attention_bias": "none",
    "tied_embeddings": False,
}
FIXED = {"norm_placement": "after", "qk_norm": True, "qk_norm_over_heads": True}
HF_DEFAULTS = {"rms_norm_eps": 1e-5}
HF_KEYS = (*LLAMA_KEYS, ATTENTION_BIAS)

_tensors = functools.partial(
    llama_tensors,
    norms={
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
)

OLMO2 = Family(
    name="olmo2",
    paper="2 OLMo 2 Furious, arXiv 2501.00656",
    settings=SETTINGS,
    fixed=FIXED,
    hf_types=("olmo2",),
    hf_defaults=HF_DEFAULTS,
    hf_architectures="Olmo2ForCausalLM",
    read_hf=llama_from_hf,
    write_hf=llama_to_hf,
    tensors=_tensors,
    hf_keys=HF_KEYS,
)

OLMO3 = Family(
    name="olmo3",
    paper="Olmo 3, arXiv 2512.13961",
    settings={
        **SETTINGS,
        "local_rope_theta": 500_000.0,
        "sliding_window": 4096,
        "layer_pattern": "LLLG",
    },
    fixed=FIXED,
    hf_types=("olmo3",),
    hf_defaults=HF_DEFAULTS,
    hf_architectures="Olmo3ForCausalLM",
    read_hf=_olmo3_from_hf,
    write_hf=_olmo3_to_hf,
    tensors=_tensors,
    hf_keys=HF_KEYS,
)
