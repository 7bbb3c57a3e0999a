"""BERT and ESM-2: both sides of a masked token predict it."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxscale.model_families.family import Family, Model
from jaxscale.model_families.hf_config import (
    activation_to_hf,
    expect,
    head_size_of,
    pop,
    pop_activation,
    pop_sizes,
    refuse_options,
    refuse_rest,
    sizes_to_hf,
)
from jaxscale.model_families.hf_tensors import matrix, norm_rules, outer, stored, vector
from jaxscale.model_families.tensor_rule import TensorRule

FIXED: Mapping[str, Any] = {
    "norm": "layer",
    "gated": False,
    "attention_bias": "all",
    "mlp_bias": True,
    "tied_embeddings": True,
    "head_transform": True,
}

RENAMED = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
"""The names of BERT's own code, which transformers still writes for some models."""


def _pop_both(rest: dict[str, Any]) -> dict[str, Any]:
    rest.setdefault("max_position_embeddings", 512)
    expect(rest, "is_decoder", False)
    expect(rest, "add_cross_attention", False)
    expect(rest, "tie_word_embeddings", True)
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        rest.pop(name, None)
    return {**pop_sizes(rest), "norm_eps": pop(rest, "layer_norm_eps", 1e-12)}


def _both_to_hf(model: Model) -> dict[str, Any]:
    refuse_options(
        model, causal=False, num_kv_heads=model.num_heads, head_dim=head_size_of(model)
    )
    sizes = sizes_to_hf(model)
    del sizes["num_key_value_heads"], sizes["head_dim"]
    return {**sizes, "layer_norm_eps": model.norm_eps}


def _bert_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    rest = dict(hf)
    ours = {
        **_pop_both(rest),
        "activation": pop_activation(rest, "hidden_act", "gelu"),
        "token_types": pop(rest, "type_vocab_size", 2),
    }
    expect(rest, "position_embedding_type", "absolute")
    rest.pop("gradient_checkpointing", None)
    refuse_rest(rest)
    return ours


def _bert_to_hf(model: Model) -> dict[str, Any]:
    return {
        **_both_to_hf(model),
        "hidden_act": activation_to_hf(model),
        "type_vocab_size": model.token_types,
    }


def _esm_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    rest = dict(hf)
    mask = pop(rest, "mask_token_id", None)
    if "rope_parameters" in rest:
        rest["rope_theta"] = (rest.pop("rope_parameters") or {}).get("rope_theta", 10_000.0)
    ours = {
        **_pop_both(rest),
        "rope_theta": pop(rest, "rope_theta", 10_000.0),
        "embedding_norm": bool(pop(rest, "emb_layer_norm_before", None)),
        "dropped_token": -1,
    }
    if pop(rest, "token_dropout", False):
        if mask is None:
            raise ValueError("config.json has token_dropout = true and no mask_token_id")
        ours["dropped_token"] = mask
    # ESM-1 and ESM-1b have a table of positions.
    if pop(rest, "position_embedding_type", "absolute") != "rotary":
        raise ValueError(
            "config.json has position_embedding_type = 'absolute', as ESM-1b; for esm it can be "
            "'rotary', as ESM-2"
        )
    expect(rest, "hidden_act", "gelu")
    expect(rest, "is_folding_model", False)
    for name in ("esmfold_config", "vocab_list"):
        expect(rest, name, None)
    refuse_rest(rest)
    return ours


def _esm_to_hf(model: Model) -> dict[str, Any]:
    drops = model.dropped_token >= 0
    return {
        **_both_to_hf(model),
        "rope_theta": model.rope_theta,
        "position_embedding_type": "rotary",
        "emb_layer_norm_before": model.embedding_norm,
        "token_dropout": drops,
        **({"mask_token_id": model.dropped_token} if drops else {}),
    }


