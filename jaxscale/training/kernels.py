"""The kernels that a layout replaces in a model.

They run inside the `shard_map` in which pipeline, data and fsdp are manual.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from etils import epy
from jax.typing import DTypeLike

from jaxscale.config import DataConfig, zero_stage
from jaxscale.config.layout import TENSOR_ROWS, ULYSSES, Layout
from jaxscale.config.model import ModelSettings
from jaxscale.hardware import check_matmul_units, find_chip
from jaxscale.models.kernels import Kernels, plain_lookup
from jaxscale.ops.attention.attention import attention, choose, score_settings
from jaxscale.ops.attention.blocks import AttentionArrays
from jaxscale.ops.attention.context import context_attention
from jaxscale.ops.attention.context_chunks import balanced_order
from jaxscale.ops.attention.platform_kernels import maskless
from jaxscale.ops.attention.ulysses import ulysses_attention
from jaxscale.ops.dropout import dropout, jitter
from jaxscale.ops.embedding import spread_lookup
from jaxscale.ops.experts.dispatch import Dispatch
from jaxscale.ops.loss import LossForm, cross_entropy
from jaxscale.ops.rope import rotary, rotary_on_tpu
from jaxscale.ops.sizes import LANES
from jaxscale.ops.tensor_parallel import Spread, columns, linear, rows, spread_columns, spread_rows
from jaxscale.sharding.layout_checks import check_spread_attention
from jaxscale.sharding.resolve import automatic_axes, constrain
from jaxscale.sharding.rules import ACTIVATIONS, WEIGHTS, Rules, spreads_attention
from jaxscale.sharding.specs import REPLICATED, kernel_spec, kernel_vector_spec, manually

with epy.lazy_imports():  # half a second, and only a GPU needs it
    from jaxscale.ops.attention import context_flash

ATTENTION_SCOPE = "attention_kernel"
"""The named scope of all that computes the heads' outputs from queries, keys and values."""


def make_kernels(
    layout: Layout,
    implementation: str,
    platform: str,
    matmul_dtype: str = "",
    *,
    one_document: bool = False,
    rules: Rules | None = None,
    unroll: bool = False,
) -> Kernels:
    """The model's kernels for a resolved layout.

    Args:
      implementation: of attention, by `attention_name`.
      matmul_dtype: of the model.
      one_document: whether every row is one document, and padding after it.
      rules: of a model's own logical axes.
      unroll: writes loops out, for XLA's cost analysis.
    """
    # With context the compiler spreads a sequence, and would gather it to merge its dimensions.
    in_parts = platform == "cpu" and layout.context > 1
    how = {"dtype": matmul_dtype, "platform": "" if in_parts else platform}
    # With collectives XLA hid less of them: in float8, fsdp 8, 29 ms were exposed in place of 3.
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
        # Its kernel does not scale. Rotation does so in float32, with no rounding of its own.
        replaced |= {"rotary": _rotary(layout), "rotary_scales": True}
    return Kernels(
        attend=_attend(layout, implementation, one_document),
        **replaced,
        lookup=functools.partial(_lookup, layout),
        dropout=functools.partial(_noisy, layout, dropout),
        jitter=functools.partial(_noisy, layout, jitter),
        dispatch=Dispatch(
            layout.expert,
            layout.tensor,
            layout.context,
            automatic_axes(layout.sizes),
            # XLA's own operation is a kernel on TPUs; elsewhere it would multiply every row by the
            # matrix of every expert (jax 0.12).
            "ragged_dot" if platform == "tpu" else "blocks",
            ragged=platform != "cpu",
            dtype=matmul_dtype,
            halves=layout.overlap_experts,
        ),
        all_rows=functools.partial(_all_rows, layout),
        cross_entropy=functools.partial(
            _cross_entropy, layout, LossForm(platform=platform, unroll=unroll)
        ),
        shard=lambda x, axes: constrain(x, axes, layout.sizes, {**ACTIVATIONS, **(rules or {})}),
    )


def evaluation_kernels(kernels: Kernels) -> Kernels:
    """The kernels with experts that take every token, whatever their capacity; a batch to evaluate
    may have too few sequences for halves."""
    everything = dataclasses.replace(kernels.dispatch, keeps_all=True, halves=False)
    return dataclasses.replace(kernels, dispatch=everything)


def attention_name(layout: Layout, model: ModelSettings, data: DataConfig, platform: str) -> str:
    """The implementation of attention that a run uses.

    Raises:
      ValueError: the one that is set cannot honour the settings.
    """
    check_spread_attention(layout, model.attention)
    spread = spreads_attention(layout)
    return choose(
        model.attention,
        platform,
        dtype=model.compute_dtype,
        head_dim=model.head_dim,
        # A kernel sees a pair of the chunks of `context_chunks.py`.
        seq_len=data.seq_len // (2 * layout.context if spread else 1),
        uses=model.attention_uses,
        causal=model.causal,
        one_document=data.one_document,
        spread=spread,
    )


def attention_text(layout: Layout, implementation: str) -> str:
    """The implementation of attention as a run prints it."""
    return (
        implementation if layout.context == 1 else f"{implementation}, by {layout.context_method}"
    )


def check_matmul_device(matmul_dtype: str, device: Any) -> None:
    """Refuses matmuls of 8 bits on a device that has no units for them. A CPU emulates them.

    Raises:
      ValueError: names the devices that have.
    """
    if not matmul_dtype or device.platform == "cpu":
        return
    chip = find_chip(device.device_kind)
    # A GPU that the table does not have says what its kernels are written for.
    capability = str(getattr(device, "compute_capability", "")).replace(".", "")
    generation = chip.generation if chip else f"sm{capability}"
    check_matmul_units(matmul_dtype, generation, device.device_kind)


