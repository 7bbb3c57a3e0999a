"""Distributed kernels of a layout, in place of a model's defaults.

They run inside the `shard_map` in which pipeline, data and fsdp are manual.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from etils import epy
from jax.typing import DTypeLike

from jaxscale.config import DataConfig, zero_stage
from jaxscale.config.layout import RING, TENSOR_ROWS, ULYSSES, Layout
from jaxscale.config.model import ModelSettings
from jaxscale.hardware import check_matmul_units, find_chip
from jaxscale.models.kernels import Kernels, plain_extend, plain_lookup
from jaxscale.ops.attention.attention import attention, choose, score_settings
from jaxscale.ops.attention.blocks import AttentionArrays
from jaxscale.ops.attention.context import context_attention
from jaxscale.ops.attention.context_chunks import balanced_order
from jaxscale.ops.attention.parts import part_attention
from jaxscale.ops.attention.platform_kernels import maskless
from jaxscale.ops.attention.ulysses import ulysses_attention
from jaxscale.ops.dropout import dropout, jitter
from jaxscale.ops.embedding import spread_lookup
from jaxscale.ops.experts.dispatch import Dispatch
from jaxscale.ops.loss import LossForm, cross_entropy
from jaxscale.ops.loss_over_vocabulary import Slice
from jaxscale.ops.rope import rotary, rotary_on_tpu
from jaxscale.ops.sizes import LANES
from jaxscale.ops.tensor_parallel import Spread, columns, linear, rows, spread_columns, spread_rows
from jaxscale.sharding.layout_checks import check_spread_attention
from jaxscale.sharding.resolve import automatic_axes, constrain
from jaxscale.sharding.rules import ACTIVATIONS, WEIGHTS, Rules, spreads_attention
from jaxscale.sharding.specs import REPLICATED, kernel_spec, kernel_vector_spec, manually

with epy.lazy_imports():  # half a second each, and only a GPU or a TPU needs it
    from jaxscale.ops.attention import flash, splash

EXPERT_MATMULS = {"cpu": "blocks", "gpu": "kernels", "tpu": "ragged_dot"}
"""Platform -> its grouped matmul (`ops.experts.grouped_matmul`), in every type; any other has that
of CPUs, which is plain JAX."""

ATTENTION_SCOPE = "attention_kernel"
"""The named scope of attention from queries, keys and values to the heads' outputs."""


def make_kernels(
    layout: Layout,
    implementation: str,
    platform: str,
    matmul_dtype: str = "",
    *,
    one_document: bool = False,
    trains_head: bool = True,
    rules: Rules | None = None,
    unroll: bool = False,
) -> Kernels:
    """The model's kernels for a resolved layout.

    Args:
      implementation: of attention, by `attention_name`.
      matmul_dtype: of the model.
      one_document: whether every row is one document, and padding after it.
      trains_head: whether the output matrix has a gradient.
      rules: of a model's additional logical axes.
      unroll: unrolls loops, for XLA's cost analysis.
    """
    # With context the partitioner shards the sequence, and would all-gather it for the reshape
    # with which the CPU's form of a weight's gradient merges batch and time.
    in_parts = platform == "cpu" and layout.context > 1
    how = {"dtype": matmul_dtype, "platform": "" if in_parts else platform}
    # On one GPU only: with collectives XLA for GPUs (jax 0.12) overlaps less of them. Llama 3 8B in
    # float8 on eight H200, fsdp 8, exposes 29 ms of collectives instead of 3.
    alone = platform == "gpu" and layout.num_devices == 1
    replaced: dict[str, Any] = {
        "columns": functools.partial(columns, **how, side_by_side=alone),
        "rows": functools.partial(rows, **how),
        "linear": functools.partial(linear, **how),
    }
    if layout.tensor > 1:
        axis, features = (
            name if layout.sizes.get(name, 1) > 1 else None for name in ("tensor", TENSOR_ROWS)
        )
        time = _mesh_axes(layout, ACTIVATIONS["seq"])
        spread = Spread(
            axis,
            time,
            automatic_axes(layout.sizes),
            features,
            ring=layout.overlap_tensor,
            recomputes=layout.remat == "full",
            dtype=matmul_dtype,
        )
        replaced |= {
            "columns": functools.partial(spread_columns, spread=spread),
            "rows": functools.partial(spread_rows, spread=spread),
        }
        replaced["key_heads"] = functools.partial(_key_heads, layout)
    if implementation == "splash":
        # The splash kernel does not scale scores. Scaling bfloat16 queries first would round them
        # a second time; RoPE scales in float32, before its one rounding.
        replaced |= {"rotary": _rotary(layout), "rotary_scales": True}
    return Kernels(
        attend=_attend(layout, implementation, one_document),
        **replaced,
        lookup=functools.partial(_lookup, layout),
        extend=functools.partial(_extend, layout) if layout.context > 1 else plain_extend,
        dropout=functools.partial(_noisy, layout, dropout),
        jitter=functools.partial(_noisy, layout, jitter),
        dispatch=Dispatch(
            layout.expert,
            layout.tensor,
            layout.context,
            automatic_axes(layout.sizes),
            EXPERT_MATMULS.get(platform, EXPERT_MATMULS["cpu"]),
            ragged=platform != "cpu",
            dtype=matmul_dtype,
            halves=layout.overlap_experts,
            # A pipeline computes the two gradients in separate operations.
            weights_first=platform == "tpu" and layout.pipeline == 1,
            nodes=layout.expert_nodes,
        ),
        sum_over_batch_ranks=functools.partial(_sum_over_batch_ranks, layout),
        cross_entropy=functools.partial(
            _cross_entropy,
            layout,
            LossForm(platform=platform, trains_head=trains_head, unroll=unroll),
        ),
        shard=lambda x, axes: constrain(x, axes, layout.sizes, {**ACTIVATIONS, **(rules or {})}),
    )


