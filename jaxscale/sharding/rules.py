"""The mesh axes of each logical dimension, and the checks on a configuration that need no devices.

Nothing here imports JAX: the planner uses the same rules.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxscale.choices import nearest_divisors
from jaxscale.config import Config
from jaxscale.layout import TENSOR_ROWS, ULYSSES, Layout
from jaxscale.model_config import ModelConfig
from jaxscale.model_config.settings import SPREAD_ATTENTIONS

Axes = tuple[str, ...]
Rules = Mapping[str, tuple[str, ...]]

# Logical axis -> the mesh axes that it is sharded over. Weights and activations differ: a weight's
# embed dimension is the one that ZeRO shards, an activation's only the rows of tensor, if it has
# any. "tensor" is its columns then: weights alternate between embed over rows and hidden over
# columns, and the reverse, so that no activation moves between two matmuls (arXiv 2305.13525).
WEIGHTS: Rules = {
    "layers": ("pipeline",),
    "embed": ("tensor_rows", "context", "fsdp"),
    # Of parameters outside the layers, which the ranks of the pipeline would otherwise replicate.
    "outer_embed": ("tensor_rows", "context", "pipeline", "fsdp"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    # Where ranks outnumber them: `with_whole_kv_heads`.
    "whole_kv_heads": (),
    "head_dim": (),
    # Of latent attention: whole on each rank of tensor, but for the heads.
    "query_rank": (),
    "kv_rank": (),
    "plain_dim": (),
    "value_dim": (),
    "halves": (),
    "pairs": (),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "positions": (),
    "buckets": (),
    "token_types": (),
    # Each rank of expert has some of the experts, whole but for their columns.
    "experts": ("expert",),
    "expert_mlp": ("tensor",),
    "shared_mlp": ("tensor",),
    "routes": (),  # of a router, which every rank has whole: a score for each expert
    "transform": (),  # of a head, between its two matrices: each rank transforms its own tokens
}
ACTIVATIONS: Rules = {
    "batch": ("data", "fsdp", "expert"),
    "seq": ("context",),
    # Between the matmuls of attention and MLP, which need all tokens of a rank of context, the
    # tokens are sharded over tensor too (sequence parallelism, arXiv 2205.05198, section 4.2).
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
    "expert_mlp": "model.expert_d_ff",
    "shared_mlp": "model.shared_d_ff",
}
"""The setting that gives the size of a dimension, where there is one."""

REPLICATED_WEIGHTS: Rules = {
    **WEIGHTS,
    "embed": ("tensor_rows",),
    "outer_embed": ("tensor_rows", "pipeline"),
}
"""The rules of a tree that a ZeRO stage replicates over fsdp and context, and of weights in use."""


def mesh_axes(
    axes: Axes,
    rules: Rules,
    sizes: Mapping[str, int],
    shape: tuple[int, ...] | None = None,
    *,
    name: str = "an array",
) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension; mesh axes of size 1 are left out.

    Args:
      axes: a logical name for each dimension.
      rules: logical name -> mesh axes.
      sizes: mesh axis -> size; one that is not there has size 1.
      shape: checked for divisibility when given.
      name: what the errors call the array.

    Raises:
      ValueError: an unknown name, two names on one mesh axis, or a dimension that does not divide.
    """
    found, owner = [], {}
    for dim, logical in enumerate(axes):
        if logical not in rules:
            raise ValueError(
                f"{name}: logical axis {logical!r} has no rule; known: {', '.join(sorted(rules))}"
            )
        over = tuple(axis for axis in rules[logical] if sizes.get(axis, 1) > 1)
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


def _set(axis: str, sizes: Mapping[str, int]) -> str:
    """What sets the size of a mesh axis."""
    rows = axis == "tensor" and sizes.get(TENSOR_ROWS, 1) > 1
    return f"layout.{axis}" + " / layout.tensor_rows" * rows


