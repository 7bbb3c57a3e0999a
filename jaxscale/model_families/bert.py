"""BERT: a bidirectional masked language model, with norms after each residual."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxscale.model_families.family import Family, HfKey, Model, TensorRule
from jaxscale.model_families.hf.config import (
    activation_key,
    plain_sizes_to_hf,
    refuse_options,
    sizes_from_hf,
)
from jaxscale.model_families.hf.tensors import matrix, norm_rules, stored, vector

FIXED: Mapping[str, Any] = {
    "norm": "layer",
    "gated": False,
    "attention_bias": "all",
    "mlp_bias": True,
    "tied_embeddings": True,
    "head_transform": True,
}

RENAMED = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
"""The names of Google's BERT code, which transformers writes for some models."""


NORM_EPS = HfKey("layer_norm_eps", "norm_eps", 1e-12)
HF_EXPECTED: Mapping[str, tuple[Any, ...]] = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


def encoder_to_hf(model: Model) -> dict[str, Any]:
    """The keys of config.json for the sizes of an encoder."""
    refuse_options(model, causal=False)
    return plain_sizes_to_hf(model)


def layer_tensors(model: Model, layer: str, norms: Mapping[str, str]) -> Iterator[TensorRule]:
    """The rules of a layer's attention, MLP and norms.

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


def head_tensors(model: Model, dense: str, norm: str, bias: str) -> Iterator[TensorRule]:
    """The rules of the head except the output matrix; arguments are names, without ".weight"."""
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
    width, decoder, tokens = (
        model.d_model,
        f"{head}.decoder",
        f"{embeddings}.word_embeddings.weight",
    )
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
        *layer_tensors(model, "bert.encoder.layer.{layer}", norms),
        *head_tensors(
            model, f"{head}.transform.dense", f"{head}.transform.LayerNorm", f"{head}.bias"
        ),
        vector("head/output_bias", f"{decoder}.bias", model.vocab_size),
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
    hf_defaults={"max_position_embeddings": 512},
    hf_architectures="BertForMaskedLM",
    read_hf=sizes_from_hf,
    write_hf=encoder_to_hf,
    tensors=_bert_tensors,
    hf_keys=(
        NORM_EPS,
        activation_key("hidden_act", "gelu"),
        HfKey("type_vocab_size", "token_types", 2),
    ),
    hf_expected={**HF_EXPECTED, "position_embedding_type": ("absolute",)},
    hf_prefix="bert.",
    hf_renamed=RENAMED,
    ignored=("bert.embeddings.position_ids",),
    # Masked prediction does not use the pooler and the next-sentence head.
    left_out=("bert.pooler.dense.*", "cls.seq_relationship.*"),
)