def evaluation_kernels(kernels: Kernels) -> Kernels:
    """The kernels for evaluation: experts drop no token, and sequences are not split into halves,
    since an evaluation batch may have a single one."""
    everything = dataclasses.replace(kernels.dispatch, keeps_all=True, halves=False)
    return dataclasses.replace(kernels, dispatch=everything)


def sliced_kernels(kernels: Kernels, columns: int) -> Kernels:
    """The kernels of a step in which each pipeline rank has a slice of the head.

    Args:
      columns: of the whole head.
    """
    loss = functools.partial(kernels.cross_entropy, slice_=Slice("pipeline", columns))
    return dataclasses.replace(kernels, cross_entropy=loss)


def attention_name(
    layout: Layout, model: ModelSettings, data: DataConfig, platform: str, generation: str = ""
) -> str:
    """The attention implementation of a run.

    Args:
      generation: of the device, by `device_generation`.

    Raises:
      ValueError: the implementation that is set cannot honour the settings.
    """
    check_spread_attention(layout, model.attention)
    spread = spreads_attention(layout)
    return choose(
        model.attention,
        platform,
        dtype=model.compute_dtype,
        head_dim=model.head_dim,
        # With ring or gather a kernel attends to chunks (`context_chunks.py`). An encoder-decoder
        # has sequences of two lengths.
        seq_len=math.gcd(data.seq_len, data.target_len)
        // (2 * layout.context if spread else 1)
        // layout.segments,
        value_dim=model.value_dim,
        generation=generation,
        uses=(*model.attention_uses, *(("part",) if layout.segments > 1 else ())),
        causal=model.causal,
        one_document=data.one_document,
        spread=spread,
    )


def attention_text(layout: Layout, implementation: str) -> str:
    """The attention implementation as a run prints it."""
    return (
        implementation if layout.context == 1 else f"{implementation}, by {layout.context_method}"
    )


def check_matmul_device(matmul_dtype: str, device: Any) -> None:
    """Refuses 8-bit matmuls on a device without units for them. A CPU emulates them.

    Raises:
      ValueError: names the devices with such units.
    """
    if not matmul_dtype or device.platform == "cpu":
        return
    check_matmul_units(matmul_dtype, device_generation(device), device.device_kind)


def device_generation(device: Any) -> str:
    """The target of a device's kernels, as in `hardware.csv`."""
    chip = find_chip(device.device_kind)
    # A GPU missing from hardware.csv is known by its compute capability.
    capability = str(getattr(device, "compute_capability", "")).replace(".", "")
    return chip.generation if chip else f"sm{capability}"


