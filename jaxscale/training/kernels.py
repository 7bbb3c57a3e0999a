"""The kernels that a layout replaces in a model.

They run inside the `shard_map` in which pipeline, data and fsdp are manual.
"""

import functools
from collections.abc import Callable

import jax
from jax.typing import DTypeLike

from jaxscale.config import Config
from jaxscale.layout import AUTOMATIC_AXES, Layout
from jaxscale.models.decoder import Kernels, plain_lookup
from jaxscale.ops.attention import attention, choose
from jaxscale.ops.attention_kernels import maskless, splash
from jaxscale.ops.context_attention import context_attention
from jaxscale.ops.embedding import spread_lookup
from jaxscale.ops.loss import cross_entropy
from jaxscale.ops.rope import rotary, rotary_on_tpu
from jaxscale.ops.sizes import LANES
from jaxscale.ops.tensor_parallel import Spread, spread_columns, spread_rows
from jaxscale.sharding.resolve import ACTIVATIONS, WEIGHTS, constrain
from jaxscale.sharding.specs import kernel_spec


def make_kernels(config: Config, platform: str, *, unroll: bool = False) -> Kernels:
    """The model's kernels for a resolved layout.

    Args:
      unroll: writes loops out, for XLA's cost analysis.
    """
    layout, replaced = config.layout, {}
    if layout.tensor > 1:
        spread = Spread("tensor", _mesh_axes(layout, ACTIVATIONS["seq"]), AUTOMATIC_AXES)
        replaced = {
            "columns": functools.partial(spread_columns, spread=spread),
            "rows": functools.partial(spread_rows, spread=spread),
        }
    if _scales_before(config, platform):
        # The softmax scale, its square root on each of queries and keys.
        turn = _rotary(layout) if config.model.head_dim == LANES else rotary
        replaced["rotary"] = functools.partial(turn, factor=config.model.attention_scale**0.5)
    return Kernels(
        attend=_attend(config, platform),
        **replaced,
        lookup=functools.partial(_lookup, layout),
        cross_entropy=functools.partial(cross_entropy, shards=layout.context, unroll=unroll),
        shard=lambda x, axes: constrain(x, axes, layout.sizes),
    )


def attention_name(config: Config, platform: str) -> str:
    """The implementation of attention that a run uses.

    Raises:
      ValueError: the one that is set cannot honour the settings.
    """
    model, layout = config.model, config.layout
    if layout.context == 1:
        return choose(
            model.attention,
            platform,
            dtype=model.compute_dtype,
            head_dim=model.head_dim,
            seq_len=config.data.seq_len,
        )
    if model.attention not in ("auto", "blockwise"):
        raise ValueError(
            f"model.attention = {model.attention!r} attends within one device, and layout.context "
            f"= {layout.context} spreads a sequence over several; set model.attention = 'auto', or "
            "layout.context = 1"
        )
    return f"blockwise, by {layout.context_method}"


def _scales_before(config: Config, platform: str) -> bool:
    """Whether queries and keys are scaled before the attention kernel, and not the scores in it:
    where they are rotated in float32 before, so that scaling adds no rounding of its own."""
    return attention_name(config, platform) == "splash" and config.model.positions == "rotary"


def _attend(config: Config, platform: str) -> Callable[..., jax.Array]:
    """Attention with every axis manual, each rank for its heads and its part of a sequence:
    kernels know nothing of meshes, and the compiler cannot partition them."""
    layout, implementation = config.layout, attention_name(config, platform)
    if _scales_before(config, platform):
        local = functools.partial(splash, scaled=True)
    elif layout.context == 1:
        local = functools.partial(attention, implementation=implementation)
    else:
        local = functools.partial(context_attention, axis="context", method=layout.context_method)

    # Where a table recomputes a pipeline's passes, the layer itself is under no policy.
    under_policy = layout.remat_policy.by_names and layout.remat_policy.kept_passes is None

    queries = kernel_spec(("batch", "seq", "heads", "head_dim"), layout.sizes)
    keys = kernel_spec(("batch", "seq", "kv_heads", "head_dim"), layout.sizes)

    def attend(q, k, v, segments, *, sliding_window: int, **settings: float) -> jax.Array:
        usual = {"causal": True, "scale": config.model.head_dim**-0.5, "soft_cap": 0.0}
        if implementation != "reference" and settings != usual:
            raise ValueError("this kernel has no bidirectional attention, scale or soft cap")
        extra = settings if implementation == "reference" else {}
        kernel = functools.partial(local, sliding_window=sliding_window, **extra)
        if implementation == "cudnn" and not under_policy:
            kernel = maskless(kernel)
        return jax.shard_map(
            kernel,
            in_specs=(queries, keys, keys, kernel_spec(("batch", "seq"), layout.sizes)),
            out_specs=queries,
            axis_names=set(AUTOMATIC_AXES),
            check_vma=False,
        )(q, k, v, segments)

    return attend


def _rotary(layout: Layout) -> Callable[..., jax.Array]:
    """Rotary positions with every axis manual: each rank rotates its own heads."""
    heads = kernel_spec(("batch", "seq", "heads", "head_dim"), layout.sizes)

    def turn(x: jax.Array, positions: jax.Array, **settings: float) -> jax.Array:
        return jax.shard_map(
            functools.partial(rotary_on_tpu, **settings),
            in_specs=(heads, kernel_spec(("batch", "seq"), layout.sizes)),
            out_specs=heads,
            axis_names=set(AUTOMATIC_AXES),
            check_vma=False,
        )(x, positions)

    return turn


def _lookup(
    layout: Layout, table: jax.Array, indices: jax.Array, rows: str, dtype: DTypeLike
) -> jax.Array:
    time = _mesh_axes(layout, ACTIVATIONS["residual_seq"])
    if not time:
        return plain_lookup(table, indices, rows, dtype)
    over = _mesh_axes(layout, WEIGHTS[rows])
    return spread_lookup(
        table, indices, dtype, rows=over[0] if over else None, time=time, axes=AUTOMATIC_AXES
    )


def _mesh_axes(layout: Layout, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if layout.sizes[axis] > 1)
