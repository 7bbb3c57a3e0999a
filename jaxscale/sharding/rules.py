"""Sharding rules: logical axes of weights and activations to mesh axes.

Nothing here imports JAX, since the planner uses the same rules.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxscale.choices import nearest_divisors
from jaxscale.config.layout import TENSOR_ROWS, ULYSSES, Layout
from jaxscale.config.model.quantised_base import BLOCKS

Axes = tuple[str, ...]
Rules = Mapping[str, tuple[str, ...]]

# Logical axis -> the mesh axes that shard it. Weights and activations differ: ZeRO shards a
# weight's embed dimension; an activation's is sharded over the rows of tensor only, if any.
# "tensor" is then the columns: weights alternate between embed over rows and hidden over columns,
# and the reverse, so that no activation is resharded between two matmuls (arXiv 2305.13525).
WEIGHTS: Rules = {
    "layers": ("pipeline",),
    "embed": ("tensor_rows", "context", "fsdp", "expert"),
    # Of parameters outside the layers, which pipeline ranks would otherwise replicate.
    "outer_embed": ("tensor_rows", "context", "pipeline", "fsdp", "expert"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    # Where ranks of tensor outnumber the heads: `with_whole_kv_heads`.
    "whole_kv_heads": (),
    "head_dim": (),
    # Of latent attention: replicated over tensor, except for the heads.
    "query_rank": (),
    "kv_rank": (),
    "plain_dim": (),
    "value_dim": (),
    "halves": (),
    "pairs": (),
    "lora_rank": (),  # of adapters, between their two matrices
    "lora_tokens": (),  # trained rows of a frozen table
    "side_width": (),  # of a side network, between its two matrices: each rank has its tokens
    "prompt_tokens": (),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "loss_vocab": ("tensor",),  # of the head, whose columns ranks of context divide in the loss
    "positions": (),
    "buckets": (),
    "token_types": (),
    # Each rank of expert has some of the experts, with columns sharded over tensor. Other
    # dimensions of such an array are not sharded over expert: `mesh_axes`.
    "experts": ("expert",),
    "expert_mlp": ("tensor",),
    "shared_mlp": ("tensor",),
    "routes": (),  # a router's scores, one for each expert: replicated
    "squares": (),  # one number, whose gradient is a sum of squares: `training.noise_scale`
    "transform": (),  # of a head, between its two matrices: each rank transforms its tokens
}
ACTIVATIONS: Rules = {
    "batch": ("data", "fsdp", "expert"),
    "seq": ("context",),
    # Outside the matmuls of attention and MLP tokens are sharded over tensor, too (sequence
    # parallelism, arXiv 2205.05198, section 4.2).
    "residual_seq": ("context", "tensor"),
    "embed": ("tensor_rows",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "buckets": (),
}
SETTINGS = {
    "embed": "model.d_model",
    "heads": "model.num_heads",
    "kv_heads": "model.num_kv_heads",
    "mlp": "model.d_ff",
    "layers": "model.num_layers",
    "experts": "model.num_experts",
    "expert_mlp": "model.expert_d_ff (or model.d_ff)",  # which not every family has, or 0
    "shared_mlp": "model.shared_d_ff",
}
"""Logical axis -> the setting of its size, for errors."""

REPLICATED_WEIGHTS: Rules = {
    **WEIGHTS,
    "embed": ("tensor_rows",),
    "outer_embed": ("tensor_rows", "pipeline"),
    "loss_vocab": ("tensor", "context"),
}
"""The rules of a tree that a ZeRO stage replicates over fsdp, expert and context, and of weights in
use."""


def mesh_axes(
    axes: Axes,
    rules: Rules,
    sizes: Mapping[str, int],
    shape: tuple[int, ...] | None = None,
    *,
    name: str = "an array",
) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension, without mesh axes of size 1.

    A dimension of experts has its mesh axis alone: ZeRO shards "embed" over the rest.

    Args:
      axes: a logical name for each dimension.
      rules: logical name -> mesh axes.
      sizes: mesh axis -> size; absent axes have size 1.
      shape: checked for divisibility when given.
      name: of the array, for errors.

    Raises:
      ValueError: an unknown name, two names on one mesh axis, or a dimension that does not divide.
    """
    found, owner = [], {}
    of_experts = rules.get("experts", ()) if "experts" in axes else ()
    for dim, logical in enumerate(axes):
        if logical not in rules:
            raise ValueError(
                f"{name}: logical axis {logical!r} has no rule; known: {', '.join(sorted(rules))}"
            )
        left = () if logical == "experts" else of_experts
        over = tuple(a for a in rules[logical] if sizes.get(a, 1) > 1 and a not in left)
        share, divided = shape[dim] if shape else 0, ""
        for axis in over:
            if axis in owner:
                raise ValueError(
                    f"{name}: {owner[axis]!r} and {logical!r} both map to mesh axis {axis!r}, "
                    "which shards one dimension of an array; give one of the two another name"
                )
            owner[axis] = logical
            if share % sizes[axis]:
                setting, ranks = SETTINGS.get(logical, f"dimension {logical!r}"), _set(axis, sizes)
                raise ValueError(
                    f"{name}: {setting}{divided} = {share} does not divide over {ranks} = "
                    f"{sizes[axis]}; the nearest that does is {ranks} = "
                    f"{nearest_divisors(share, sizes[axis])}"
                )
            share, divided = share // sizes[axis], f"{divided} / {_set(axis, sizes)}"
        found.append(over)
    return found