def _attend(layout: Layout, implementation: str, one_document: bool) -> Callable[..., jax.Array]:
    """Attention with every axis manual, each rank for its heads and its part of a sequence: the
    compiler cannot partition kernels."""
    queries = kernel_spec(("batch", "seq", "heads", "head_dim"), layout.sizes)
    keys = kernel_spec(("batch", "seq", "kv_heads", "head_dim"), layout.sizes)
    segments = kernel_spec(("batch", "seq"), layout.sizes)
    bias = kernel_spec(("buckets", "heads"), layout.sizes)
    sinks = kernel_vector_spec("heads", layout.sizes)
    # With `keep:N` the pipeline's R operations recompute, and layers have no remat policy.
    under_policy = layout.remat_policy.by_names and layout.remat_policy.kept_passes is None

    def attend(*arrays: Any, **settings: Any) -> jax.Array:
        given = AttentionArrays(*arrays)
        scoring = score_settings(
            *given[:2], given.segments_BS, given.bias_bN, part=given.begin is not None, **settings
        )
        whole = functools.partial(
            attention, implementation=implementation, one_document=one_document, **settings
        )
        if layout.context > 1 and given.begin is not None:
            local = functools.partial(part_attention, axis="context", attend=whole)
        elif spreads_attention(layout):
            kernel = _context_kernel(implementation)
            # Pipeline ranks are at different operations: no permutation of all devices.
            in_pairs = layout.pipeline > 1 and layout.context_method == RING
            method = "pairs" if in_pairs else layout.context_method
            local = functools.partial(kernel, axis="context", method=method, scoring=scoring)
        else:
            local = whole
        has_mask = not (one_document and scoring.causal)
        if implementation == "cudnn" and has_mask and not under_policy:
            local = maskless(local)
        if layout.context > 1 and layout.context_method == ULYSSES:
            local = functools.partial(ulysses_attention, axis="context", attend=local)
        specs = (queries, keys, keys, segments, segments, bias, sinks, REPLICATED)
        with jax.named_scope(ATTENTION_SCOPE):
            return _manual(layout, local, specs, queries)(*given)

    return attend


def _context_kernel(implementation: str) -> Callable[..., jax.Array]:
    match implementation:
        case "flash":
            return flash.flash_attention
        case "splash":
            return splash.splash_attention
    return context_attention


