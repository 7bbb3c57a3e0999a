"""The parameters of a model as shapes and logical axes, without building the model.

Names, shapes and axes are those of `models.decoder` and `models.encoder_decoder`; the suite
compares them. In all memory formulas the integers of a layout may be int arrays [N], for N layouts
at once.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelConfig
from jaxscale.config.model.lora import is_adapter
from jaxscale.sharding.rules import spreads_outer

Ints = Any
"""An int, or int [N] for N layouts."""
PREDICTION = "prediction"
"""The stack of the modules that predict further tokens."""
Rows = Mapping[str, Ints]
"""Layers of each stack, by its name."""


def select(condition: Any, yes: Ints, no: Ints = 0) -> Ints:
    """`yes` where the condition holds, for one layout or many."""
    if isinstance(condition, bool | np.bool_):
        return yes if condition else no
    return np.where(condition, yes, no)


def maximum(*sizes: Ints) -> Ints:
    """The elementwise maximum, for one layout or many."""
    return functools.reduce(
        lambda a, b: max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b),
        sizes,
    )


@dataclass(frozen=True)
class ParamShape:
    """One parameter; a layer's is that of one layer, without the stack's dimension."""

    part: str  # "embed", a stack of `stack_sizes`, or "head"
    name: str  # as in a checkpoint: "attention/q"
    axes: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def in_layers(self) -> bool:
        """Whether every layer of a stack has one."""
        return self.part not in ("embed", "head")

    @property
    def in_adapter(self) -> bool:
        """Whether it is trained beside frozen weights: of a low-rank adapter, or rows of tokens."""
        return is_adapter(self.name)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def shard_size(self, layout: Layout, *, over_fsdp: Any, at_rest: bool = False) -> Ints:
        """Elements on one device, sharded over tensor and, where asked, over fsdp and context.

        Args:
          at_rest: between steps embedding and head are sharded over the pipeline, too, where they
            divide.
        """
        divisor, columns = 1, layout.tensor_columns
        if "embed" in self.axes:
            divisor = select(over_fsdp, layout.zero_ranks, 1) * layout.tensor_rows
        if at_rest and not self.in_layers and "embed" in self.axes:
            width = self.shape[self.axes.index("embed")] // layout.tensor_rows
            spread = spreads_outer(layout.pipeline, layout.zero_ranks, width)
            divisor = divisor * select(spread, layout.pipeline, 1)
        if "experts" in self.axes:
            divisor = divisor * layout.expert
        if {"heads", "mlp", "expert_mlp", "shared_mlp", "vocab"} & set(self.axes):
            divisor = divisor * columns
        if "kv_heads" in self.axes:
            # Where ranks outnumber the heads, each has all of them.
            heads = self.shape[self.axes.index("kv_heads")]
            divisor = divisor * select(heads < columns, 1, columns)
        return self.size // divisor


class StackSize(NamedTuple):
    """Layers of one kind, in the order in which a step passes them; where layers with and without
    experts take turns, a layer of a stack is a turn."""

    part: str  # as the engine names the stack
    num_layers: int


def stack_sizes(model: ModelConfig) -> tuple[StackSize, ...]:
    """The stacks of a model."""
    if model.num_encoder_layers:
        return (
            StackSize("encoder", model.num_encoder_layers),
            StackSize("decoder", model.num_layers),
        )
    first, depth = model.dense_layers if model.num_experts else 0, model.prediction_depth
    further = (StackSize(PREDICTION, depth),) if depth else ()
    if not first:
        return StackSize("layers", model.num_layers // len(turn_of(model, "layers"))), *further
    turns = (model.num_layers - first) // len(turn_of(model, "expert_layers"))
    return StackSize("dense_layers", first), StackSize("expert_layers", turns), *further


def turn_of(model: ModelConfig, part: str) -> tuple[bool, ...]:
    """Of each layer of the model in a layer of a stack, whether it has experts."""
    if not model.num_experts or part == "dense_layers":
        return (False,)
    if part == PREDICTION:
        return (True,)
    return tuple(letter == "E" for letter in model.expert_pattern or "E")


@functools.lru_cache(maxsize=64)
def parameters(model: ModelConfig) -> tuple[ParamShape, ...]:
    """Every parameter of the embedding, of one layer of each stack, and of the head."""
    sizes = {
        "embed": model.d_model,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "mlp": model.d_ff,
        "vocab": model.padded_vocab_size,
        "positions": model.max_seq_len,
        "token_types": model.token_types,
        "transform": model.d_model,
        "buckets": model.relative_buckets,
        "experts": model.num_experts,
        "routes": model.num_experts,
        "expert_mlp": model.expert_d_ff or model.d_ff,
        "shared_mlp": model.shared_d_ff,
        "query_rank": model.query_rank,
        "kv_rank": model.kv_rank,
        "lora_rank": model.lora_rank,
        "lora_tokens": len(model.trained_tokens),
        "plain_dim": model.head_dim - model.rope_head_dim,
        "value_dim": model.value_dim,
        "halves": 2,
        "pairs": model.rope_head_dim // 2,
    }
    # Matrices out of the compressed features of latent attention.
    from_rank = {"attention/k_plain": model.kv_rank, "attention/v": model.kv_rank}
    from_rank |= dict.fromkeys(("attention/q_plain", "attention/q_turned"), model.query_rank)
    layers = {stack.part: _stack_layer(model, stack.part) for stack in stack_sizes(model)}

    def shape(name: str, axes: tuple[str, ...]) -> tuple[int, ...]:
        inputs = (model.kv_rank and from_rank.get(name)) or model.d_model
        return tuple({**sizes, "embed": inputs}[axis] for axis in axes)

    parts = {"embed": _embedding(model), **layers, "head": _head(model)}
    return tuple(
        ParamShape(part, name, axes, shape(name, axes))
        for part, arrays in parts.items()
        for name, axes in arrays.items()
    )


Axes = Mapping[str, tuple[str, ...]]

TABLE = ("buckets", "heads")
"""Of biases of attention by distance."""
ROWS = ("lora_tokens", "embed")
"""Of tokens that are trained beside a frozen table."""


def _embedding(model: ModelConfig) -> Axes:
    arrays: dict[str, tuple[str, ...]] = {"tokens": ("vocab", "embed")}
    if model.trained_tokens:
        arrays["tokens_lora/rows"] = ROWS
    if model.positions == "learned":
        arrays["positions"] = ("positions", "embed")
    if model.num_encoder_layers:
        arrays |= _norm(model, "encoder_norm")
    if model.prediction_depth and model.final_norm:
        arrays |= _norm(model, "final_norm")
    if model.relative_bias == "shared":
        arrays |= {"encoder_bias": TABLE, "decoder_bias": TABLE}
    if model.token_types:
        arrays["token_types"] = ("token_types", "embed")
    return {**arrays, **(_norm(model, "norm") if model.embedding_norm else {})}


def _head(model: ModelConfig) -> Axes:
    own_norm = model.final_norm and not model.prediction_depth
    arrays = dict(_norm(model, "norm")) if own_norm else {}
    if model.head_transform:
        arrays |= {"transform": ("embed", "transform"), "transform_bias": ("embed",)}
        arrays |= {**_norm(model, "transform_norm"), "output_bias": ("vocab",)}
    if model.tied_embeddings:
        return arrays
    rows = {"output_lora/rows": ROWS} if model.trained_tokens else {}
    return {**arrays, "output": ("embed", "vocab"), **rows}


def _stack_layer(model: ModelConfig, part: str) -> Axes:
    turn = turn_of(model, part)
    if part == PREDICTION:
        return {**_layer(model, part, experts=turn[0]), **_merge(model)}
    if len(turn) == 1:
        return _layer(model, part, experts=turn[0])
    return {
        f"layer_{i}/{name}": axes
        for i, experts in enumerate(turn)
        for name, axes in _layer(model, part, experts=experts).items()
    }


def _merge(model: ModelConfig) -> Axes:
    """Of `models.prediction.Merge`."""
    norms = [_norm(model, f"merge/{name}_norm") for name in ("hidden", "embedding", "output")]
    matrices = {f"merge/{name}": ("embed", "transform") for name in ("hidden", "embedding")}
    return {**norms[0], **norms[1], **norms[2], **matrices}


def _layer(model: ModelConfig, part: str, *, experts: bool) -> Axes:
    arrays: dict[str, tuple[str, ...]] = {}
    for name in ("attention", *(("cross",) if part == "decoder" else ()), "mlp"):
        if model.norm_placement in ("before", "both"):
            arrays |= _norm(model, f"{name}_norm")
        if model.norm_placement != "before":
            arrays |= _norm(model, f"{name}_post_norm")
        if name != "mlp":
            arrays |= _attention(model, name)
        else:
            arrays |= _experts(model) if experts else _mlp(model)
    if model.relative_bias == "layer":
        arrays["attention/bias"] = TABLE
    return arrays


def _attention(model: ModelConfig, name: str) -> Axes:
    if model.kv_rank:
        return _latent_attention(model)
    arrays: dict[str, tuple[str, ...]] = {
        "q": ("embed", "heads", "head_dim"),
        "k": ("embed", "kv_heads", "head_dim"),
        "v": ("embed", "kv_heads", "head_dim"),
        "out": ("heads", "head_dim", "embed"),
    }
    if model.qk_norm:
        heads, keys = (("heads",), ("kv_heads",)) if model.qk_norm_over_heads else ((), ())
        arrays |= {"q_scale": (*heads, "head_dim"), "k_scale": (*keys, "head_dim")}
    if model.attention_bias != "none":
        arrays |= {"q_bias": ("heads", "head_dim"), "k_bias": ("kv_heads", "head_dim")}
        arrays["v_bias"] = ("kv_heads", "head_dim")
    if model.attention_bias == "all":
        arrays["out_bias"] = ("embed",)
    arrays |= _adapters(model, arrays)
    return {f"{name}/{array}": axes for array, axes in arrays.items()}


def _adapters(model: ModelConfig, arrays: Axes) -> Axes:
    """The two matrices of each adapter, of those of an attention or an MLP."""
    found: dict[str, tuple[str, ...]] = {}
    for name in model.adapted_weights:
        if axes := arrays.get(name):
            inputs = len(axes) - 1 if axes[-1] == "embed" else 1
            found[f"{name}_lora/a"] = (*axes[:inputs], "lora_rank")
            found[f"{name}_lora/b"] = ("lora_rank", *axes[inputs:])
    return found


def _latent_attention(model: ModelConfig) -> Axes:
    down = {"q_down": ("embed", "query_rank"), "q_scale": ("query_rank",)}
    arrays = {
        **(down if model.query_rank else {}),
        "q_plain": ("embed", "heads", "plain_dim"),
        "q_turned": ("embed", "heads", "halves", "pairs"),
        "kv_down": ("embed", "kv_rank"),
        "kv_scale": ("kv_rank",),
        "k_turned": ("embed", "halves", "pairs"),
        "k_plain": ("embed", "heads", "plain_dim"),
        "v": ("embed", "heads", "value_dim"),
        "out": ("heads", "value_dim", "embed"),
    }
    return {f"attention/{array}": axes for array, axes in arrays.items()}


def _experts(model: ModelConfig) -> Axes:
    arrays: dict[str, tuple[str, ...]] = {
        "mlp/router": ("embed", "routes"),
        "mlp/up": ("experts", "embed", "expert_mlp"),
        "mlp/down": ("experts", "expert_mlp", "embed"),
    }
    if model.gated:
        arrays["mlp/gate"] = ("experts", "embed", "expert_mlp")
    if model.router_bias:
        arrays["mlp/router_bias"] = ("routes",)
    if model.shared_d_ff:
        shared = _mlp(model).items()
        arrays |= {
            name.replace("mlp/", "mlp/shared/"): tuple(
                "shared_mlp" if axis == "mlp" else axis for axis in axes
            )
            for name, axes in shared
        }
    return arrays


def _mlp(model: ModelConfig) -> Axes:
    arrays: dict[str, tuple[str, ...]] = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    if model.gated:
        arrays["gate"] = ("embed", "mlp")
    arrays |= _adapters(model, arrays)
    if model.mlp_bias:
        arrays |= {"up_bias": ("mlp",), "down_bias": ("embed",)}
        if model.gated:
            arrays["gate_bias"] = ("mlp",)
    return {f"mlp/{array}": axes for array, axes in arrays.items()}


def _norm(model: ModelConfig, name: str) -> Axes:
    bias = {f"{name}/bias": ("embed",)} if model.norm == "layer" else {}
    return {f"{name}/scale": ("embed",), **bias}


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