def with_whole_kv_heads(axes: Axes, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Axes:
    """The names of an array's dimensions, "kv_heads" as "whole_kv_heads" where the ranks of tensor
    outnumber the heads and are a multiple of them: each rank has all heads then, and uses the one
    that its query heads read (`training/kernels.py`)."""
    if "kv_heads" not in axes:
        return axes
    heads, ranks = shape[axes.index("kv_heads")], sizes["tensor"]
    if heads >= ranks or ranks % heads:
        return axes
    return tuple("whole_kv_heads" if name == "kv_heads" else name for name in axes)


def spreads_outer(pipeline: Any, ranks: Any, d_model: int) -> Any:
    """Whether parameters outside the layers are sharded over the pipeline: of ints or arrays.

    Args:
      ranks: of fsdp and context together.
    """
    return (pipeline > 1) & (d_model % (pipeline * ranks) == 0)


LAYER_SHARD_AXES = ("fsdp", "data", "context")
"""Mesh axes over which the layers of a stack are sharded for updates of whole matrices (Muon's),
which their ranks would otherwise all repeat."""


def shards_layers(rows: Any, pipeline: Any, ranks: Any, size: Any) -> Any:
    """Whether a stack's layers are sharded over one more of these axes: of ints or arrays.

    A first one may leave ranks without a layer. A further one, and one beside a pipeline, must
    divide evenly, or the compiler would have to replicate the stack in between.

    Args:
      rows: layers of a rank of the pipeline.
      ranks: that they are sharded over already.
      size: of the axis.
    """
    even = rows % (ranks * size) == 0
    return (size > 1) & (even | ((pipeline == 1) & (ranks == 1)))


def own_rules(rules: Rules) -> Rules:
    """Checked rules for the logical axes of a model of one's own.

    Raises:
      ValueError: a name that exists, or mesh axes that these rules cannot use.
    """
    for name, over in rules.items():
        if name in WEIGHTS or name in ACTIVATIONS:
            raise ValueError(f"rules: {name!r} is a logical axis already; choose another name")
        if set(over) - {"tensor"}:
            raise ValueError(
                f"rules: {name!r} -> {over}; a logical axis of one's own can be sharded over "
                "('tensor',), or be whole: (). Name a dimension 'embed' to shard it over fsdp"
            )
    return {name: tuple(over) for name, over in rules.items()}


def check_divides(config: Config) -> None:
    """Refuses a batch that does not split evenly over replicas and micro-batches.

    Raises:
      ValueError: with the settings to change.
    """
    layout, batch = config.layout, config.data.global_batch_size
    parts = layout.batch_shards * layout.microbatches
    if batch % parts:
        below, above = batch // parts * parts, -(-batch // parts) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        experts = f"layout.expert {layout.expert} x " if layout.expert > 1 else ""
        raise ValueError(
            f"data.global_batch_size = {batch} does not split into layout.data {layout.data} x "
            f"layout.fsdp {layout.fsdp} x {experts}layout.microbatches {layout.microbatches} = "
            f"{parts} parts; set data.global_batch_size to {nearest}, or change the layout"
        )


def check_overlap(config: Config) -> None:
    """Refuses halves of what does not travel, and of a single sequence.

    Raises:
      ValueError: with what to set.
    """
    layout, batch = config.layout, config.data.global_batch_size
    if not layout.overlap_experts:
        return
    if layout.expert == 1:
        raise ValueError(
            "layout.overlap_experts = True with layout.expert = 1: every rank has all experts, "
            "and no tokens travel; set layout.overlap_experts = False"
        )
    if batch >= 2 * layout.batch_shards * layout.microbatches:
        return
    fewer = nearest_divisors(layout.microbatches, layout.microbatches)
    change = (
        f"layout.microbatches = {fewer}"
        if fewer
        else f"data.global_batch_size = {2 * layout.batch_shards}"
    )
    raise ValueError(
        "layout.overlap_experts = True exchanges the tokens of half of a rank's sequences beside "
        "the matmuls of the other half, and a rank has one sequence of a micro-batch; set "
        f"{change}, or layout.overlap_experts = False"
    )


def check_ring(config: Config) -> None:
    """Refuses ring steps between ranks that are not there.

    Raises:
      ValueError: with what to set.
    """
    if config.layout.overlap_tensor and config.layout.tensor == 1:
        raise ValueError(
            "layout.overlap_tensor = True with layout.tensor = 1: every rank has its matmuls to "
            "itself, and nothing travels; set layout.overlap_tensor = False"
        )


def check_pipeline_gather(config: Config) -> None:
    """Refuses gathers and reductions by layer where there are none.

    Raises:
      ValueError: with what to set.
    """
    layout = config.layout
    if layout.pipeline == 1 or layout.pipeline_gather == "chunk":
        return
    if layout.zero_ranks == 1 or layout.zero_stage < 2:
        raise ValueError(
            f"layout.pipeline_gather = 'layer' with layout.fsdp = {layout.fsdp}, layout.context = "
            f"{layout.context} and layout.zero_stage = {layout.zero_stage}: neither weights nor "
            "gradients of a micro-batch are in shards; set layout.pipeline_gather = 'chunk'"
        )


def check_matmuls(config: Config) -> None:
    """Refuses matmuls of 8 bits where there are none.

    Raises:
      ValueError: with what to set.
    """
    model = config.model
    if not model.matmul_dtype:
        return
    said = f"model.matmul_dtype = {model.matmul_dtype!r}"
    if model.matmul_dtype == "int8" and config.layout.overlap_tensor:
        raise ValueError(
            f"{said} with layout.overlap_tensor = True: ranks that multiply different tokens at a "
            "time would need the same scales; set layout.overlap_tensor = False"
        )


def divides_heads(ranks: int, heads: int, key_heads: int) -> bool:
    """Whether ranks can have equally many heads, and the key heads that these read."""
    return heads % ranks == 0 and (key_heads % ranks == 0 or ranks % key_heads == 0)


def check_ulysses(config: Config) -> None:
    """Refuses heads that do not divide among the ranks of context that exchange them.

    Raises:
      ValueError: with what to set.
    """
    model = config.model
    if not isinstance(model, ModelConfig):  # others are refused by the kernel
        return
    if said := ulysses_refusal(config.layout, model.num_heads, model.num_kv_heads):
        raise ValueError(said)


def ulysses_refusal(layout: Layout, heads: int, key_heads: int) -> str:
    """Why the heads of a model do not divide among the ranks that exchange them, and what to set;
    "" where they do, or stay where they are."""
    if layout.context == 1 or layout.context_method != ULYSSES:
        return ""
    ranks, columns = layout.context, layout.tensor_columns
    heads, key_heads = heads // columns, max(key_heads // columns, 1)
    if divides_heads(ranks, heads, key_heads):
        return ""
    nearest = max(n for n in range(1, ranks) if divides_heads(n, heads, key_heads))
    each = f" on each of {columns} ranks of tensor" if columns > 1 else ""
    return (
        f"layout.context_method = 'ulysses' with layout.context = {ranks} divides heads, and there "
        f"are {heads} and {key_heads} of keys{each}; set layout.context = {nearest}, or "
        "layout.context_method = 'ring' or 'gather'"
    )


def spreads_attention(layout: Layout) -> bool:
    """Whether a rank attends with its part of a sequence, which not every kernel does."""
    return layout.context > 1 and layout.context_method != ULYSSES


def check_spread_attention(config: Config) -> None:
    """Refuses a kernel that attends within one device where sequences are spread over several.

    Raises:
      ValueError: with what to set.
    """
    kernel, context = config.model.attention, config.layout.context
    if spreads_attention(config.layout) and kernel not in ("auto", *SPREAD_ATTENTIONS):
        raise ValueError(
            f"model.attention = {kernel!r} attends within one device, and layout.context = "
            f"{context} spreads a sequence over several; set model.attention = 'auto', "
            "layout.context = 1, or layout.context_method = 'ulysses'"
        )


def check_tensor_rows(config: Config) -> None:
    """Refuses rows of tensor for a model with experts, or with modules that predict further tokens.

    Raises:
      ValueError: with what to set.
    """
    rows, model = config.layout.tensor_rows, config.model
    if rows > 1 and model.num_experts:
        raise ValueError(
            f"layout.tensor_rows = {rows} with model.num_experts = {model.num_experts} is "
            "not available in this version: experts have their columns over tensor alone; set "
            "layout.tensor_rows = 1"
        )
    if rows > 1 and model.prediction_depth:
        raise ValueError(
            f"layout.tensor_rows = {rows} with model.prediction_depth = {model.prediction_depth} "
            "is not available in this version; set layout.tensor_rows = 1"
        )


def check_sequence(config: Config) -> None:
    """Refuses a sequence that the ranks of context and tensor cannot share equally.

    Raises:
      ValueError: with the nearest lengths that they can.
    """
    layout = config.layout
    chunks = 2 * layout.context if layout.context > 1 else 1
    unit = math.lcm(chunks, layout.context * layout.tensor_columns)
    rows = f" / layout.tensor_rows {layout.tensor_rows}" if layout.tensor_rows > 1 else ""
    for name in ("seq_len", "target_len"):
        length = getattr(config.data, name)
        if length % unit:
            below, above = length // unit * unit, -(-length // unit) * unit
            nearest = f"{below} or {above}" if below else f"{above}"
            two = " (two chunks a rank)" if layout.context > 1 else ""
            raise ValueError(
                f"data.{name} = {length} does not split over layout.context = {layout.context}"
                f"{two} x layout.tensor = {layout.tensor}{rows}, which takes multiples of {unit}; "
                f"set data.{name} = {nearest}, or change the layout"
            )
