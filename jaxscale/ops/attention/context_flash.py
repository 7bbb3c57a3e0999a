"""Context parallelism with the flash kernels of `flash.py`, for GPUs.

Each pair of chunks is one kernel call. The results of a query's calls are combined, weighted by
their shares of the softmax.

Shapes: as in `flash.py`, T a rank's part of the sequence; h its two chunks.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxscale.ops.array_stack import add, at, put
from jaxscale.ops.attention import flash
from jaxscale.ops.attention.blocks import AttentionArrays, Scoring
from jaxscale.ops.attention.context_chunks import Chunks, halves, visit_pairs
from jaxscale.ops.attention.flash_kernels import HIDDEN, Settings
from jaxscale.ops.attention.platform_kernels import flash_block


def context_flash(
    *arrays: Any, axis: str, method: str, scoring: Scoring, interpret: bool = False
) -> Array:
    """`context.context_attention`, without cross attention and bias."""
    given = AttentionArrays(*arrays).widened()
    assert given.segments_BS is given.bias_bN is None, "refused by `attention.check`"
    chunk = given.q_BTNH.shape[1] // 2
    block = flash_block(chunk, given.q_BTNH.shape[3])
    settings = Settings(scoring, block, interpret, of_pair=True)
    static = _Static(Chunks(axis, method, scoring.causal, chunk), settings)
    return _attention(static, *given[:4], given.sinks_N)


class _Static(NamedTuple):
    chunks: Chunks
    settings: Settings


class _Keys(NamedTuple):
    """Keys and values of several chunks: every field has a leading [h] or [c]."""

    k: Array
    v: Array
    segments: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, *given: Array | None) -> Array:
    return _forward_rule(static, *given)[0]


def _forward_rule(static: _Static, q_BTNH, k_BSKH, v_BSKH, segments_BT, sinks_N):
    q_hBTNH, segments_hBT = halves(q_BTNH), halves(segments_BT)
    wide = flash.wide_type(q_BTNH)
    numbers_hBNT = (*q_hBTNH.shape[:2], q_hBTNH.shape[3], q_hBTNH.shape[2])
    none = jnp.full(numbers_hBNT, HIDDEN, wide)
    # A sink acts as a key with value zero, before the others.
    log_z_hBNT = none if sinks_N is None else jnp.broadcast_to(sinks_N[:, None], none.shape)

    def visit(carry, sums, keys, h, c, offset):
        out_BTNH, log_z_BNT = at(carry, h)
        k_BSKH, v_BSKH, segments_BS = at(keys, c)
        more_BTNH, more_BNT = flash.flash_output(
            static.settings,
            at(q_hBTNH, h),
            k_BSKH,
            v_BSKH,
            at(segments_hBT, h),
            segments_BS,
            offset=offset,
            out_dtype=wide,
        )
        new_BNT = jnp.logaddexp(log_z_BNT, more_BNT)
        old_share, share = (
            jnp.swapaxes(jnp.exp(part_BNT - new_BNT), 1, 2)[..., None]
            for part_BNT in (log_z_BNT, more_BNT)
        )
        return put(carry, (out_BTNH * old_share + more_BTNH * share, new_BNT), h), sums

    keys = _Keys(*map(halves, (k_BSKH, v_BSKH, segments_BT)))
    start = jnp.zeros(q_hBTNH.shape, wide), log_z_hBNT
    (out_hBTNH, log_z_hBNT), _ = visit_pairs(static.chunks, keys, visit, start, ())
    out_BTNH = jnp.concatenate(list(out_hBTNH.astype(q_BTNH.dtype)), axis=1)
    out_BTNH, log_z_hBNT = checkpoint_name((out_BTNH, log_z_hBNT), "attention")
    return out_BTNH, (q_BTNH, k_BSKH, v_BSKH, segments_BT, sinks_N, out_BTNH, log_z_hBNT)


def _backward_rule(static: _Static, residuals, grad_BTNH: Array):
    q_BTNH, k_BSKH, v_BSKH, segments_BT, sinks_N, out_BTNH, log_z_hBNT = residuals
    wide = log_z_hBNT.dtype
    grad_hBTNH = halves(grad_BTNH)
    inner_hBNT = jax.vmap(flash.flash_inner)(halves(out_BTNH), grad_hBTNH)
    queries = (halves(q_BTNH), halves(segments_BT), grad_hBTNH, log_z_hBNT, inner_hBNT)

    def visit(grads_hBTNH, key_sums, keys, h, c, offset):
        q_BTNH, segments_BT, *others = at(queries, h)
        k_BSKH, v_BSKH, segments_BS = at(keys, c)
        more_BTNH, *key_more = flash.flash_gradients(
            static.settings,
            q_BTNH,
            k_BSKH,
            v_BSKH,
            segments_BT,
            segments_BS,
            *others,
            offset=offset,
            out_dtype=wide,
        )
        grads_hBTNH = put(grads_hBTNH, at(grads_hBTNH, h) + more_BTNH, h)
        return grads_hBTNH, put(key_sums, add(at(key_sums, c), tuple(key_more)), c)

    keys = _Keys(*map(halves, (k_BSKH, v_BSKH, segments_BT)))
    zeros = tuple(jnp.zeros(x.shape, wide) for x in (keys.k, keys.v))
    start = jnp.zeros(grad_hBTNH.shape, wide)
    grad_q_hBTNH, key_grads = visit_pairs(static.chunks, keys, visit, start, zeros)
    grads = (
        jnp.concatenate(list(grad), axis=1).astype(x.dtype)
        for grad, x in zip((grad_q_hBTNH, *key_grads), (q_BTNH, k_BSKH, v_BSKH))
    )
    sinks = None
    if sinks_N is not None:
        both = (jnp.concatenate(list(x), axis=2) for x in (log_z_hBNT, inner_hBNT))
        sinks = flash.flash_sink_gradient(sinks_N, *both)
    return (*grads, None, sinks)


_attention.defvjp(_forward_rule, _backward_rule)
