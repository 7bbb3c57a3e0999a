"""Blockwise attention in plain JAX: the kernel for CPUs.

Shapes: as in `blocks.py`.
"""

import functools
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxscale.ops.attention import blocks
from jaxscale.ops.attention.blocks import AttentionArrays, Scoring


def blockwise_attention(*arrays: Any, scoring: Scoring, block: int | None = None) -> Array:
    """Attention within segments.

    Its residuals are its arguments, the output and one number per query and head.

    Args:
      arrays: the fields of `AttentionArrays`.
      block: queries (and keys) of a block; None is `blocks.block_size`.
    """
    given = AttentionArrays(*arrays).widened()
    lengths = given.q_BTNH.shape[1], given.k_BSKH.shape[1]
    # Blocks longer than a part's queries would be padded.
    most = max(lengths) if given.begin is None else lengths[0]
    return _attention(min(block or blocks.block_size(given.q_BTNH), most), scoring, given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(block: int, scoring: Scoring, given: AttentionArrays) -> Array:
    return _forward(block, scoring, given)[0]


def _forward(block: int, scoring: Scoring, given: AttentionArrays) -> tuple[Array, Array]:
    """The output, and log(sum(exp(score))) as [I, B, K, G, t]."""
    queries, keys = blocks.in_blocks(given, block)
    reach = blocks.reaches(queries, keys, offset=_offset(given), scoring=scoring)

    def query_block(arguments):
        queries, reach = arguments
        softmax = blocks.start(queries.q, given.v_BSKH.shape[-1], given.sinks_N)
        softmax = blocks.attend_block(softmax, queries, reach, keys, given.bias_bN, scoring=scoring)
        return blocks.finish_softmax(softmax, given.q_BTNH.dtype, blind=given.crosses)

    with _expected_trips(_visible_pairs(given, queries, keys, scoring) / len(queries.q)):
        out_IBKGtH, log_z_IBKGt = jax.lax.map(query_block, (queries, reach))
    return blocks.from_query_blocks(out_IBKGtH, given.q_BTNH.shape[1]), log_z_IBKGt


def _forward_rule(block: int, scoring: Scoring, given: AttentionArrays):
    results = _forward(block, scoring, given)
    # Named inside the forward rule: a name on the output outside would save a copy of it.
    out_BTNH, log_z_IBKGt = checkpoint_name(results, "attention")
    return out_BTNH, (given, out_BTNH, log_z_IBKGt)


def _backward_rule(block: int, scoring: Scoring, residuals, grad_BTNH: Array):
    given, out_BTNH, log_z_IBKGt = residuals
    q_BTNH, k_BSKH = given[:2]
    queries, keys = blocks.in_blocks(given, block)
    output = blocks.output(out_BTNH, grad_BTNH, log_z_IBKGt, k_BSKH.shape[2], block)
    with _expected_trips(_visible_pairs(given, queries, keys, scoring) / len(keys.k)):
        sums, grad_k_JBKsH, grad_v_JBKsH = blocks.gradients(
            blocks.no_sums(queries, given.bias_bN, log_z_IBKGt.dtype),
            queries,
            output,
            keys,
            given.bias_bN,
            offset=_offset(given),
            scoring=scoring,
            dtype=k_BSKH.dtype,
        )
    grads = AttentionArrays(
        blocks.from_query_blocks(sums.q.astype(q_BTNH.dtype), q_BTNH.shape[1]),
        blocks.from_key_blocks(grad_k_JBKsH, k_BSKH.shape[1]),
        blocks.from_key_blocks(grad_v_JBKsH, k_BSKH.shape[1]),
        None,  # pyright: ignore[reportArgumentType] - whole numbers have no gradient
        bias_bN=sums.bias,
        sinks_N=blocks.sink_gradient(given.sinks_N, output),
    )
    return (grads,)


_attention.defvjp(_forward_rule, _backward_rule)


def _offset(given: AttentionArrays) -> Array | int:
    return 0 if given.begin is None else given.begin


def _expected_trips(count: float) -> AbstractContextManager:
    """A scope with the mean trip count of the loops in it, which depends on documents; for
    `compiled.hlo`."""
    return jax.named_scope(f"expected_trips_{count:.4f}")


def _visible_pairs(
    given: AttentionArrays, queries: blocks.Queries, keys: blocks.Keys, scoring: Scoring
) -> float:
    """Pairs of a block of queries and a block of keys that are visible in rows of one document;
    with queries that are a part of the keys' tokens, the mean over all parts."""
    if given.crosses:
        return float(len(queries.q) * len(keys.k))
    block, place = keys.segments.shape[-1], np.arange(len(keys.k))
    distance = block * (place[:, None] - place)
    seen = distance >= 0 if scoring.causal else np.full(distance.shape, True)
    if scoring.window:
        seen &= np.abs(distance) - block + 1 < scoring.window
    return float(seen.sum()) * len(queries.q) / len(keys.k)
