"""Causal attention in blocks, in plain JAX: what a CPU trains with.

The scores of one block of queries with one block of keys exist at a time (FlashAttention-2,
arXiv 2307.08691). Blocks that no query may see, because of order, window or document, are never
computed.

Shapes: B batch, T time, N query heads, K key heads, G query heads per key head (N = K * G),
H head_dim, I blocks of queries, J blocks of keys, t queries of a block, s keys of a block.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

BLOCK_SCORES = 2**19
"""Scores of one block, over batch and heads, are at most about this many: they stay in cache."""


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

    For the backward pass it keeps its arguments, the output and one number per query and head.

    Args:
      block: queries, and keys, of a block; None is a power of two by `BLOCK_SCORES`.
    """
    batch, time, num_heads, _ = q_BTNH.shape
    if block is None:
        sizes = (size for size in (512, 256, 128) if batch * num_heads * size**2 <= BLOCK_SCORES)
        block = next(sizes, 64)
    return _attention(min(block, time), sliding_window, q_BTNH, k_BTKH, v_BTKH, segments_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(block: int, window: int, q_BTNH, k_BTKH, v_BTKH, segments_BT) -> Array:
    return _forward(block, window, q_BTNH, k_BTKH, v_BTKH, segments_BT)[0]


def _forward(block: int, window: int, q_BTNH, k_BTKH, v_BTKH, segments_BT) -> tuple[Array, Array]:
    """The output, and log(sum(exp(scores))) as [I, B, K, G, t]."""
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    scale = jnp.asarray(q_BTNH.shape[-1] ** -0.5, wide)
    # Finite, and so low that its exponential vanishes beside that of any score.
    masked = jnp.asarray(jnp.finfo(wide).min / 2, wide)
    q_IBKGtH = _query_blocks(q_BTNH, k_BTKH.shape[2], block)
    k_JBKsH, v_JBKsH = _key_blocks(k_BTKH, block), _key_blocks(v_BTKH, block)
    segments_IBt = _time_blocks(segments_BT, block)
    first_I = jnp.argmax(_visible(segments_IBt, block, window), axis=1)

    def query_block(arguments):
        i, first, q_BKGtH, segments_Bt = arguments

        def key_block(j, carry):
            out_BKGtH, high_BKGt, total_BKGt = carry
            mask_Bts = _mask(segments_Bt, segments_IBt[j], i, j, window)
            scores_BKGts = scale * product("BKGtH,BKsH->BKGts", q_BKGtH, k_JBKsH[j])
            scores_BKGts = jnp.where(mask_Bts[:, None, None], scores_BKGts, masked)
            new_high_BKGt = jnp.maximum(high_BKGt, jnp.max(scores_BKGts, axis=-1))
            shrink_BKGt = jnp.exp(high_BKGt - new_high_BKGt)
            p_BKGts = jnp.exp(scores_BKGts - new_high_BKGt[..., None])
            total_BKGt = total_BKGt * shrink_BKGt + jnp.sum(p_BKGts, axis=-1)
            more_BKGtH = product("BKGts,BKsH->BKGtH", p_BKGts.astype(v_BTKH.dtype), v_JBKsH[j])
            return out_BKGtH * shrink_BKGt[..., None] + more_BKGtH, new_high_BKGt, total_BKGt

        rows = q_BKGtH.shape[:-1]
        start = jnp.zeros(q_BKGtH.shape, wide), jnp.full(rows, masked), jnp.zeros(rows, wide)
        # The block on the diagonal comes last and each query sees itself there: whatever a fully
        # masked block before it added is multiplied by zero.
        out_BKGtH, high_BKGt, total_BKGt = jax.lax.fori_loop(first, i + 1, key_block, start)
        out_BKGtH = (out_BKGtH / total_BKGt[..., None]).astype(q_BTNH.dtype)
        return out_BKGtH, high_BKGt + jnp.log(total_BKGt)

    blocks = jnp.arange(len(q_IBKGtH)), first_I, q_IBKGtH, segments_IBt
    out_IBKGtH, log_z_IBKGt = jax.lax.map(query_block, blocks)
    return _from_query_blocks(out_IBKGtH, q_BTNH.shape[1]), log_z_IBKGt


def _forward_rule(block: int, window: int, q_BTNH, k_BTKH, v_BTKH, segments_BT):
    results = _forward(block, window, q_BTNH, k_BTKH, v_BTKH, segments_BT)
    # Named in here, so that what is kept for the backward pass is the output itself, not a copy.
    out_BTNH, log_z_IBKGt = checkpoint_name(results, "attention")
    return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, segments_BT, out_BTNH, log_z_IBKGt)


