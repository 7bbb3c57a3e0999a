"""Rules for tensors that several families name alike."""

from collections.abc import Iterator

from jaxscale.model_families.family import Model
from jaxscale.model_families.tensor_rule import TensorRule

LAYER = "model.layers.{layer}"

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Ours -> theirs, in a Llama."""


def matrix(param: str, name: str, inputs: int, outputs: int) -> TensorRule:
    """The weight of a torch.nn.Linear, [outputs, inputs] there."""
    return TensorRule(param, name, (outputs, inputs), (1, 0))


def stored(param: str, name: str, rows: int, width: int) -> TensorRule:
    """A matrix that is stored as ours."""
    return TensorRule(param, name, (rows, width), (0, 1))


def vector(param: str, name: str, size: int) -> TensorRule:
    """A bias, or the scale of a norm."""
    return TensorRule(param, name, (size,), (0,))


def outer(model: Model, tokens: str, norm: str, output: str) -> Iterator[TensorRule]:
    """Embedding, final norm, and the output matrix, which may be a copy of the embedding.

    Args:
      tokens, output: names of the tensors.
      norm: theirs, without ".weight".
    """
    yield stored("embed/tokens", tokens, model.vocab_size, model.d_model)
    yield from norm_rules(model, "head/norm", norm)
    if model.tied_embeddings:
        yield stored("embed/tokens", output, model.vocab_size, model.d_model)
    else:
        yield matrix("head/output", output, model.d_model, model.vocab_size)


def norm_rules(model: Model, param: str, name: str) -> Iterator[TensorRule]:
    """A norm as wide as the stream."""
    yield vector(f"{param}/scale", f"{name}.weight", model.d_model)
    if model.norm == "layer":
        yield vector(f"{param}/bias", f"{name}.bias", model.d_model)


def attention_rules(model: Model) -> Iterator[TensorRule]:
    """Separate projections, under the names of Llama."""
    heads, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    for letter, width in (("q", heads), ("k", keys), ("v", keys)):
        name = f"{LAYER}.self_attn.{letter}_proj"
        yield matrix(f"layers/attention/{letter}", f"{name}.weight", model.d_model, width)
        if model.attention_bias != "none":
            yield vector(f"layers/attention/{letter}_bias", f"{name}.bias", width)
        if model.qk_norm and letter != "v":
            size = width if model.qk_norm_over_heads else model.head_dim
            name = f"{LAYER}.self_attn.{letter}_norm.weight"
            yield vector(f"layers/attention/{letter}_scale", name, size)
    name = f"{LAYER}.self_attn.o_proj"
    yield matrix("layers/attention/out", f"{name}.weight", heads, model.d_model)
    if model.attention_bias == "all":
        yield vector("layers/attention/out_bias", f"{name}.bias", model.d_model)


def mlp_rules(model: Model) -> Iterator[TensorRule]:
    """Gate, up and down, under the names of Llama."""
    for part, inputs, outputs in (
        ("gate", model.d_model, model.d_ff),
        ("up", model.d_model, model.d_ff),
        ("down", model.d_ff, model.d_model),
    ):
        name = f"{LAYER}.mlp.{part}_proj"
        yield matrix(f"layers/mlp/{part}", f"{name}.weight", inputs, outputs)
        if model.mlp_bias:
            yield vector(f"layers/mlp/{part}_bias", f"{name}.bias", outputs)


def llama_tensors(model: Model, norms: dict[str, str] = NORMS) -> tuple[TensorRule, ...]:
    """All tensors of a model with the names of Llama.

    Args:
      norms: of a layer, ours -> theirs.
    """
    rules = [*outer(model, "model.embed_tokens.weight", "model.norm", "lm_head.weight")]
    for ours, theirs in norms.items():
        rules += norm_rules(model, f"layers/{ours}", f"{LAYER}.{theirs}")
    return (*rules, *attention_rules(model), *mlp_rules(model))