def _layer_tensors(model: Model, layer: str, norms: Mapping[str, str]) -> Iterator[TensorRule]:
    """Attention, MLP and norms of a layer.

    Args:
      norms: ours -> theirs.
    """
    heads = model.num_heads * model.head_dim
    for ours, theirs in norms.items():
        yield from norm_rules(model, f"layers/{ours}", f"{layer}.{theirs}")
    for param, name, inputs, outputs in (
        ("attention/q", "attention.self.query", model.d_model, heads),
        ("attention/k", "attention.self.key", model.d_model, heads),
        ("attention/v", "attention.self.value", model.d_model, heads),
        ("attention/out", "attention.output.dense", heads, model.d_model),
        ("mlp/up", "intermediate.dense", model.d_model, model.d_ff),
        ("mlp/down", "output.dense", model.d_ff, model.d_model),
    ):
        yield matrix(f"layers/{param}", f"{layer}.{name}.weight", inputs, outputs)
        yield vector(f"layers/{param}_bias", f"{layer}.{name}.bias", outputs)


def _head_tensors(model: Model, dense: str, norm: str, bias: str) -> Iterator[TensorRule]:
    yield matrix("head/transform", f"{dense}.weight", model.d_model, model.d_model)
    yield vector("head/transform_bias", f"{dense}.bias", model.d_model)
    yield from norm_rules(model, "head/transform_norm", norm)
    yield vector("head/output_bias", bias, model.vocab_size)


def _bert_tensors(model: Model) -> tuple[TensorRule, ...]:
    embeddings, head = "bert.embeddings", "cls.predictions"
    norms = {
        "attention_post_norm": "attention.output.LayerNorm",
        "mlp_post_norm": "output.LayerNorm",
    }
    width, decoder, tokens = model.d_model, f"{head}.decoder", f"{embeddings}.word_embeddings.weight"
    return (
        stored("embed/tokens", tokens, model.vocab_size, width),
        stored("embed/tokens", f"{decoder}.weight", model.vocab_size, width),
        stored(
            "embed/positions", f"{embeddings}.position_embeddings.weight", model.max_seq_len, width
        ),
        stored(
            "embed/token_types",
            f"{embeddings}.token_type_embeddings.weight",
            model.token_types,
            width,
        ),
        *norm_rules(model, "embed/norm", f"{embeddings}.LayerNorm"),
        *_layer_tensors(model, "bert.encoder.layer.{layer}", norms),
        *_head_tensors(
            model, f"{head}.transform.dense", f"{head}.transform.LayerNorm", f"{head}.bias"
        ),
        vector("head/output_bias", f"{decoder}.bias", model.vocab_size),
    )


def _esm_tensors(model: Model) -> tuple[TensorRule, ...]:
    embeddings, decoder = "esm.embeddings", "lm_head.decoder.weight"
    norms = {"attention_norm": "attention.LayerNorm", "mlp_norm": "LayerNorm"}
    before = norm_rules(model, "embed/norm", f"{embeddings}.layer_norm")
    final = "esm.encoder.emb_layer_norm_after"
    return (
        *outer(model, f"{embeddings}.word_embeddings.weight", final, decoder),
        *(before if model.embedding_norm else ()),
        *_layer_tensors(model, "esm.encoder.layer.{layer}", norms),
        *_head_tensors(model, "lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    )


BERT = Family(
    name="bert",
    paper="BERT, arXiv 1810.04805",
    settings={
        "norm_eps": 1e-12,
        "activation": "gelu",
        "token_types": 2,
        "causal": False,  # True continues a masked model as a causal one
    },
    fixed={
        **FIXED,
        "norm_placement": "after_residual",
        "positions": "learned",
        "embedding_norm": True,
    },
    hf_types=("bert",),
    hf_architectures="BertForMaskedLM",
    read_hf=_bert_from_hf,
    write_hf=_bert_to_hf,
    tensors=_bert_tensors,
    hf_prefix="bert.",
    hf_renamed=RENAMED,
    # The pooler and the head of the next-sentence objective have no part in masked prediction.
    ignored=("bert.pooler.dense.*", "cls.seq_relationship.*", "bert.embeddings.position_ids"),
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
    hf_architectures="EsmForMaskedLM",
    read_hf=_esm_from_hf,
    write_hf=_esm_to_hf,
    tensors=_esm_tensors,
    hf_prefix="esm.",
    hf_renamed=RENAMED,
    # The pooler and the contact head have no part in masked prediction; with rotary positions the
    # published checkpoints still hold a table of positions that nothing reads.
    ignored=(
        "esm.pooler.dense.*",
        "esm.contact_head.*",
        "esm.embeddings.position_ids",
        "esm.embeddings.position_embeddings.weight",
        "*rotary_embeddings.inv_freq",
    ),
)
