"""Rules for tensors with the same names in several families."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

from jaxscale.model_families.family import Model, TensorRule

LAYER = "model.layers.{layer}"

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Our name of a norm -> Llama's."""


def matrix(param: str, name: str, inputs: int, outputs: int) -> TensorRule:
    """The rule of a torch.nn.Linear's weight, stored as [outputs, inputs]."""
    return TensorRule(param, name, (outputs, inputs), (1, 0))


def stored(param: str, name: str, rows: int, width: int) -> TensorRule:
    """The rule of a matrix that is stored like ours."""
    return TensorRule(param, name, (rows, width), (0, 1))


def vector(param: str, name: str, size: int) -> TensorRule:
    """The rule of a bias, or of a norm's scale."""
    return TensorRule(param, name, (size,), (0,))


def outer(model: Model, tokens: str, norm: str, output: str) -> Iterator[TensorRule]:
    """The rules of embedding, final norm and output matrix, which may be tied to the embedding.

    Args:
      tokens, output: names of the tensors.
      norm: name of the tensor, without ".weight".
    """
    yield stored("embed/tokens", tokens, model.vocab_size, model.d_model)
    # MTP modules run after the final norm, which is then a parameter of the embedding.
    final = "embed/final_norm" if model.prediction_depth else "head/norm"
    yield from norm_rules(model, final, norm)
    if model.tied_embeddings:
        yield stored("embed/tokens", output, model.vocab_size, model.d_model)
    else:
        yield matrix("head/output", output, model.d_model, model.vocab_size)


def norm_rules(model: Model, param: str, name: str) -> Iterator[TensorRule]:
    """The rules of a norm of the residual stream."""
    yield vector(f"{param}/scale", f"{name}.weight", model.d_model)
    if model.norm == "layer":
        yield vector(f"{param}/bias", f"{name}.bias", model.d_model)


def attention_rules(model: Model) -> Iterator[TensorRule]:
    """The rules of separate projections, under Llama's names."""
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
    """The rules of gate, up and down, under Llama's names."""
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
    """The rules of a model with Llama's names.

    Args:
      norms: of a layer, our name -> theirs.
    """
    rules = [*llama_outer(model), *layer_norms(model, norms)]
    return (*rules, *attention_rules(model), *mlp_rules(model))


def llama_outer(model: Model) -> Iterator[TensorRule]:
    """The rules of embedding, final norm and output matrix, under Llama's names."""
    return outer(model, "model.embed_tokens.weight", "model.norm", "lm_head.weight")


def layer_norms(model: Model, norms: Mapping[str, str] = NORMS) -> Iterator[TensorRule]:
    """The rules of a layer's norms; our name -> theirs."""
    for ours, theirs in norms.items():
        yield from norm_rules(model, f"layers/{ours}", f"{LAYER}.{theirs}")


PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def expert_tensors(
    model: Model,
    block: str = "mlp",
    names: Mapping[str, str] = PROJECTIONS,
    attention: Callable[[Model], Iterable[TensorRule]] = attention_rules,
) -> tuple[TensorRule, ...]:
    """The rules of a Llama with experts, of which some layers may be dense.

    Args:
      block: their module with the router, "gate", and the experts of a layer.
      names: of an expert's matrices, our name -> theirs.
      attention: the rules of a layer's attention.
    """
    common = [*layer_norms(model), *attention(model)]
    with_experts = [*common, *expert_rules(model, block, names)]
    outer_rules = [*llama_outer(model)]
    if model.prediction_depth:
        outer_rules += prediction_rules(model, with_experts)
    dense, first = [*common, *mlp_rules(model)], model.dense_layers
    rules = list(of_stack(dense, "dense_layers", 0)) if first else []
    stack, pattern = "expert_layers" if first else "layers", model.expert_pattern or "E"
    for i, letter in enumerate(pattern):
        own = stack if len(pattern) == 1 else f"{stack}/layer_{i}"
        rules += of_stack(dense if letter == "D" else with_experts, own, first + i, len(pattern))
    return (*outer_rules, *rules)


def prediction_rules(model: Model, layer: Iterable[TensorRule]) -> Iterator[TensorRule]:
    """The rules of multi-token prediction (MTP) modules, under DeepSeek-V3's names: layers after
    the last one, each with a projection before and a norm after it, and copies of embedding and
    output matrix.

    Args:
      layer: the rules of a layer.
    """
    width, ours = model.d_model, "layers/merge"
    own = [
        *norm_rules(model, f"{ours}/embedding_norm", f"{LAYER}.enorm"),
        *norm_rules(model, f"{ours}/hidden_norm", f"{LAYER}.hnorm"),
        *norm_rules(model, f"{ours}/output_norm", f"{LAYER}.shared_head.norm"),
    ]
    for part, begin in (("embedding", 0), ("hidden", width)):
        inputs = (slice(None), slice(begin, begin + width))
        name, shape = f"{LAYER}.eh_proj.weight", (width, 2 * width)
        own.append(TensorRule(f"{ours}/{part}", name, shape, (1, 0), inputs))
    yield from of_stack([*layer, *own], "prediction", model.num_layers)
    copied = (
        stored("embed/tokens", f"{LAYER}.embed_tokens.weight", model.vocab_size, width),
        matrix("head/output", f"{LAYER}.shared_head.head.weight", width, model.vocab_size),
    )
    for k in range(model.prediction_depth):
        for rule in copied:
            yield dataclasses.replace(rule, first=model.num_layers + k, is_copy=True)


def expert_rules(model: Model, block: str, names: Mapping[str, str]) -> Iterator[TensorRule]:
    """The rules of router, shared expert and experts, with one tensor for each expert's matrix."""
    gate, width = f"{LAYER}.{block}.gate", model.expert_d_ff or model.d_ff
    yield matrix("layers/mlp/router", f"{gate}.weight", model.d_model, model.num_experts)
    if model.router_bias:
        name, shape = f"{gate}.e_score_correction_bias", (model.num_experts,)
        yield TensorRule("layers/mlp/router_bias", name, shape, (0,), wide=True)
    experts = {"": ("experts.{expert}", width)}
    if model.shared_d_ff:
        experts["/shared"] = ("shared_experts", model.shared_d_ff)
    for part, (folder, hidden) in experts.items():
        for ours, theirs in names.items():
            sizes = (hidden, model.d_model) if ours == "down" else (model.d_model, hidden)
            name = f"{LAYER}.{block}.{folder}.{theirs}.weight"
            yield matrix(f"layers/mlp{part}/{ours}", name, *sizes)


def of_stack(
    rules: Iterable[TensorRule], stack: str, first: int, stride: int = 1
) -> Iterator[TensorRule]:
    """The rules of a single stack, "layers", moved to a stack of every `stride`-th layer of the
    model from `first`."""
    for rule in rules:
        param = stack + rule.param.removeprefix("layers")
        yield dataclasses.replace(rule, param=param, first=first, stride=stride)