def _attend(layout: Layout, implementation: str, one_document: bool) -> Callable[..., jax.Array]:
    """Attention with every axis manual, each rank for its heads and its part of a sequence:
    kernels know nothing of meshes, and the compiler cannot partition them."""
    queries = kernel_spec(("batch", "seq", "heads", "head_dim"), layout.sizes)
    keys = kernel_spec(("batch", "seq", "kv_heads", "head_dim"), layout.sizes)
    segments = kernel_spec(("batch", "seq"), layout.sizes)
    bias = kernel_spec(("buckets", "heads"), layout.sizes)
    sinks = kernel_vector_spec("heads", layout.sizes)
    # Where a table recomputes a pipeline's passes, the layer itself is under no policy.
    under_policy = layout.remat_policy.by_names and layout.remat_policy.kept_passes is None

    def attend(*arrays: Any, **settings: Any) -> jax.Array:
        given = AttentionArrays(*arrays)
        scoring = score_settings(*given[:2], given.segments_BS, given.bias_bN, **settings)
        if spreads_attention(layout):
            flash = implementation == "flash"
            kernel = context_flash.context_flash if flash else context_attention
            local = functools.partial(
                kernel, axis="context", method=layout.context_method, scoring=scoring
            )
        else:
            local = functools.partial(
                attention, implementation=implementation, one_document=one_document, **settings
            )
        has_mask = not (one_document and scoring.causal)
        if implementation == "cudnn" and has_mask and not under_policy:
            local = maskless(local)
        if layout.context > 1 and layout.context_method == ULYSSES:
            local = functools.partial(ulysses_attention, axis="context", attend=local)
        specs = (queries, keys, keys, segments, segments, bias, sinks)
        with jax.named_scope(ATTENTION_SCOPE):
            return _manual(layout, local, specs, queries)(*given)

    return attend


def _manual(layout: Layout, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
    """A kernel with every axis manual, which the rows of tensor all repeat."""
    axes = {*automatic_axes(layout.sizes)} - {TENSOR_ROWS}
    kernel = manually(local, axes, in_specs, out_specs)
    if layout.tensor_rows == 1:
        return kernel
    # Without this check the backward pass would sum gradients over the rows, which are equal there,
    # and divide by their number. Kernels do not pass it, but may be inside.
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
) -> jax.Array:
    """`dropout` or `jitter` by the places of tokens in the text."""
    place = jnp.asarray(balanced_order(x.shape[1], layout.context))
    return kernel(x, noise, layer, site, amount, place)


def _all_rows(layout: Layout, x: jax.Array) -> jax.Array:
    """The sum over the ranks that share a micro-batch's rows."""
    axes = _mesh_axes(layout, ACTIVATIONS["batch"])
    return jax.lax.psum(x, axes) if axes else x


def _key_heads(layout: Layout, x: jax.Array) -> jax.Array:
    """Weights with a key/value head for each rank of tensor, if there are fewer: the one that the
    rank's query heads read, of weights that every rank has whole (`whole_kv_heads`).

    Each rank projects its own head only. Against an even division, the weights, their gradients
    and their optimizer state take memory tensor / num_kv_heads times, and keys and values that are
    saved for the backward pass as well. The ranks' gradients of a head are summed, which costs an
    all-reduce over tensor of the gradients of these weights, for each layer and micro-batch.
    """
    heads = x.shape[-2]
    if heads % layout.tensor_columns == 0:
        return x
    assert layout.tensor_columns % heads == 0  # or `whole_kv_heads` has refused it
    axes = ("embed",) * (x.ndim - 2) + ("kv_heads", "head_dim")
    repeated = jnp.repeat(x, layout.tensor_columns // heads, axis=-2)
    return constrain(repeated, axes, layout.sizes)


def _rotary(layout: Layout) -> Callable[..., jax.Array]:
    """Rotary positions with every axis manual: each rank rotates its own heads."""
    heads = kernel_spec(("batch", "seq", "heads", "head_dim"), layout.sizes)

    def turn(x: jax.Array, positions: jax.Array, **settings: Any) -> jax.Array:
        if x.shape[-1] != LANES or x.shape[1] % LANES:
            return rotary(x, positions, **settings)
        local = functools.partial(rotary_on_tpu, **settings)
        specs = heads, kernel_spec(("batch", "seq"), layout.sizes)
        return _manual(layout, local, specs, heads)(x, positions)

    return turn


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
    **settings: Any,
) -> tuple[jax.Array, jax.Array]:
    """The loss, which ranks of context and tensor share."""
    time, columns = _mesh_axes(layout, ACTIVATIONS["seq"]), _mesh_axes(layout, WEIGHTS["vocab"])
    features = _mesh_axes(layout, ACTIVATIONS["embed"])
    # Every rank has a head of a model of one's own whole where they do not divide its columns.
    vocab = head.shape[0 if settings.get("transposed") else 1]
    axis = columns[0] if columns and vocab % layout.tensor_columns == 0 else None
    spread = None
    if axis or time or features:
        of_stream = features[0] if features else None
        spread = Spread(axis, time, automatic_axes(layout.sizes), of_stream)
    scatters = _scatters(layout, x_BTD.shape[-1])
    form = form._replace(spread=spread, scatters=scatters)
    return cross_entropy(x_BTD, head, *args, form=form, **settings)


def _scatters(layout: Layout, features: int) -> bool:
    """Whether ranks of context keep their features of a gradient alone, as they do of the state."""
    return zero_stage.shards_state(layout.zero_stage) and features % layout.context == 0


def _mesh_axes(layout: Layout, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if layout.sizes.get(axis, 1) > 1)
