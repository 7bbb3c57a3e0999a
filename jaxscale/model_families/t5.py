"""T5 (1.1 by default), mT5 and UMT5: encoder-decoders with relative attention biases.

config.json does not tell whether the head is tied: transformers 5 writes tie_word_embeddings = true
for all of them, also when the file has an untied head. So the tensors decide (`Family.untied`).

tie_word_embeddings = false in a T5 or UMT5 means a head without `scaled_head`, as in the published
files, which transformers 4 wrote; transformers 5 writes it as scale_decoder_outputs. Versions 5.0
to 5.23 scale the inputs of every UMT5's head, whatever its file has, so a UMT5 without
`scaled_head` is written as one with it, and with a larger final norm.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jaxscale.model_families.family import Family, HfConfig, HfKey, Model, TensorRule
from jaxscale.model_families.hf.config import our_activation, refuse_options, their_activation
from jaxscale.model_families.hf.tensors import matrix, outer, stored, vector

UNUSED = ("dropout_rate", "initializer_factor", "is_decoder", "n_positions")
"""Keys without effect on the logits, in addition to those of every family."""


def _from_hf(hf: HfConfig) -> dict[str, Any]:
    hf.ignore(*UNUSED)
    start, padding = hf.read("decoder_start_token_id", None), hf.read("pad_token_id", None)
    if None not in (start, padding) and start != padding:
        raise ValueError(
            f"config.json has decoder_start_token_id = {start} and pad_token_id = {padding}; they "
            "must be equal: a decoder begins with the padding token"
        )
    layers = hf.read("num_layers")
    scaled = hf.read("tie_word_embeddings", None) is not False
    gated, _, activation = hf.read("feed_forward_proj", "relu").rpartition("-")
    if gated == "gated" and activation == "gelu":
        activation = "gelu_new"  # T5 1.1 uses the tanh form, whatever the name
    hf.ignore("dense_act_fn", "is_gated_act")  # derived from feed_forward_proj
    ours = {
        "num_layers": hf.read("num_decoder_layers", None) or layers,
        "num_kv_heads": hf.read("num_heads"),
        "gated": gated == "gated",
        "activation": our_activation("feed_forward_proj", activation),
    }
    if hf.read("model_type") in ("t5", "umt5"):
        ours["scaled_head"] = hf.read("scale_decoder_outputs", scaled)
    return ours


def _to_hf(model: Model) -> dict[str, Any]:
    refuse_options(model, num_kv_heads=model.num_heads)
    plain = their_activation(model.activation)
    activation = "gelu" if model.activation == "gelu_tanh" else plain
    if model.gated and model.activation == "gelu":
        raise ValueError(
            "model.activation = 'gelu' cannot be written in Hugging Face's format of "
            f"{model.family} models with a gate; use 'gelu_tanh' (gated-gelu)"
        )
    scale = {"scale_decoder_outputs": model.scaled_head} if model.family == "t5" else {}
    return {
        **scale,
        "num_decoder_layers": model.num_layers,
        "feed_forward_proj": f"gated-{activation}" if model.gated else plain,
        "is_encoder_decoder": True,
        "tie_word_embeddings": model.scaled_head if scale or model.family == "umt5" else False,
    }


def _umt5_form(model: Model, params: Any) -> tuple[Model, Any]:
    """An equivalent model with scaled inputs of the head and a larger final norm."""
    if model.scaled_head:
        return model, params
    head = params["head"]
    scale = head["norm"]["scale"]
    larger = (scale * math.sqrt(model.d_model)).astype(scale.dtype)
    scaled = dataclasses.replace(model, scaled_head=True)
    return scaled, {**params, "head": {**head, "norm": {"scale": larger}}}


def _tensors(model: Model) -> tuple[TensorRule, ...]:
    tokens = "shared.weight"
    rules = [*outer(model, tokens, "decoder.final_layer_norm", "lm_head.weight")]
    rules += [
        stored("embed/tokens", f"{stack}.embed_tokens.weight", model.vocab_size, model.d_model)
        for stack in ("encoder", "decoder")
    ]
    norm = "encoder.final_layer_norm.weight"
    rules.append(vector("embed/encoder_norm/scale", norm, model.d_model))
    for stack, mlp in (("encoder", 1), ("decoder", 2)):
        layer = f"{stack}.block.{{layer}}.layer"
        rules += _attention(model, f"{stack}/attention", f"{layer}.0", "SelfAttention")
        rules += _bias(model, stack)
        if stack == "decoder":
            rules += _attention(model, "decoder/cross", f"{layer}.1", "EncDecAttention")
        rules += _mlp(model, stack, f"{layer}.{mlp}")
    return tuple(rules)


def _attention(model: Model, ours: str, theirs: str, kind: str) -> Iterator[TensorRule]:
    width = model.num_heads * model.head_dim
    for part in "qkv":
        yield matrix(f"{ours}/{part}", f"{theirs}.{kind}.{part}.weight", model.d_model, width)
    yield matrix(f"{ours}/out", f"{theirs}.{kind}.o.weight", width, model.d_model)
    yield vector(f"{ours}_norm/scale", f"{theirs}.layer_norm.weight", model.d_model)


def _bias(model: Model, stack: str) -> Iterator[TensorRule]:
    """The bias tables of a stack: one, or one in each layer."""
    own = model.relative_bias == "layer"
    layer = "{layer}" if own else "0"
    param = f"{stack}/attention/bias" if own else f"embed/{stack}_bias"
    name = f"{stack}.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
    yield stored(param, name, model.relative_buckets, model.num_heads)


def _mlp(model: Model, stack: str, layer: str) -> Iterator[TensorRule]:
    yield vector(f"{stack}/mlp_norm/scale", f"{layer}.layer_norm.weight", model.d_model)
    inner = {"gate": "wi_0", "up": "wi_1"} if model.gated else {"up": "wi"}
    for ours, theirs in inner.items():
        name = f"{layer}.DenseReluDense.{theirs}.weight"
        yield matrix(f"{stack}/mlp/{ours}", name, model.d_model, model.d_ff)
    name = f"{layer}.DenseReluDense.wo.weight"
    yield matrix(f"{stack}/mlp/down", name, model.d_ff, model.d_model)


T5 = Family(
    name="t5",
    paper="T5, arXiv 1910.10683; version 1.1, arXiv 2002.05202",
    settings={
        "num_encoder_layers": 2,
        "norm_eps": 1e-6,
        "activation": "gelu_tanh",
        "gated": True,
        "relative_buckets": 32,
        "relative_max_distance": 128,
        "tied_embeddings": False,
        "scaled_head": False,
    },
    fixed={"positions": "none", "attention_scale_dim": 1.0, "relative_bias": "shared"},
    hf_types=("t5",),
    hf_architectures="T5ForConditionalGeneration",
    read_hf=_from_hf,
    write_hf=_to_hf,
    tensors=_tensors,
    hf_keys=(
        HfKey("vocab_size", "vocab_size"),
        HfKey("d_model", "d_model"),
        HfKey("d_ff", "d_ff"),
        HfKey("num_layers", "num_encoder_layers"),
        HfKey("num_heads", "num_heads"),
        HfKey("d_kv", "head_dim"),
        HfKey("layer_norm_epsilon", "norm_eps", 1e-6),
        HfKey("relative_attention_num_buckets", "relative_buckets", 32),
        HfKey("relative_attention_max_distance", "relative_max_distance", 128),
    ),
    hf_expected={"is_encoder_decoder": (True,)},
    hf_prefix="",
    # Early checkpoints contain a table that no code reads.
    ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    untied="lm_head.weight",
)

MT5 = dataclasses.replace(
    T5,
    name="mt5",
    paper="mT5, arXiv 2010.11934",
    settings={name: value for name, value in T5.settings.items() if name != "scaled_head"},
    hf_types=("mt5",),
    hf_defaults={"feed_forward_proj": "gated-gelu"},
    hf_architectures="MT5ForConditionalGeneration",
)

UMT5 = dataclasses.replace(
    T5,
    name="umt5",
    paper="UMT5, arXiv 2304.09151",
    fixed={**T5.fixed, "relative_bias": "layer"},
    hf_types=("umt5",),
    hf_defaults={"feed_forward_proj": "gated-gelu"},
    hf_form=_umt5_form,
    hf_architectures="UMT5ForConditionalGeneration",
)
