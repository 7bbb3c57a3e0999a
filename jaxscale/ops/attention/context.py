"""Context parallelism: attention over a sequence sharded over a mesh axis (ring, pairs or gather).

`blocks.py` computes a pair of chunks; `context_chunks.py` iterates over the pairs.

Shapes: as in `blocks.py`, T a rank's part of the sequence; h its two chunks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxscale.ops.array_stack import add, at, put
from jaxscale.ops.attention import blocks
from jaxscale.ops.attention.blocks import AttentionArrays, Keys, Queries, Scoring, Sums
from jaxscale.ops.attention.context_chunks import Chunks, halves, visit_pairs


def context_attention(
    *arrays: Any, axis: str, method: str, scoring: Scoring, block: int | None = None
) -> Array:
    """`attention.attention` where each rank of `axis` passes its part, in `balanced_order`.

    For use where `axis` is manual and has at least two ranks. Causal order, window and bias use
    positions in the whole sequence. The residuals of a rank are its arguments, its output and one
    number per query and head; the last two have the checkpoint name "attention".

    Args:
      arrays: the fields of `AttentionArrays`.
      axis: the mesh axis.
      method: "ring", "pairs" or "gather".
      block: queries (and keys) of a block; None is `blocks.block_size`.
    """
    given = AttentionArrays(*arrays).widened()
    chunk, key_chunk = (x.shape[1] // 2 for x in given[:2])
    block = min(block or blocks.block_size(given.q_BTNH), max(chunk, key_chunk))
    chunks = Chunks(axis, method, scoring.causal, chunk, key_chunk)
    static = _Static(chunks, scoring, block)
    return _attention(static, given)


class _Static(NamedTuple):
    chunks: Chunks
    scoring: Scoring
    block: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, given: AttentionArrays) -> Array:
    return _forward(static, given)[0]


def _forward(static: _Static, given: AttentionArrays) -> tuple[Array, Array]:
    """The output, and log(sum(exp(score))) as [h, I, B, K, G, t]."""
    queries, keys = _in_blocks(static, given)

    def visit(softmax, sums, keys, h, c, starts):
        seen = at(softmax, h), at(queries, h), at(keys, c), given.bias_bN
        more = blocks.attend(*seen, offset=starts.offset, scoring=static.scoring)
        return put(softmax, more, h), sums

    start = blocks.start(queries.q, given.v_BSKH.shape[-1], given.sinks_N)
    softmax, _ = visit_pairs(static.chunks, keys, visit, start, ())
    out_hIBKGtH, log_z_hIBKGt = blocks.finish_softmax(
        softmax, given.q_BTNH.dtype, blind=given.crosses
    )
    out_BTNH = _joined(blocks.from_query_blocks, out_hIBKGtH, static.chunks.chunk)
    return out_BTNH, log_z_hIBKGt


def _forward_rule(static: _Static, given: AttentionArrays):
    results = _forward(static, given)
    out_BTNH, log_z_hIBKGt = checkpoint_name(results, "attention")
    return out_BTNH, (given, out_BTNH, log_z_hIBKGt)


def _backward_rule(static: _Static, residuals, grad_BTNH: Array):
    given, out_BTNH, log_z_hIBKGt = residuals
    q_BTNH, k_BSKH, v_BSKH, *_ = given
    queries, keys = _in_blocks(static, given)
    output = jax.vmap(
        lambda *each: blocks.output(*each, num_kv_heads=k_BSKH.shape[2], block=static.block)
    )(halves(out_BTNH), halves(grad_BTNH), log_z_hIBKGt)

    def visit(sums, key_sums, keys, h, c, starts):
        more, *key_more = blocks.gradients(
            Sums(at(sums.q, h), sums.bias),
            at(queries, h),
            at(output, h),
            at(keys, c),
            given.bias_bN,
            offset=starts.offset,
            scoring=static.scoring,
            dtype=wide,
        )
        sums = Sums(put(sums.q, more.q, h), more.bias)
        return sums, put(key_sums, add(at(key_sums, c), tuple(key_more)), c)

    wide = log_z_hIBKGt.dtype
    sums = blocks.no_sums(queries, given.bias_bN, wide)
    zeros = tuple(jnp.zeros(x.shape, wide) for x in (keys.k, keys.v))
    sums, grads = visit_pairs(static.chunks, keys, visit, sums, zeros)
    grad_k_BSKH, grad_v_BSKH = (
        _joined(blocks.from_key_blocks, grad, static.chunks.key_chunk) for grad in grads
    )
    grad_q_BTNH = _joined(blocks.from_query_blocks, sums.q, static.chunks.chunk)
    grads = AttentionArrays(
        grad_q_BTNH.astype(q_BTNH.dtype),
        grad_k_BSKH.astype(k_BSKH.dtype),
        grad_v_BSKH.astype(v_BSKH.dtype),
        None,  # pyright: ignore[reportArgumentType] - whole numbers have no gradient
        bias_bN=sums.bias,
        sinks_N=blocks.sink_gradient(given.sinks_N, output),
    )
    return (grads,)


_attention.defvjp(_forward_rule, _backward_rule)


def _in_blocks(static: _Static, given: AttentionArrays) -> tuple[Queries, Keys]:
    """`blocks.in_blocks` of both chunks of a rank, with a leading [h]."""
    tokens = given._replace(bias_bN=None, sinks_N=None)
    return jax.vmap(lambda chunk: blocks.in_blocks(chunk, static.block))(
        jax.tree.map(halves, tokens)
    )


def _joined(from_blocks: Callable, x_h: Array, chunk: int) -> Array:
    """[h, blocks, ...] -> [B, T, ...]."""
    return jnp.concatenate([from_blocks(x, chunk) for x in x_h], axis=1)