def _backward_rule(block: int, window: int, residuals, grad_BTNH: Array):
    q_BTNH, k_BTKH, v_BTKH, segments_BT, out_BTNH, log_z_IBKGt = residuals
    time, num_kv_heads = k_BTKH.shape[1:3]
    wide = log_z_IBKGt.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    scale = jnp.asarray(q_BTNH.shape[-1] ** -0.5, wide)
    q_IBKGtH = _query_blocks(q_BTNH, num_kv_heads, block)
    grad_IBKGtH = _query_blocks(grad_BTNH, num_kv_heads, block)
    inner_BTN = jnp.sum(out_BTNH.astype(wide) * grad_BTNH.astype(wide), axis=-1)
    inner_IBKGt = _query_blocks(inner_BTN[..., None], num_kv_heads, block)[..., 0]
    segments_IBt = _time_blocks(segments_BT, block)
    visible_IJ = _visible(segments_IBt, block, window)
    end_J = len(visible_IJ) - jnp.argmax(visible_IJ[::-1], axis=0)

    def key_block(grad_q_IBKGtH, arguments):
        j, end, k_BKsH, v_BKsH, segments_Bs = arguments

        # Scores are transposed here, [s, t]: two of the three products that consume them then read
        # them row by row, which is much the faster way on a CPU.
        def query_block(i, carry):
            grad_q_IBKGtH, grad_k_BKsH, grad_v_BKsH = carry
            q_BKGtH, grad_BKGtH = q_IBKGtH[i], grad_IBKGtH[i]
            mask_Bst = jnp.swapaxes(_mask(segments_IBt[i], segments_Bs, i, j, window), 1, 2)
            scores_BKsGt = scale * product("BKsH,BKGtH->BKsGt", k_BKsH, q_BKGtH)
            p_BKsGt = jnp.exp(scores_BKsGt - log_z_IBKGt[i][:, :, None])
            p_BKsGt = jnp.where(mask_Bst[:, None, :, None, :], p_BKsGt, 0)
            grad_p_BKsGt = product("BKsH,BKGtH->BKsGt", v_BKsH, grad_BKGtH)
            grad_scores_BKsGt = scale * p_BKsGt * (grad_p_BKsGt - inner_IBKGt[i][:, :, None])
            grad_scores_BKsGt = grad_scores_BKsGt.astype(q_BTNH.dtype)
            p_BKsGt = p_BKsGt.astype(v_BTKH.dtype)
            grad_q_BKGtH = product("BKsGt,BKsH->BKGtH", grad_scores_BKsGt, k_BKsH)
            grad_k_BKsH += product("BKsGt,BKGtH->BKsH", grad_scores_BKsGt, q_BKGtH)
            grad_v_BKsH += product("BKsGt,BKGtH->BKsH", p_BKsGt, grad_BKGtH)
            return grad_q_IBKGtH.at[i].add(grad_q_BKGtH), grad_k_BKsH, grad_v_BKsH

        zero_BKsH = jnp.zeros(k_BKsH.shape, wide)
        grad_q_IBKGtH, grad_k_BKsH, grad_v_BKsH = jax.lax.fori_loop(
            j, end, query_block, (grad_q_IBKGtH, zero_BKsH, zero_BKsH)
        )
        return grad_q_IBKGtH, (grad_k_BKsH.astype(k_BKsH.dtype), grad_v_BKsH.astype(v_BKsH.dtype))

    keys = _key_blocks(k_BTKH, block), _key_blocks(v_BTKH, block), segments_IBt
    grad_q_IBKGtH, (grad_k_JBKsH, grad_v_JBKsH) = jax.lax.scan(
        key_block, jnp.zeros(q_IBKGtH.shape, wide), (jnp.arange(len(end_J)), end_J, *keys)
    )
    grad_q_BTNH = _from_query_blocks(grad_q_IBKGtH.astype(q_BTNH.dtype), time)
    return (
        grad_q_BTNH,
        _from_key_blocks(grad_k_JBKsH, time),
        _from_key_blocks(grad_v_JBKsH, time),
        None,
    )


