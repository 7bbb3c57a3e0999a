"""The parameters of a model as shapes and logical axes, without building the model.

Names, shapes and axes are those of `models.decoder`; the suite compares them. In all memory
formulas the integers of a layout may be int arrays [N], for N layouts at once.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.config import ModelConfig
from jaxscale.layout import Layout
from jaxscale.sharding.rules import spreads_outer

Ints = Any
"""An int, or int [N] for N layouts."""


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

    part: str  # "embed", "layers" or "head"
    name: str  # as in a checkpoint: "attention/q"
    axes: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def shard_size(self, layout: Layout, *, over_fsdp: Any, at_rest: bool = False) -> Ints:
        """Elements on one device, sharded over tensor and, where asked, over fsdp.

        Args:
          at_rest: between steps embedding and head are sharded over the pipeline, too, where they
            divide.
        """
        divisor = select(over_fsdp, layout.fsdp, 1) if "embed" in self.axes else 1
        if at_rest and self.part != "layers" and "embed" in self.axes:
            width = self.shape[self.axes.index("embed")]
            spread = spreads_outer(layout.pipeline, layout.fsdp, width)
            divisor = divisor * select(spread, layout.pipeline, 1)
        if {"heads", "mlp", "vocab"} & set(self.axes):
            divisor = divisor * layout.tensor
        if "kv_heads" in self.axes:
            # Where ranks outnumber the heads, each has all of them.
            heads = self.shape[self.axes.index("kv_heads")]
            divisor = divisor * select(heads < layout.tensor, 1, layout.tensor)
        return self.size // divisor


def parameters(model: ModelConfig) -> list[ParamShape]:
    """Every parameter of the embedding, of one layer, and of the head."""
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
    }
    named = (
        {("embed", name): axes for name, axes in _embedding(model).items()}
        | {("layers", name): axes for name, axes in _layer(model).items()}
        | {("head", name): axes for name, axes in _head(model).items()}
    )
    return [
        ParamShape(part, name, axes, tuple(sizes[axis] for axis in axes))
        for (part, name), axes in named.items()
    ]


Axes = Mapping[str, tuple[str, ...]]


def _embedding(model: ModelConfig) -> Axes:
    arrays: dict[str, tuple[str, ...]] = {"tokens": ("vocab", "embed")}
    if model.positions == "learned":
        arrays["positions"] = ("positions", "embed")
    if model.token_types:
        arrays["token_types"] = ("token_types", "embed")
    return {**arrays, **(_norm(model, "norm") if model.embedding_norm else {})}


def _head(model: ModelConfig) -> Axes:
    arrays = dict(_norm(model, "norm")) if model.final_norm else {}
    if model.head_transform:
        arrays |= {"transform": ("embed", "transform"), "transform_bias": ("embed",)}
        arrays |= {**_norm(model, "transform_norm"), "output_bias": ("vocab",)}
    return arrays if model.tied_embeddings else {**arrays, "output": ("embed", "vocab")}


def _layer(model: ModelConfig) -> Axes:
    arrays: dict[str, tuple[str, ...]] = {}
    for name in ("attention", "mlp"):
        if model.norm_placement in ("before", "both"):
            arrays |= _norm(model, f"{name}_norm")
        if model.norm_placement != "before":
            arrays |= _norm(model, f"{name}_post_norm")
    arrays |= {
        "attention/q": ("embed", "heads", "head_dim"),
        "attention/k": ("embed", "kv_heads", "head_dim"),
        "attention/v": ("embed", "kv_heads", "head_dim"),
        "attention/out": ("heads", "head_dim", "embed"),
        "mlp/up": ("embed", "mlp"),
        "mlp/down": ("mlp", "embed"),
    }
    if model.qk_norm:
        heads, keys = (("heads",), ("kv_heads",)) if model.qk_norm_over_heads else ((), ())
        arrays["attention/q_scale"] = (*heads, "head_dim")
        arrays["attention/k_scale"] = (*keys, "head_dim")
    if model.gated:
        arrays["mlp/gate"] = ("embed", "mlp")
    if model.attention_bias != "none":
        arrays["attention/q_bias"] = ("heads", "head_dim")
        arrays["attention/k_bias"] = ("kv_heads", "head_dim")
        arrays["attention/v_bias"] = ("kv_heads", "head_dim")
    if model.attention_bias == "all":
        arrays["attention/out_bias"] = ("embed",)
    if model.mlp_bias:
        arrays |= {"mlp/up_bias": ("mlp",), "mlp/down_bias": ("embed",)}
        if model.gated:
            arrays["mlp/gate_bias"] = ("mlp",)
    return arrays


def _norm(model: ModelConfig, name: str) -> Axes:
    bias = {f"{name}/bias": ("embed",)} if model.norm == "layer" else {}
    return {f"{name}/scale": ("embed",), **bias}


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
