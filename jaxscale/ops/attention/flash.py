"""Flash attention as Pallas kernels for GPUs (FlashAttention-2, arXiv 2307.08691).

A block of queries loops over blocks of keys from the first visible one to the last. Blocks hidden
by causal order, window or documents are neither read nor computed, and no mask is read from
memory. The kernels use Pallas's Triton back end, for Ampere and later.

Shapes: B batch, T time of queries, S of keys, N query heads, K key heads, G query heads per key
head (N = K * G), H head_dim, I blocks of queries, J blocks of keys, t queries of a block, s keys of
a block.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from jaxscale.ops.attention import flash_kernels
from jaxscale.ops.attention.blocks import AttentionArrays, Scoring, visible, visible_ranges
from jaxscale.ops.attention.flash_kernels import Settings
from jaxscale.ops.attention.platform_kernels import flash_block


def flash_attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segments_BT: Array,
    sinks_N: Array | None = None,
    *,
    scoring: Scoring,
    interpret: bool = False,
) -> Array:
    """Attention within segments; arguments as in `attention.attention`.

    Its residuals are its arguments, the output and one number per query and head; the last two have
    the checkpoint name "attention". On several devices call it inside a `shard_map` over all mesh
    axes.
    """
    settings = Settings(scoring, flash_block(q_BTNH.shape[1], q_BTNH.shape[3]), interpret)
    given = AttentionArrays(q_BTNH, k_BSKH, v_BSKH, segments_BT, sinks_N=sinks_N).widened()
    return _attention(settings, *given[:4], given.sinks_N)


def wide_type(q_BTNH: Array) -> jnp.dtype:
    """The type of scores and sums: float32 or wider."""
    return jnp.promote_types(q_BTNH.dtype, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings: Settings, *given: Array | None) -> Array:
    return _forward_rule(settings, *given)[0]


def _forward_rule(settings: Settings, q_BTNH, k_BSKH, v_BSKH, segments_BT, sinks_N):
    tokens = (q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BT)
    out_BTNH, log_z_BNT = checkpoint_name(
        flash_output(settings, *tokens, sinks_N=sinks_N), "attention"
    )
    return out_BTNH, (*tokens[:4], sinks_N, out_BTNH, log_z_BNT)


def _backward_rule(settings: Settings, residuals, grad_BTNH: Array):
    q_BTNH, k_BSKH, v_BSKH, segments_BT, sinks_N, out_BTNH, log_z_BNT = residuals
    inner_BNT = flash_inner(out_BTNH, grad_BTNH)
    tokens = (q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BT)
    grads = flash_gradients(settings, *tokens, grad_BTNH, log_z_BNT, inner_BNT)
    sinks = None if sinks_N is None else flash_sink_gradient(sinks_N, log_z_BNT, inner_BNT)
    return (*grads, None, sinks)


_attention.defvjp(_forward_rule, _backward_rule)


def flash_inner(out_BTNH: Array, grad_BTNH: Array) -> Array:
    """The inner product of each query's output and its gradient, [B, N, T]."""
    wide = wide_type(out_BTNH)
    return jnp.einsum("BTNH,BTNH->BNT", out_BTNH.astype(wide), grad_BTNH.astype(wide))


def flash_sink_gradient(sinks_N: Array, log_z_BNT: Array, inner_BNT: Array) -> Array:
    """The gradient of the sinks, [N]: a sink acts as a key with value zero."""
    return -jnp.sum(jnp.exp(sinks_N[:, None] - log_z_BNT) * inner_BNT, axis=(0, 2))