_attention.defvjp(_forward_rule, _backward_rule)


def _mask(segments_Bt: Array, segments_Bs: Array, i, j, window: int) -> Array:
    """Who sees whom in query block i and key block j, [B, t, s]."""
    block = segments_Bt.shape[1]
    query_t, key_s = i * block + jnp.arange(block)[:, None], j * block + jnp.arange(block)
    mask_ts = key_s <= query_t
    if window:
        mask_ts &= query_t - key_s < window
    return mask_ts & (segments_Bt[:, :, None] == segments_Bs[:, None, :])


def _visible(segments_IBt: Array, block: int, window: int) -> Array:
    """Whether a query of block i may see a key of block j, [I, J]; never false where one does."""
    i, j = jnp.arange(len(segments_IBt))[:, None], jnp.arange(len(segments_IBt))
    visible_IJ = j <= i
    if window:
        visible_IJ &= (i - j - 1) * block + 1 < window
    # Segments that do not overlap as ranges have no member in common.
    low_IB, high_IB = jnp.min(segments_IBt, axis=-1), jnp.max(segments_IBt, axis=-1)
    overlap_IJB = (low_IB[:, None] <= high_IB[None]) & (low_IB[None] <= high_IB[:, None])
    return visible_IJ & jnp.any(overlap_IJB, axis=-1)


def _time_blocks(x_BT: Array, block: int) -> Array:
    """[B, T, ...] -> [I, B, t, ...]; the last block is filled with zeros.

    Those come after every real token, so that causal order hides them.
    """
    missing = -x_BT.shape[1] % block
    x_BT = jnp.pad(x_BT, [(0, 0), (0, missing)] + [(0, 0)] * (x_BT.ndim - 2))
    x_BIt = x_BT.reshape(x_BT.shape[0], -1, block, *x_BT.shape[2:])
    return jnp.moveaxis(x_BIt, 1, 0)


def _key_blocks(k_BTKH: Array, block: int) -> Array:
    """[B, T, K, H] -> [J, B, K, s, H]."""
    return jnp.moveaxis(_time_blocks(k_BTKH, block), 3, 2)


def _from_key_blocks(k_JBKsH: Array, time: int) -> Array:
    k_BJsKH = jnp.transpose(k_JBKsH, (1, 0, 3, 2, 4))
    return k_BJsKH.reshape(k_BJsKH.shape[0], -1, *k_BJsKH.shape[3:])[:, :time]


def _query_blocks(q_BTNH: Array, num_kv_heads: int, block: int) -> Array:
    """[B, T, N, H] -> [I, B, K, G, t, H]."""
    batch, time, num_heads, head_dim = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(batch, time, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return jnp.moveaxis(_time_blocks(q_BTKGH, block), 2, 4)


def _from_query_blocks(q_IBKGtH: Array, time: int) -> Array:
    q_BItKGH = jnp.transpose(q_IBKGtH, (1, 0, 4, 2, 3, 5))
    batch, _, _, num_kv_heads, group, head_dim = q_BItKGH.shape
    return q_BItKGH.reshape(batch, -1, num_kv_heads * group, head_dim)[:, :time]