def _manual(layout: Layout, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
    """A kernel with every axis manual, repeated on all rows of tensor."""
    axes = {*automatic_axes(layout.sizes)} - {TENSOR_ROWS}
    kernel = manually(local, axes, in_specs, out_specs)
    if layout.tensor_rows == 1:
        return kernel
    # Without check_vma the backward pass sums gradients over the rows, where they are equal, and
    # divides by their number. Kernels fail the check themselves, but may be inside.
    return jax.shard_map(
        kernel,
        in_specs=REPLICATED,
        out_specs=REPLICATED,
        axis_names={TENSOR_ROWS},
        check_vma=True,
    )


def _noisy(
    layout: Layout,
    kernel: Callable[..., jax.Array],
    x: jax.Array,
    noise: jax.Array,
    layer: jax.Array | int,
    site: int,
    amount: float,
    begin: jax.Array | int = 0,
) -> jax.Array:
    """`dropout` or `jitter` with the tokens' positions in the text, from `begin`."""
    positions = begin + jnp.asarray(balanced_order(x.shape[1], layout.context))
    return kernel(x, noise, layer, site, amount, positions)


def _extend(layout: Layout, row_BS: jax.Array, new_BT: jax.Array, begin: jax.Array) -> jax.Array:
    """`plain_extend` where each rank of context has its parts of all segments in order."""
    (batch, length, *features), ranks = new_BT.shape, layout.context
    by_rank = row_BS.reshape(batch, ranks, -1, length // ranks, *features)
    new = new_BT.reshape(batch, ranks, 1, length // ranks, *features)
    found = jax.lax.dynamic_update_slice_in_dim(by_rank, new, begin // length, axis=2)
    return found.reshape(row_BS.shape)


def _sum_over_batch_ranks(layout: Layout, x: jax.Array) -> jax.Array:
    """All-reduce over the ranks that share a micro-batch's rows."""
    axes = _mesh_axes(layout, ACTIVATIONS["batch"])
    return jax.lax.psum(x, axes) if axes else x


def _key_heads(layout: Layout, x: jax.Array) -> jax.Array:
    """Repeats key/value heads where ranks of tensor outnumber them: each rank gets the head that
    its query heads read, from replicated weights (`whole_kv_heads`).

    Each rank projects one head only. Compared with an even division, the weights, their gradients,
    their optimizer state and the saved keys and values need tensor / num_kv_heads times the memory.
    The gradients of a head are summed over its ranks: an all-reduce over tensor of these weights'
    gradients, for each layer and micro-batch.
    """
    heads = x.shape[-2]
    if heads % layout.tensor_columns == 0:
        return x
    assert layout.tensor_columns % heads == 0  # or `whole_kv_heads` has refused it
    axes = ("embed",) * (x.ndim - 2) + ("kv_heads", "head_dim")
    repeated = jnp.repeat(x, layout.tensor_columns // heads, axis=-2)
    return constrain(repeated, axes, layout.sizes)


def _rotary(layout: Layout) -> Callable[..., jax.Array]:
    """RoPE with every axis manual: each rank rotates its heads."""
    heads = kernel_spec(("batch", "seq", "heads", "head_dim"), layout.sizes)

    def rotate(x: jax.Array, positions: jax.Array, **settings: Any) -> jax.Array:
        if x.shape[-1] != LANES or x.shape[1] % LANES:
            return rotary(x, positions, **settings)
        local = functools.partial(rotary_on_tpu, **settings)
        specs = heads, kernel_spec(("batch", "seq"), layout.sizes)
        return _manual(layout, local, specs, heads)(x, positions)

    return rotate


def _lookup(
    layout: Layout, table: jax.Array, indices: jax.Array, rows: str, dtype: DTypeLike
) -> jax.Array:
    time = _mesh_axes(layout, ACTIVATIONS["residual_seq"])
    features = _mesh_axes(layout, ACTIVATIONS["embed"])
    if not time and not features:
        return plain_lookup(table, indices, rows, dtype)
    over = _mesh_axes(layout, WEIGHTS[rows])
    return spread_lookup(
        table,
        indices,
        dtype,
        rows=over[0] if over else None,
        time=time,
        axes=automatic_axes(layout.sizes),
        features=features[0] if features else None,
        scatters=_scatters(layout, table.shape[1]),
    )


def _cross_entropy(
    layout: Layout,
    form: LossForm,
    x_BTD: jax.Array,
    head: jax.Array,
    *args: jax.Array,
    slice_: Slice | None = None,
    **settings: Any,
) -> tuple[jax.Array, jax.Array]:
    """The loss, divided among ranks of context (tokens) and tensor (vocabulary).

    Args:
      slice_: where pipeline ranks have slices of the head.
    """
    time, columns = _mesh_axes(layout, ACTIVATIONS["seq"]), _mesh_axes(layout, WEIGHTS["vocab"])
    features = _mesh_axes(layout, ACTIVATIONS["embed"])
    # A custom model's head may have a number of columns that tensor does not divide: replicated.
    vocab = slice_.columns if slice_ else head.shape[0 if settings.get("transposed") else 1]
    axis = columns[0] if columns and vocab % layout.tensor_columns == 0 else None
    spread = None
    if axis or time or features:
        of_stream = features[0] if features else None
        spread = Spread(axis, time, automatic_axes(layout.sizes), of_stream)
    scatters = _scatters(layout, x_BTD.shape[-1])
    form = form._replace(spread=spread, scatters=scatters, slice_=slice_)
    return cross_entropy(x_BTD, head, *args, form=form, **settings)


def _scatters(layout: Layout, features: int) -> bool:
    """Whether ranks of context keep only their part of a gradient's features, as of the state."""
    return zero_stage.shards_state(layout.zero_stage) and features % layout.context == 0


def _mesh_axes(layout: Layout, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if layout.sizes.get(axis, 1) > 1)
