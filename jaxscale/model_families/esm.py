"""ESM-2: a masked language model of proteins, with norms before attention and MLP, and RoPE."""

from typing import Any

from jaxscale.model_families.bert import (
    FIXED,
    HF_EXPECTED,
    NORM_EPS,
    RENAMED,
    encoder_to_hf,
    head_tensors,
    layer_tensors,
)
from jaxscale.model_families.family import Family, HfConfig, HfKey, Model, TensorRule
from jaxscale.model_families.hf.config import llama_from_hf
from jaxscale.model_families.hf.tensors import norm_rules, outer


def _esm_from_hf(hf: HfConfig) -> dict[str, Any]:
    mask = hf.read("mask_token_id", None)
    ours = {**llama_from_hf(hf), "dropped_token": -1}
    if hf.read("token_dropout", False):
        if mask is None:
            raise ValueError("config.json has token_dropout = true and no mask_token_id")
        ours["dropped_token"] = mask
    # ESM-1 and ESM-1b have learned positions.
    if hf.read("position_embedding_type", "absolute") != "rotary":
        raise ValueError(
            "config.json has position_embedding_type = 'absolute', as in ESM-1b; for esm it must "
            "be 'rotary', as in ESM-2"
        )
    return ours


def _esm_to_hf(model: Model) -> dict[str, Any]:
    drops = model.dropped_token >= 0
    return {
        **encoder_to_hf(model),
        "rope_theta": model.rope_theta,
        "position_embedding_type": "rotary",
        "token_dropout": drops,
        **({"mask_token_id": model.dropped_token} if drops else {}),
    }


def _esm_tensors(model: Model) -> tuple[TensorRule, ...]:
    embeddings, decoder = "esm.embeddings", "lm_head.decoder.weight"
    norms = {"attention_norm": "attention.LayerNorm", "mlp_norm": "LayerNorm"}
    before = norm_rules(model, "embed/norm", f"{embeddings}.layer_norm")
    final = "esm.encoder.emb_layer_norm_after"
    return (
        *outer(model, f"{embeddings}.word_embeddings.weight", final, decoder),
        *(before if model.embedding_norm else ()),
        *layer_tensors(model, "esm.encoder.layer.{layer}", norms),
        *head_tensors(model, "lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    )


ESM = Family(
    name="esm",
    paper="ESM-2, Science 379 (2023), 10.1126/science.ade2574",
    settings={
        "rope_theta": 10_000.0,
        "norm_eps": 1e-5,
        "embedding_norm": False,
        "dropped_token": 32,
        "causal": False,  # True continues a masked model as a causal one
    },
    fixed={**FIXED, "activation": "gelu"},
    hf_types=("esm",),
    hf_defaults={"max_position_embeddings": 1026},
    hf_architectures="EsmForMaskedLM",
    read_hf=_esm_from_hf,
    write_hf=_esm_to_hf,
    tensors=_esm_tensors,
    hf_keys=(NORM_EPS, HfKey("emb_layer_norm_before", "embedding_norm", None, bool)),
    hf_expected={
        **HF_EXPECTED,
        "hidden_act": ("gelu",),
        "is_folding_model": (False,),
        "esmfold_config": (None,),
        "vocab_list": (None,),
    },
    hf_prefix="esm.",
    hf_renamed=RENAMED,
    # The published checkpoints contain a table of positions, which RoPE does not use.
    ignored=(
        "esm.embeddings.position_ids",
        "esm.embeddings.position_embeddings.weight",
        "*rotary_embeddings.inv_freq",
    ),
    # Masked prediction does not use the pooler and the contact head.
    left_out=("esm.pooler.dense.*", "esm.contact_head.*"),
)
