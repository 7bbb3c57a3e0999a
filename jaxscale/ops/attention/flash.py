"""Flash attention as Pallas kernels for GPUs (FlashAttention-2, arXiv 2307.08691).

A block of queries loops over blocks of keys from the first visible one to the last. Blocks hidden
by causal order, window or documents are neither read nor computed, and no mask is read from
memory. The kernels use Pallas's Triton back end, for Ampere and later.

A relative position bias is read from a line of numbers by distance; sums of its gradient by bucket
are written for each block of queries, and added in XLA.

Shapes: B batch, T time of queries, S of keys, N query heads, K key heads, G query heads per key
head (N = K * G), H features of queries and keys, V of values, I blocks of queries, J blocks of
keys, t queries of a block, s keys of a block, b buckets of a relative position bias, p those in
order of positions.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from jaxscale.ops.attention import flash_kernels, relative_bias
from jaxscale.ops.attention.blocks import AttentionArrays, Scoring, visible, visible_ranges
from jaxscale.ops.attention.context_chunks import Chunks, Starts
from jaxscale.ops.attention.flash_kernels import FlashArrays, Settings
from jaxscale.ops.attention.kernel_attention import AttentionKernel, attend_with_kernel
from jaxscale.ops.attention.platform_kernels import flash_block, flash_width


def flash_attention(
    *arrays: Any, scoring: Scoring, axis: str = "", method: str = "", interpret: bool = False
) -> Array:
    """`attention.attention`, [B, T, N, V], or `context.context_attention` over `axis`.

    Its residuals are its arguments, the output and one number per query and head; the last two have
    the checkpoint name "attention". On several devices call it inside a `shard_map` over all mesh
    axes.

    Args:
      arrays: the fields of `AttentionArrays`.
      axis, method: as in `context_attention`; "" for whole sequences. Each pair of chunks is one
        kernel call.
    """
    given = AttentionArrays(*arrays).widened()
    queries, keys = (x.shape[1] // (2 if axis else 1) for x in given[:2])
    head_dim, value_dim = (x.shape[3] for x in given[1:3])
    block = flash_block(math.gcd(queries, keys), head_dim)
    settings = Settings(scoring, block, head_dim, value_dim, interpret, of_pair=bool(axis))
    chunks = Chunks(axis, method, scoring.causal, queries, keys) if axis else None
    return attend_with_kernel(
        AttentionKernel(flash_output, flash_gradients, settings), chunks, given
    )


def flash_output(
    settings: Settings,
    given: AttentionArrays,
    starts: Starts,
    before: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """The output, and log(sum(exp(score))), [B, N, T] in float32 or wider; for a query without
    visible keys they are zero and `blocks.HIDDEN`.

    Args:
      before: the results for other keys, with the output in float32 or wider. They are combined,
        weighted by their shares of the softmax.
    """
    batch, time, heads, _ = given.q_BTNH.shape
    arrays, seen_BIJ = _arrays(settings, given, starts.offset)
    arrays = arrays._replace(
        ranges=_ranges(seen_BIJ), sinks_N=given.sinks_N, biases_NL=_biases(settings, given)
    )
    specs, (_, outputs, numbers) = _specs_of_queries(settings, arrays)
    shapes = [
        ((batch, time, heads, settings.value_dim), given.wide if before else given.q_BTNH.dtype),
        ((batch, heads, time), given.wide),
    ]
    out_BTNV, log_z_BNT = _call(
        flash_kernels.flash_forward,
        settings,
        (time // settings.block, heads, batch),
        (specs, arrays),
        ([outputs, numbers], shapes),
    )
    if before is None:
        return out_BTNV, log_z_BNT
    # In XLA, which passes over both outputs once for each pair of chunks.
    new_BNT = jnp.logaddexp(before[1], log_z_BNT)
    old_share, share = (
        jnp.swapaxes(jnp.exp(part_BNT - new_BNT), 1, 2)[..., None]
        for part_BNT in (before[1], log_z_BNT)
    )
    return before[0] * old_share + out_BTNV * share, new_BNT


def flash_gradients(
    settings: Settings,
    given: AttentionArrays,
    starts: Starts,
    grad_BTNV: Array,
    log_z_BNT: Array,
    inner_BNT: Array,
    before: Array | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """The gradients of queries, keys, values and the table of a bias.

    Args:
      grad_BTNV: of the output.
      log_z_BNT: over all keys of the queries, of which these may be a part.
      inner_BNT: sum(output * grad) over V, with the output of all keys.
      before: the queries' gradient from other keys, in float32 or wider, to which this adds; the
        gradients then have its type.
    """
    arrays, seen_BIJ = _arrays(settings, given, starts.offset)
    arrays = arrays._replace(
        biases_NL=_biases(settings, given),
        grad=grad_BTNV,
        log_z_BNT=log_z_BNT,
        inner_BNT=inner_BNT,
    )
    out_dtype = given.q_BTNH.dtype if before is None else given.wide
    grad_q_BTNH, bias_bN = _query_gradients(settings, given, arrays, seen_BIJ, out_dtype)
    grad_q_BTNH = grad_q_BTNH if before is None else before + grad_q_BTNH
    return grad_q_BTNH, *_key_gradients(settings, arrays, seen_BIJ, out_dtype), bias_bN


def _query_gradients(
    settings: Settings,
    given: AttentionArrays,
    arrays: FlashArrays,
    seen_BIJ: Array,
    out_dtype: DTypeLike,
) -> tuple[Array, Array | None]:
    """The gradients of the queries and of the table of biases."""
    batch, time, heads, _ = arrays.q.shape
    num_blocks = time // settings.block
    arrays = arrays._replace(ranges=_ranges(seen_BIJ))
    call = functools.partial(
        _call, flash_kernels.flash_query_gradients, settings, (num_blocks, heads, batch)
    )
    if given.bias_bN is None:
        specs, (queries, _, _) = _specs_of_queries(settings, arrays)
        (grad_q_BTNH,) = call((specs, arrays), ([queries], [(arrays.q.shape, out_dtype)]))
        return grad_q_BTNH, None
    order, first = relative_bias.in_order(len(given.bias_bN), **settings.scoring.bucketing)
    arrays = arrays._replace(buckets_L=jnp.asarray(relative_bias.bucket_line(first)))
    specs, (queries, _, _) = _specs_of_queries(settings, arrays)
    width = pl.next_power_of_2(len(order))
    sums = pl.BlockSpec((None, None, None, width), lambda i, n, b: (b, n, i, 0))
    shapes = [
        (arrays.q.shape, out_dtype),
        ((batch, heads, num_blocks, width), arrays.log_z_BNT.dtype),
    ]
    grad_q_BTNH, sums_BNIp = call((specs, arrays), ([queries, sums], shapes))
    # No atomic additions: the order of the sums is deterministic.
    sums_pN = jnp.sum(sums_BNIp, axis=(0, 2)).T
    return grad_q_BTNH, jnp.zeros_like(given.bias_bN).at[order].set(sums_pN[: len(order)])


def _key_gradients(
    settings: Settings, arrays: FlashArrays, seen_BIJ: Array, out_dtype: DTypeLike
) -> tuple[Array, Array]:
    """The gradients of keys and values: one program per block of keys, for the queries of all heads
    in the group. So no sum is atomic, and the order of the sums is deterministic."""
    (batch, time, heads, _), block = arrays.q.shape, settings.block
    key_time, key_heads = arrays.k.shape[1:3]
    group = heads // key_heads
    arrays = arrays._replace(ranges=_ranges(jnp.swapaxes(seen_BIJ, 1, 2)))
    qk, v = flash_width(settings.head_dim), flash_width(settings.value_dim)
    numbers = pl.BlockSpec((None, group, time), lambda j, n, b: (b, n, 0))
    keys, values = (_rows(block, x, lambda j, n, b: (b, j, n, 0)) for x in (qk, v))
    biases = arrays.biases_NL
    if biases is not None:
        biases = pl.BlockSpec((group, biases.shape[1]), lambda j, n, b: (n, 0))
    specs = FlashArrays(
        ranges=pl.BlockSpec((None, None, 2), lambda j, n, b: (b, j, 0)),
        offset=pl.BlockSpec((1,), lambda j, n, b: (0,)),
        q=pl.BlockSpec((None, time, group, qk), lambda j, n, b: (b, 0, n, 0)),
        k=keys,
        v=values,
        segments_BT=pl.BlockSpec((None, time), lambda j, n, b: (b, 0)),
        segments_BS=pl.BlockSpec((None, block), lambda j, n, b: (b, j)),
        biases_NL=biases,
        grad=pl.BlockSpec((None, time, group, v), lambda j, n, b: (b, 0, n, 0)),
        log_z_BNT=numbers,
        inner_BNT=numbers,
    )
    shapes = [(x.shape, out_dtype) for x in (arrays.k, arrays.v)]
    grid = (key_time // block, key_heads, batch)
    results = [keys, values], shapes
    return _call(flash_kernels.flash_key_gradients, settings, grid, (specs, arrays), results)


def _arrays(settings: Settings, given: AttentionArrays, offset: Array) -> tuple[FlashArrays, Array]:
    """What all kernels read, without ranges; and whether any query of block i may see a key of
    block j, [B, I, J]."""
    segments_BS = given.segments_BT if given.segments_BS is None else given.segments_BS

    # By row of the batch: ranges of blocks differ with the documents.
    def of_row(segments_T: Array, segments_S: Array) -> Array:
        blocks = (x.reshape(-1, 1, settings.block) for x in (segments_T, segments_S))
        return visible(*blocks, offset=offset, scoring=settings.scoring)

    tokens = (*given[:4], segments_BS)
    seen_BIJ = jax.vmap(of_row)(given.segments_BT, segments_BS)
    return FlashArrays(None, offset.astype(jnp.int32).reshape(1), *tokens), seen_BIJ


def _biases(settings: Settings, given: AttentionArrays) -> Array | None:
    """[N, L], as `FlashArrays.biases_NL`."""
    if given.bias_bN is None:
        return None
    order, first = relative_bias.in_order(len(given.bias_bN), **settings.scoring.bucketing)
    return given.bias_bN[order[relative_bias.bucket_line(first)]].T


def _specs_of_queries(
    settings: Settings, arrays: FlashArrays
) -> tuple[FlashArrays, tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]]:
    """The specs of the inputs of a program for one block of queries of one head; and those of
    arrays [B, T, N, H], [B, T, N, V] and [B, N, T]."""
    key_time, key_heads = arrays.k.shape[1:3]
    group, block = arrays.q.shape[2] // key_heads, settings.block
    qk, v = flash_width(settings.head_dim), flash_width(settings.value_dim)
    queries, outputs = (_rows(block, x, lambda i, n, b: (b, i, n, 0)) for x in (qk, v))
    keys, values = (_rows(key_time, x, lambda i, n, b: (b, 0, n // group, 0)) for x in (qk, v))
    numbers = pl.BlockSpec((None, None, block), lambda i, n, b: (b, n, i))
    length = arrays.biases_NL.shape[1] if arrays.biases_NL is not None else 0
    specs = FlashArrays(
        ranges=pl.BlockSpec((None, None, 2), lambda i, n, b: (b, i, 0)),
        offset=pl.BlockSpec((1,), lambda i, n, b: (0,)),
        q=queries,
        k=keys,
        v=values,
        segments_BT=pl.BlockSpec((None, block), lambda i, n, b: (b, i)),
        segments_BS=pl.BlockSpec((None, key_time), lambda i, n, b: (b, 0)),
        sinks_N=pl.BlockSpec((1,), lambda i, n, b: (n,)),
        biases_NL=pl.BlockSpec((None, length), lambda i, n, b: (n, 0)),
        buckets_L=pl.BlockSpec((length,), lambda i, n, b: (0,)),
        grad=outputs,
        log_z_BNT=numbers,
        inner_BNT=numbers,
    )
    # A spec for each array that there is: Pallas wants equal trees.
    absent = {name: None for name, x in arrays._asdict().items() if x is None}
    return specs._replace(**absent), (queries, outputs, numbers)


def _ranges(seen_BIJ: Array) -> Array:
    """[B, I, 2]: the first block j visible to block i, and the one after the last."""
    begin_BI, end_BI = jax.vmap(visible_ranges)(seen_BIJ)
    return jnp.stack((begin_BI, end_BI), axis=-1).astype(jnp.int32)


def _rows(rows: int, width: int, index: Callable) -> pl.BlockSpec:
    """The spec of a program's rows of one head."""
    return pl.BlockSpec((None, rows, None, width), index)


def _call(
    kernel: Callable,
    settings: Settings,
    grid: tuple[int, int, int],
    given: tuple[FlashArrays, FlashArrays],
    results: tuple[Sequence[pl.BlockSpec], Sequence[tuple]],
) -> Any:
    specs, arrays = given
    of_results, shapes = results
    return pl.pallas_call(
        functools.partial(kernel, settings),
        grid=grid,
        in_specs=[specs],
        out_specs=of_results,
        out_shape=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
        interpret=settings.interpret,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        # FLOPs are counted by this name (`compiled.flops`).
        name=kernel.__name__ + "_whole" * settings.whole,
    )(arrays)
