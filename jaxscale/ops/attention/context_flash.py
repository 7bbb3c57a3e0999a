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


def context_flash(
    *arrays: Any, axis: str, method: str, scoring: Scoring, interpret: bool = False
) -> Array:
    """`context.context_attention`."""
    given = AttentionArrays(*arrays).widened()
    chunks = Chunks(axis, method, scoring.causal, given.q_BTNH.shape[1] // 2)
    settings = flash.flash_settings(given, scoring, interpret, chunks=2)
    return _attention(_Static(chunks, settings), given)


class _Static(NamedTuple):
    chunks: Chunks
    settings: Settings


class _Keys(NamedTuple):
    """Keys and values of several chunks: every field has a leading [h] or [c]."""

    k: Array
    v: Array
    segments: Array


def _keys(given: AttentionArrays) -> _Keys:
    segments_BS = given.segments_BT if given.segments_BS is None else given.segments_BS
    return _Keys(*map(halves, (given.k_BSKH, given.v_BSKH, segments_BS)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, given: AttentionArrays) -> Array:
    return _forward_rule(static, given)[0]


def _forward_rule(static: _Static, given: AttentionArrays):
    q_hBTNH, segments_hBT = halves(given.q_BTNH), halves(given.segments_BT)
    wide = flash.wide_type(q_hBTNH)
    numbers_hBNT = (*q_hBTNH.shape[:2], q_hBTNH.shape[3], q_hBTNH.shape[2])
    none = jnp.full(numbers_hBNT, HIDDEN, wide)
    # A sink acts as a key with value zero, before the others.
    log_z_hBNT = none if given.sinks_N is None else none.at[:].set(given.sinks_N[:, None])

    def visit(carry, sums, keys, h, c, offset):
        out_BTNV, log_z_BNT = at(carry, h)
        k_BSKH, v_BSKV, segments_BS = at(keys, c)
        pair = AttentionArrays(at(q_hBTNH, h), k_BSKH, v_BSKV, at(segments_hBT, h), segments_BS)
        pair = pair._replace(bias_bN=given.bias_bN)
        more_BTNV, more_BNT = flash.flash_output(
            static.settings, pair, offset=offset, out_dtype=wide
        )
        new_BNT = jnp.logaddexp(log_z_BNT, more_BNT)
        old_share, share = (
            jnp.swapaxes(jnp.exp(part_BNT - new_BNT), 1, 2)[..., None]
            for part_BNT in (log_z_BNT, more_BNT)
        )
        return put(carry, (out_BTNV * old_share + more_BTNV * share, new_BNT), h), sums

    start = jnp.zeros((*q_hBTNH.shape[:-1], given.v_BSKH.shape[-1]), wide), log_z_hBNT
    (out_hBTNV, log_z_hBNT), _ = visit_pairs(static.chunks, _keys(given), visit, start, ())
    out_BTNV = jnp.concatenate(list(out_hBTNV.astype(q_hBTNH.dtype)), axis=1)
    out_BTNV, log_z_hBNT = checkpoint_name((out_BTNV, log_z_hBNT), "attention")
    return out_BTNV, (given, out_BTNV, log_z_hBNT)


def _backward_rule(static: _Static, residuals, grad_BTNV: Array):
    given, out_BTNV, log_z_hBNT = residuals
    wide = log_z_hBNT.dtype
    grad_hBTNV = halves(grad_BTNV)
    inner_hBNT = jax.vmap(flash.flash_inner)(halves(out_BTNV), grad_hBTNV)
    queries = (halves(given.q_BTNH), halves(given.segments_BT), grad_hBTNV, log_z_hBNT, inner_hBNT)

    def visit(sums, key_sums, keys, h, c, offset):
        (grads_hBTNH, bias_bN), (q_BTNH, segments_BT, *others) = sums, at(queries, h)
        k_BSKH, v_BSKV, segments_BS = at(keys, c)
        pair = AttentionArrays(q_BTNH, k_BSKH, v_BSKV, segments_BT, segments_BS, given.bias_bN)
        more = flash.flash_gradients(static.settings, pair, *others, offset=offset, out_dtype=wide)
        grads_hBTNH = put(grads_hBTNH, at(grads_hBTNH, h) + more.q_BTNH, h)
        bias_bN = None if bias_bN is None else bias_bN + more.bias_bN
        key_more = more.k_BSKH, more.v_BSKH
        return (grads_hBTNH, bias_bN), put(key_sums, add(at(key_sums, c), key_more), c)

    keys = _keys(given)
    zeros = tuple(jnp.zeros(x.shape, wide) for x in (keys.k, keys.v))
    start = jnp.zeros(queries[0].shape, wide), jax.tree.map(jnp.zeros_like, given.bias_bN)
    (grad_q_hBTNH, bias_bN), key_grads = visit_pairs(static.chunks, keys, visit, start, zeros)
    grads = (
        jnp.concatenate(list(grad), axis=1).astype(x.dtype)
        for grad, x in zip((grad_q_hBTNH, *key_grads), given)
    )
    both = (jnp.concatenate(list(x), axis=2) for x in (log_z_hBNT, inner_hBNT))
    sinks_N = flash.flash_sink_gradient(given.sinks_N, *both)
    no_gradient: Any = None  # of segments
    return (AttentionArrays(*grads, no_gradient, bias_bN=bias_bN, sinks_N=sinks_N),)


_attention.defvjp(_forward_rule, _backward_rule)
