"""Causal attention in blocks, in plain JAX: the kernel for CPUs.

Shapes: as in `attention_blocks.py`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxscale.ops import attention_blocks


def blockwise_attention(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segments_BT: Array,
    *,
    sliding_window: int = 0,
    block: int | None = None,
) -> Array:
    """Causal attention within segments; the arguments of `attention.attention`.

    Its residuals are its arguments, the output and one number per query and head.

    Args:
      block: queries, and keys, of a block; None is by `attention_blocks.block_size`.
    """
    block = min(block, q_BTNH.shape[1]) if block else attention_blocks.block_size(q_BTNH)
    return _attention(block, sliding_window, q_BTNH, k_BTKH, v_BTKH, segments_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(block: int, window: int, q_BTNH, k_BTKH, v_BTKH, segments_BT) -> Array:
    return _forward(block, window, q_BTNH, k_BTKH, v_BTKH, segments_BT)[0]


def _forward(block: int, window: int, q_BTNH, k_BTKH, v_BTKH, segments_BT) -> tuple[Array, Array]:
    """The output, and log(sum(exp(score))) as [I, B, K, G, t]."""
    queries, keys = attention_blocks.in_blocks(q_BTNH, k_BTKH, v_BTKH, segments_BT, block)
    reach = attention_blocks.reaches(queries, keys, offset=0, window=window)

    def query_block(arguments):
        queries, reach = arguments
        softmax = attention_blocks.start(queries.q)
        softmax = attention_blocks.attend_block(softmax, queries, reach, keys, window=window)
        return attention_blocks.finish_softmax(softmax, q_BTNH.dtype)

    out_IBKGtH, log_z_IBKGt = jax.lax.map(query_block, (queries, reach))
    return attention_blocks.from_query_blocks(out_IBKGtH, q_BTNH.shape[1]), log_z_IBKGt


def _forward_rule(block: int, window: int, q_BTNH, k_BTKH, v_BTKH, segments_BT):
    results = _forward(block, window, q_BTNH, k_BTKH, v_BTKH, segments_BT)
    # Named in here, so that the output itself is saved for the backward pass, not a copy.
    out_BTNH, log_z_IBKGt = checkpoint_name(results, "attention")
    return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, segments_BT, out_BTNH, log_z_IBKGt)


def _backward_rule(block: int, window: int, residuals, grad_BTNH: Array):
    q_BTNH, k_BTKH, v_BTKH, segments_BT, out_BTNH, log_z_IBKGt = residuals
    time, num_kv_heads = k_BTKH.shape[1:3]
    queries, keys = attention_blocks.in_blocks(q_BTNH, k_BTKH, v_BTKH, segments_BT, block)
    output = attention_blocks.output(out_BTNH, grad_BTNH, log_z_IBKGt, num_kv_heads, block)
    grad_q_IBKGtH, grad_k_JBKsH, grad_v_JBKsH = attention_blocks.gradients(
        jnp.zeros(queries.q.shape, log_z_IBKGt.dtype),
        queries,
        output,
        keys,
        offset=0,
        window=window,
        dtype=k_BTKH.dtype,
    )
    return (
        attention_blocks.from_query_blocks(grad_q_IBKGtH.astype(q_BTNH.dtype), time),
        attention_blocks.from_key_blocks(grad_k_JBKsH, time),
        attention_blocks.from_key_blocks(grad_v_JBKsH, time),
        None,
    )


_attention.defvjp(_forward_rule, _backward_rule)
