"""Attention in blocks, in plain JAX: the kernel for CPUs.

Shapes: as in `blocks.py`.
"""

import functools

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxscale.ops.attention import blocks
from jaxscale.ops.attention.blocks import Scoring


def blockwise_attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segments_BT: Array,
    segments_BS: Array | None = None,
    bias_bN: Array | None = None,
    sinks_N: Array | None = None,
    *,
    scoring: Scoring,
    block: int | None = None,
) -> Array:
    """Attention within segments; the arguments of `attention.attention`.

    Its residuals are its arguments, the output and one number per query and head.

    Args:
      block: queries, and keys, of a block; None is by `blocks.block_size`.
    """
    longest = max(q_BTNH.shape[1], k_BSKH.shape[1])
    block = min(block or blocks.block_size(q_BTNH), longest)
    given = (q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BS)
    tables = (blocks.wide(x, q_BTNH) for x in (bias_bN, sinks_N))
    return _attention(block, scoring, *given, *tables)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(block: int, scoring: Scoring, *given: Array | None) -> Array:
    return _forward(block, scoring, *given)[0]


def _forward(
    block: int, scoring: Scoring, q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BS, bias_bN, sinks_N
) -> tuple[Array, Array]:
    """The output, and log(sum(exp(score))) as [I, B, K, G, t]."""
    tokens = (q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BS)
    queries, keys = blocks.in_blocks(*tokens, block=block)
    reach = blocks.reaches(queries, keys, offset=0, scoring=scoring)

    def query_block(arguments):
        queries, reach = arguments
        softmax = blocks.start(queries.q, sinks_N)
        softmax = blocks.attend_block(softmax, queries, reach, keys, bias_bN, scoring=scoring)
        blind = segments_BS is not None
        return blocks.finish_softmax(softmax, q_BTNH.dtype, blind=blind)

    out_IBKGtH, log_z_IBKGt = jax.lax.map(query_block, (queries, reach))
    return blocks.from_query_blocks(out_IBKGtH, q_BTNH.shape[1]), log_z_IBKGt


def _forward_rule(block: int, scoring: Scoring, *given: Array | None):
    results = _forward(block, scoring, *given)
    # Named in here, so that the output itself is saved for the backward pass, not a copy.
    out_BTNH, log_z_IBKGt = checkpoint_name(results, "attention")
    return out_BTNH, (*given, out_BTNH, log_z_IBKGt)


def _backward_rule(block: int, scoring: Scoring, residuals, grad_BTNH: Array):
    *tokens, bias_bN, sinks_N, out_BTNH, log_z_IBKGt = residuals
    q_BTNH, k_BSKH, *_ = tokens
    num_kv_heads = k_BSKH.shape[2]
    queries, keys = blocks.in_blocks(*tokens, block=block)
    output = blocks.output(out_BTNH, grad_BTNH, log_z_IBKGt, num_kv_heads, block)
    sums, grad_k_JBKsH, grad_v_JBKsH = blocks.gradients(
        blocks.no_sums(queries, bias_bN, log_z_IBKGt.dtype),
        queries,
        output,
        keys,
        bias_bN,
        offset=0,
        scoring=scoring,
        dtype=k_BSKH.dtype,
    )
    return (
        blocks.from_query_blocks(sums.q.astype(q_BTNH.dtype), q_BTNH.shape[1]),
        blocks.from_key_blocks(grad_k_JBKsH, k_BSKH.shape[1]),
        blocks.from_key_blocks(grad_v_JBKsH, k_BSKH.shape[1]),
        None,
        None,
        sums.bias,
        blocks.sink_gradient(sinks_N, output),
    )


_attention.defvjp(_forward_rule, _backward_rule)