def flash_output(
    settings: Settings,
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segments_BT: Array,
    segments_BS: Array,
    *,
    offset: Array | int = 0,
    sinks_N: Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> tuple[Array, Array]:
    """The output, and log(sum(exp(score))), [B, N, T] in float32 or wider; for a query without
    visible keys they are zero and `flash_kernels.HIDDEN`.

    Args:
      offset: position of the first query minus that of the first key.
      out_dtype: of the output; None is that of the queries.
    """
    (batch, time, heads, _), block = q_BTNH.shape, settings.block
    wide = wide_type(q_BTNH)
    seen_BIJ = _seen_blocks(settings, segments_BT, segments_BS, offset)
    specs, queries, numbers = _specs_of_queries(q_BTNH, k_BSKH, block)
    arrays = [_ranges(seen_BIJ), _scalar(offset), q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BS]
    if sinks_N is not None:
        specs.append(pl.BlockSpec((1,), lambda i, n, b: (n,)))
        arrays.append(sinks_N)
    return _call(
        functools.partial(flash_kernels.flash_forward, settings),
        settings,
        (time // block, heads, batch),
        (specs, arrays),
        (
            [queries, numbers],
            [(q_BTNH.shape, out_dtype or q_BTNH.dtype), ((batch, heads, time), wide)],
        ),
    )


def flash_gradients(
    settings: Settings,
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segments_BT: Array,
    segments_BS: Array,
    grad_BTNH: Array,
    log_z_BNT: Array,
    inner_BNT: Array,
    *,
    offset: Array | int = 0,
    out_dtype: DTypeLike | None = None,
) -> tuple[Array, Array, Array]:
    """The gradients of queries, keys and values.

    Args:
      grad_BTNH: of the output.
      log_z_BNT: over all keys of the queries, of which these may be a part.
      inner_BNT: sum(output * grad) over H, with the output of all keys.
      offset: as in `flash_output`.
      out_dtype: of the gradients; None is that of the queries.
    """
    (batch, time, heads, _), block = q_BTNH.shape, settings.block
    group, key_heads = heads // k_BSKH.shape[2], k_BSKH.shape[2]
    out_dtype = out_dtype or q_BTNH.dtype
    seen_BIJ = _seen_blocks(settings, segments_BT, segments_BS, offset)
    arrays = [_scalar(offset), q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BS]
    arrays += [grad_BTNH, log_z_BNT, inner_BNT]

    specs, queries, numbers = _specs_of_queries(q_BTNH, k_BSKH, block)
    specs += [queries, numbers, numbers]
    (grad_q_BTNH,) = _call(
        functools.partial(flash_kernels.flash_query_gradients, settings),
        settings,
        (time // block, heads, batch),
        (specs, [_ranges(seen_BIJ), *arrays]),
        ([queries], [(q_BTNH.shape, out_dtype)]),
    )

    # One program per block of keys, for the queries of all heads in the group: no atomic additions
    # in memory, so the order of the sums is deterministic.
    queries = pl.BlockSpec((None, time, group, q_BTNH.shape[3]), lambda j, n, b: (b, 0, n, 0))
    keys = _rows(k_BSKH, block, lambda j, n, b: (b, j, n, 0))
    numbers = pl.BlockSpec((None, group, time), lambda j, n, b: (b, n, 0))
    specs = [
        pl.BlockSpec((None, None, 2), lambda j, n, b: (b, j, 0)),
        pl.BlockSpec((1,), lambda j, n, b: (0,)),
        queries,
        keys,
        keys,
        pl.BlockSpec((None, time), lambda j, n, b: (b, 0)),
        pl.BlockSpec((None, block), lambda j, n, b: (b, j)),
        queries,
        numbers,
        numbers,
    ]
    grad_k_BSKH, grad_v_BSKH = _call(
        functools.partial(flash_kernels.flash_key_gradients, settings),
        settings,
        (k_BSKH.shape[1] // block, key_heads, batch),
        (specs, [_ranges(jnp.swapaxes(seen_BIJ, 1, 2)), *arrays]),
        ([keys, keys], [(k_BSKH.shape, out_dtype)] * 2),
    )
    return grad_q_BTNH, grad_k_BSKH, grad_v_BSKH


def _specs_of_queries(
    q_BTNH: Array, k_BSKH: Array, block: int
) -> tuple[list[pl.BlockSpec], pl.BlockSpec, pl.BlockSpec]:
    """Input specs of a program for one block of queries of one head: range of key blocks, offset,
    queries, keys, values, segments of both. Also the specs of an array like the queries and of an
    array [B, N, T]."""
    group, key_time = q_BTNH.shape[2] // k_BSKH.shape[2], k_BSKH.shape[1]
    queries = _rows(q_BTNH, block, lambda i, n, b: (b, i, n, 0))
    keys = _rows(k_BSKH, None, lambda i, n, b: (b, 0, n // group, 0))
    specs = [
        pl.BlockSpec((None, None, 2), lambda i, n, b: (b, i, 0)),
        pl.BlockSpec((1,), lambda i, n, b: (0,)),
        queries,
        keys,
        keys,
        pl.BlockSpec((None, block), lambda i, n, b: (b, i)),
        pl.BlockSpec((None, key_time), lambda i, n, b: (b, 0)),
    ]
    return specs, queries, pl.BlockSpec((None, None, block), lambda i, n, b: (b, n, i))


def _seen_blocks(
    settings: Settings, segments_BT: Array, segments_BS: Array, offset: Array | int
) -> Array:
    """Whether any query of block i may see a key of block j, [B, I, J]."""

    def of_row(segments_T: Array, segments_S: Array) -> Array:
        blocks = (x.reshape(-1, 1, settings.block) for x in (segments_T, segments_S))
        return visible(*blocks, offset=offset, scoring=settings.scoring)

    return jax.vmap(of_row)(segments_BT, segments_BS)


def _ranges(seen_BIJ: Array) -> Array:
    """[B, I, 2]: the first block j visible to block i, and the one after the last."""
    begin_BI, end_BI = jax.vmap(visible_ranges)(seen_BIJ)
    return jnp.stack((begin_BI, end_BI), axis=-1).astype(jnp.int32)


def _scalar(value: Array | int) -> Array:
    return jnp.asarray(value, jnp.int32).reshape(1)


def _rows(x_BTNH: Array, block: int | None, index: Callable) -> pl.BlockSpec:
    """The spec of a program's part of one head: a block of its rows, or all of them."""
    return pl.BlockSpec((None, block or x_BTNH.shape[1], None, x_BTNH.shape[3]), index)


def _call(
    kernel: Callable,
    settings: Settings,
    grid: tuple[int, int, int],
    given: tuple[Sequence[pl.BlockSpec], Sequence[Array]],
    results: tuple[Sequence[pl.BlockSpec], Sequence[tuple]],
) -> Any:
    specs, arrays = given
    of_results, shapes = results
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=specs,
        out_specs=of_results,
        out_shape=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
        interpret=settings.interpret,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        name=kernel.func.__name__ + "_whole" * settings.whole,
    )(*arrays)
