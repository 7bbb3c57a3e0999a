"""Attention by a kernel for some queries and some keys, on one device or over parts of a sequence,
where each call starts from the results of the calls before.

Shapes: B batch, T and S a rank's part of the sequence, N query heads, K key heads, H head_dim; h
parts of T or S, b buckets of a relative position bias.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxscale.ops.array_stack import add, at, put
from jaxscale.ops.attention.blocks import HIDDEN, AttentionArrays
from jaxscale.ops.attention.context_chunks import Chunks, Starts, visit_pairs


class AttentionKernel(NamedTuple):
    """A kernel, forward and backward; arguments as in `splash.py`."""

    output: Callable[..., tuple[Array, Array]]
    gradients: Callable[..., tuple]
    settings: Any


class _Static(NamedTuple):
    kernel: AttentionKernel
    chunks: Chunks | None


class _Keys(NamedTuple):
    """Keys and values of several parts: every field has a leading [h]."""

    k: Array
    v: Array
    segments: Array


def attend_with_kernel(
    kernel: AttentionKernel, chunks: Chunks | None, given: AttentionArrays
) -> Array:
    """Attention of a rank's queries.

    Its residuals are its arguments, the output and one number per query and head; the last two have
    the checkpoint name "attention".

    Args:
      chunks: None for whole sequences.
      given: with bias and sinks as after `widened`.
    """
    return _attention(_Static(kernel, chunks), given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, given: AttentionArrays) -> Array:
    return _forward_rule(static, given)[0]


def _forward_rule(static: _Static, given: AttentionArrays):
    kernel, chunks = static
    if chunks is None:
        results = kernel.output(kernel.settings, given, Starts.of_whole(given.begin))
    else:
        results = _spread_output(kernel, chunks, given)
    out_BTNH, log_z_BNT = checkpoint_name(results, "attention")
    return out_BTNH, (given, out_BTNH, log_z_BNT)


def _backward_rule(static: _Static, residuals, grad_BTNH: Array):
    kernel, chunks = static
    given, out_BTNH, log_z_BNT = residuals
    wide = (x.astype(given.wide) for x in (out_BTNH, grad_BTNH))
    results = (grad_BTNH, log_z_BNT, jnp.einsum("BTNH,BTNH->BNT", *wide))
    if chunks is None:
        starts = Starts.of_whole(given.begin)
        *grads, bias_bN = kernel.gradients(kernel.settings, given, starts, *results)
    else:
        *grads, bias_bN = _spread_gradients(kernel, chunks, given, results)
    if bias_bN is not None:
        # Ties the table's gradient to the queries': `pipeline.backward_split` would move it to W,
        # which would call the kernel again.
        *grads, bias_bN = jax.lax.optimization_barrier((*grads, bias_bN))
    sinks_N = None
    if given.sinks_N is not None:
        # A sink acts as a key with value zero.
        shares_BNT = jnp.exp(given.sinks_N[:, None] - log_z_BNT)
        sinks_N = -jnp.sum(shares_BNT * results[2], axis=(0, 2))
    q_BTNH, k_BSKH, v_BSKH = (grad.astype(x.dtype) for grad, x in zip(grads, given))
    # Whole numbers have no gradient.
    return (AttentionArrays(q_BTNH, k_BSKH, v_BSKH, None, None, bias_bN, sinks_N),)  # pyright: ignore[reportArgumentType]


_attention.defvjp(_forward_rule, _backward_rule)


def _spread_output(
    kernel: AttentionKernel, chunks: Chunks, given: AttentionArrays
) -> tuple[Array, Array]:
    queries = q_hBTNH, _ = chunks.split(given.q_BTNH), chunks.split(given.segments_BT)
    none_hBNT = jnp.full(
        (*q_hBTNH.shape[:2], q_hBTNH.shape[3], q_hBTNH.shape[2]), HIDDEN, given.wide
    )
    # A sink acts as a key with value zero, before the others.
    sinks_N = given.sinks_N
    log_z_hBNT = none_hBNT if sinks_N is None else none_hBNT.at[...].set(sinks_N[:, None])

    def visit(carry, sums, keys, h, c, starts):
        part = _part(given, at(queries, h), at(keys, c))
        return put(carry, kernel.output(kernel.settings, part, starts, at(carry, h)), h), sums

    start = jnp.zeros((*q_hBTNH.shape[:-1], given.v_BSKH.shape[3]), given.wide), log_z_hBNT
    (out_hBTNH, log_z_hBNT), _ = visit_pairs(chunks, _keys(chunks, given), visit, start, ())
    out_BTNH = jnp.concatenate(list(out_hBTNH.astype(given.q_BTNH.dtype)), axis=1)
    return out_BTNH, jnp.concatenate(list(log_z_hBNT), axis=2)


def _spread_gradients(
    kernel: AttentionKernel, chunks: Chunks, given: AttentionArrays, results: tuple[Array, ...]
) -> tuple:
    queries = chunks.split(given.q_BTNH), chunks.split(given.segments_BT)
    cotangent_BTNH, *numbers_BNT = results
    outputs = (
        chunks.split(cotangent_BTNH),
        *(jnp.stack(jnp.split(x_BNT, len(queries[0]), axis=2)) for x_BNT in numbers_BNT),
    )

    def visit(carry, key_sums, keys, h, c, starts):
        grads_hBTNH, bias_bN = carry
        part = _part(given, at(queries, h), at(keys, c))
        grad_BTNH, *key_more, bias_more = kernel.gradients(
            kernel.settings, part, starts, *at(outputs, h), at(grads_hBTNH, h)
        )
        grads_hBTNH = put(grads_hBTNH, grad_BTNH, h)
        key_sums = put(key_sums, add(at(key_sums, c), tuple(key_more)), c)
        return (grads_hBTNH, None if bias_bN is None else bias_bN + bias_more), key_sums

    keys = _keys(chunks, given)
    zeros = tuple(jnp.zeros(x.shape, given.wide) for x in (keys.k, keys.v))
    bias_bN = None if given.bias_bN is None else jnp.zeros_like(given.bias_bN)
    start = jnp.zeros(queries[0].shape, given.wide), bias_bN
    (grad_q_hBTNH, bias_bN), key_grads = visit_pairs(chunks, keys, visit, start, zeros)
    grads = (jnp.concatenate(list(grad), axis=1) for grad in (grad_q_hBTNH, *key_grads))
    return (*grads, bias_bN)


def _keys(chunks: Chunks, given: AttentionArrays) -> _Keys:
    segments_BS = given.segments_BT if given.segments_BS is None else given.segments_BS
    return _Keys(*map(chunks.split, (given.k_BSKH, given.v_BSKH, segments_BS)))


def _part(given: AttentionArrays, queries: tuple[Array, Array], keys: _Keys) -> AttentionArrays:
    """The arrays of one call, without sinks."""
    q_BTNH, segments_BT = queries
    k_BSKH, v_BSKH, segments_BS = keys
    return AttentionArrays(q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BS, given.bias_bN)