def check_blocks(
    axes: Axes, rules: Rules, sizes: Mapping[str, int], size: int, dim: int, form: str, name: str
) -> None:
    """Refuses a block of a format of `model.base_dtype` that would be on two ranks.

    Args:
      size: of the dimension `dim` with the blocks, in weights.
      name: of the parameter, for errors.

    Raises:
      ValueError: names the settings to change.
    """
    over, block = mesh_axes(axes, rules, sizes)[dim], BLOCKS[form].weights
    ranks = math.prod(sizes[axis] for axis in over)
    if size % (ranks * block):
        weight = name.split("/")[-1]
        raise ValueError(
            f"model.base_dtype = {form!r} has blocks of {block} inputs, and "
            f"{' x '.join(f'layout.{axis}' for axis in over)} = {ranks} ranks shard the {size} of "
            f"{name} into {size / ranks:g} each: a block would be on two ranks; use fewer ranks, "
            f"or leave {weight} out of model.base_targets"
        )


def _set(axis: str, sizes: Mapping[str, int]) -> str:
    """The setting of a mesh axis's size."""
    rows = axis == "tensor" and sizes.get(TENSOR_ROWS, 1) > 1
    return f"layout.{axis}" + " / layout.tensor_rows" * rows


def with_whole_kv_heads(axes: Axes, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Axes:
    """Renames "kv_heads" to "whole_kv_heads" where the ranks of tensor are a multiple of the heads:
    each rank then has all heads and uses the one that its query heads read (`_key_heads` in
    `training/kernels.py`)."""
    if "kv_heads" not in axes:
        return axes
    heads, ranks = shape[axes.index("kv_heads")], sizes["tensor"]
    if heads >= ranks or ranks % heads:
        return axes
    return tuple("whole_kv_heads" if name == "kv_heads" else name for name in axes)


def spreads_outer(pipeline: Any, ranks: Any, d_model: int) -> Any:
    """Whether parameters outside the layers are sharded over the pipeline, for ints or arrays.

    Args:
      ranks: of fsdp, expert and context together.
    """
    return (pipeline > 1) & (d_model % (pipeline * ranks) == 0)


LAYER_SHARD_AXES = ("fsdp", "data", "context", "expert")
"""Mesh axes that shard a stack's layers for updates of whole matrices (Muon), which ranks would
otherwise repeat. Of experts each rank of expert, the last of these, has others."""


def shards_layers(rows: Any, pipeline: Any, ranks: Any, size: Any) -> Any:
    """Whether a stack's layers are sharded over one more of `LAYER_SHARD_AXES`, for ints or arrays.

    The first axis may leave ranks without a layer. A further axis, or any axis with a pipeline,
    must divide evenly, or the compiler would replicate the stack in between.

    Args:
      rows: layers of a rank of the pipeline.
      ranks: ranks that shard the layers already.
      size: of the axis.
    """
    even = rows % (ranks * size) == 0
    return (size > 1) & (even | ((pipeline == 1) & (ranks == 1)))


def layer_ranks(rows: Any, layout: Any, of_experts: bool) -> Any:
    """Ranks that shard a stack's layers for updates of whole matrices, for ints or arrays.

    Args:
      rows: layers of a rank of the pipeline.
      layout: one, or many.
      of_experts: whether the matrices are of experts.
    """
    ranks = np.ones((), int)
    for axis in LAYER_SHARD_AXES[:-1] if of_experts else LAYER_SHARD_AXES:
        size = np.asarray(getattr(layout, axis))
        more = shards_layers(rows, np.asarray(layout.pipeline), ranks, size)
        ranks = np.where(more, ranks * size, ranks)
    return ranks


def own_rules(rules: Rules) -> Rules:
    """Checked rules for the logical axes of a custom model.

    Raises:
      ValueError: a name that exists, or mesh axes that custom rules cannot use.
    """
    for name, over in rules.items():
        if name in WEIGHTS or name in ACTIVATIONS:
            raise ValueError(f"rules: {name!r} is a logical axis already; choose another name")
        if set(over) - {"tensor"}:
            raise ValueError(
                f"rules: {name!r} -> {over}; a custom logical axis can be sharded over ('tensor',) "
                "or replicated, (). Name a dimension 'embed' to shard it over fsdp"
            )
    return {name: tuple(over) for name, over in rules.items()}


def divides_heads(ranks: int, heads: int, key_heads: int) -> bool:
    """Whether ranks can divide query heads evenly, and key heads accordingly."""
    return heads % ranks == 0 and (key_heads % ranks == 0 or ranks % key_heads == 0)


def spreads_attention(layout: Layout) -> bool:
    """Whether attention kernels see a part of a sequence (context parallelism, not Ulysses)."""
    return layout.context > 1 and layout.context_method != ULYSSES
