"""Causal attention in blocks, in plain JAX: what a CPU trains with.

The scores of one block of queries with one block of keys exist at a time (arXiv 2205.14135,
2307.08691); blocks that no query may see, because of order, window or document, are never
computed.

Shapes: B batch, T time, N query heads, K key heads, G query heads per key head (N = K * G),
H head_dim, I blocks of queries, J blocks of keys, t and s time in such a block.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

BLOCK = 256
"""Queries, and keys, of a block."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def blockwise_attention(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segments_BT: Array,
    sliding_window: int,
    block: int = BLOCK,
) -> Array:
    """Causal attention within segments; the arguments of `attention.attention`."""
    return _forward(q_BTNH, k_BTKH, v_BTKH, segments_BT, sliding_window, block)[0]


def _forward(q_BTNH, k_BTKH, v_BTKH, segments_BT, sliding_window, block):
    """The output, and log(sum(exp(scores))) as [I, B, K, t, G]."""
    time = q_BTNH.shape[1]
    block = min(block, time)
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    num_kv_heads = k_BTKH.shape[2]
    q_IBKtGH = _query_blocks(q_BTNH, num_kv_heads, block)
    k_JBKsH, v_JBKsH = _key_blocks(k_BTKH, block), _key_blocks(v_BTKH, block)
    segments_IBt = _time_blocks(segments_BT, block)
    first_I = jnp.argmax(_visible(segments_IBt, block, sliding_window), axis=1)

    def query_block(arguments):
        i, first, q_BKtGH, segments_Bt = arguments

        def key_block(j, carry):
            out_BKtGH, high_BKtG, total_BKtG = carry
            mask_BKtGs = _mask(segments_Bt, segments_IBt[j], i, j, block, sliding_window)
            scores_BKtGs = _scores(q_BKtGH, k_JBKsH[j], mask_BKtGs, wide)
            new_high_BKtG = jnp.maximum(high_BKtG, jnp.max(scores_BKtGs, axis=-1))
            shrink_BKtG = jnp.exp(high_BKtG - new_high_BKtG)
            p_BKtGs = jnp.exp(scores_BKtGs - new_high_BKtG[..., None])
            more_BKtGH = jnp.einsum(
                "BKtGs,BKsH->BKtGH",
                p_BKtGs.astype(v_JBKsH.dtype),
                v_JBKsH[j],
                preferred_element_type=wide,
            )
            return (
                out_BKtGH * shrink_BKtG[..., None] + more_BKtGH,
                new_high_BKtG,
                total_BKtG * shrink_BKtG + jnp.sum(p_BKtGs, axis=-1),
            )

        rows = q_BKtGH.shape[:-1]
        start = (
            jnp.zeros(q_BKtGH.shape, wide),
            jnp.full(rows, _masked_score(wide)),
            jnp.zeros(rows, wide),
        )
        # The block on the diagonal comes last and each query sees itself there: whatever a fully
        # masked block before it added is multiplied away.
        out_BKtGH, high_BKtG, total_BKtG = jax.lax.fori_loop(first, i + 1, key_block, start)
        out_BKtGH = (out_BKtGH / total_BKtG[..., None]).astype(q_BTNH.dtype)
        return out_BKtGH, high_BKtG + jnp.log(total_BKtG)

    blocks = (jnp.arange(q_IBKtGH.shape[0]), first_I, q_IBKtGH, segments_IBt)
    out_IBKtGH, log_z_IBKtG = jax.lax.map(query_block, blocks)
    return _from_query_blocks(out_IBKtGH, time), log_z_IBKtG


def _forward_rule(q_BTNH, k_BTKH, v_BTKH, segments_BT, sliding_window, block):
    out_BTNH, log_z_IBKtG = _forward(q_BTNH, k_BTKH, v_BTKH, segments_BT, sliding_window, block)
    out_BTNH = checkpoint_name(out_BTNH, "attention")
    log_z_IBKtG = checkpoint_name(log_z_IBKtG, "attention")
    return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, segments_BT, out_BTNH, log_z_IBKtG)


def _backward_rule(sliding_window, block, residuals, grad_BTNH):
    q_BTNH, k_BTKH, v_BTKH, segments_BT, out_BTNH, log_z_IBKtG = residuals
    _, time, _, head_dim = q_BTNH.shape
    block = min(block, time)
    wide = log_z_IBKtG.dtype
    num_kv_heads = k_BTKH.shape[2]
    q_IBKtGH = _query_blocks(q_BTNH, num_kv_heads, block)
    grad_IBKtGH = _query_blocks(grad_BTNH, num_kv_heads, block)
    inner_BTN = jnp.sum(out_BTNH.astype(wide) * grad_BTNH.astype(wide), axis=-1)
    inner_IBKtG = _query_blocks(inner_BTN[..., None], num_kv_heads, block)[..., 0]
    segments_IBt = _time_blocks(segments_BT, block)
    visible_IJ = _visible(segments_IBt, block, sliding_window)
    num_blocks = visible_IJ.shape[0]
    end_J = num_blocks - jnp.argmax(visible_IJ[::-1], axis=0)
    scale = jnp.asarray(head_dim**-0.5, wide)

    def key_block(grad_q_IBKtGH, arguments):
        j, end, k_BKsH, v_BKsH, segments_Bs = arguments

        def query_block(i, carry):
            grad_q_IBKtGH, grad_k_BKsH, grad_v_BKsH = carry
            mask_BKtGs = _mask(segments_IBt[i], segments_Bs, i, j, block, sliding_window)
            scores_BKtGs = _scores(q_IBKtGH[i], k_BKsH, mask_BKtGs, wide)
            p_BKtGs = jnp.exp(scores_BKtGs - log_z_IBKtG[i][..., None])
            grad_p_BKtGs = jnp.einsum(
                "BKtGH,BKsH->BKtGs", grad_IBKtGH[i], v_BKsH, preferred_element_type=wide
            )
            grad_scores_BKtGs = p_BKtGs * (grad_p_BKtGs - inner_IBKtG[i][..., None]) * scale
            grad_scores_BKtGs = grad_scores_BKtGs.astype(q_BTNH.dtype)
            p_BKtGs = p_BKtGs.astype(v_BTKH.dtype)
            grad_q_BKtGH = jnp.einsum(
                "BKtGs,BKsH->BKtGH", grad_scores_BKtGs, k_BKsH, preferred_element_type=wide
            )
            return (
                grad_q_IBKtGH.at[i].add(grad_q_BKtGH),
                grad_k_BKsH
                + jnp.einsum(
                    "BKtGs,BKtGH->BKsH",
                    grad_scores_BKtGs,
                    q_IBKtGH[i],
                    preferred_element_type=wide,
                ),
                grad_v_BKsH
                + jnp.einsum(
                    "BKtGs,BKtGH->BKsH", p_BKtGs, grad_IBKtGH[i], preferred_element_type=wide
                ),
            )

        zero_BKsH = jnp.zeros(k_BKsH.shape, wide)
        grad_q_IBKtGH, grad_k_BKsH, grad_v_BKsH = jax.lax.fori_loop(
            j, end, query_block, (grad_q_IBKtGH, zero_BKsH, zero_BKsH)
        )
        return grad_q_IBKtGH, (grad_k_BKsH.astype(k_BKsH.dtype), grad_v_BKsH.astype(v_BKsH.dtype))

    blocks = (
        jnp.arange(num_blocks),
        end_J,
        _key_blocks(k_BTKH, block),
        _key_blocks(v_BTKH, block),
        segments_IBt,
    )
    grad_q_IBKtGH, (grad_k_JBKsH, grad_v_JBKsH) = jax.lax.scan(
        key_block, jnp.zeros(q_IBKtGH.shape, wide), blocks
    )
    return (
        _from_query_blocks(grad_q_IBKtGH.astype(q_BTNH.dtype), time),
        _from_key_blocks(grad_k_JBKsH, time),
        _from_key_blocks(grad_v_JBKsH, time),
        None,
    )


blockwise_attention.defvjp(_forward_rule, _backward_rule)


def _masked_score(dtype) -> Array:
    """So low that its exponential is zero beside any score, and finite."""
    return jnp.asarray(jnp.finfo(dtype).min / 2, dtype)


def _scores(q_BKtGH: Array, k_BKsH: Array, mask_BKtGs: Array, wide) -> Array:
    scores_BKtGs = jnp.einsum("BKtGH,BKsH->BKtGs", q_BKtGH, k_BKsH, preferred_element_type=wide)
    scores_BKtGs *= jnp.asarray(q_BKtGH.shape[-1] ** -0.5, wide)
    return jnp.where(mask_BKtGs, scores_BKtGs, _masked_score(wide))


def _mask(segments_Bt, segments_Bs, i, j, block: int, sliding_window: int) -> Array:
    """Who sees whom in query block i and key block j, [B, 1, t, 1, s]."""
    query_t = i * block + jnp.arange(block)[:, None]
    key_s = j * block + jnp.arange(block)[None, :]
    mask_ts = key_s <= query_t
    if sliding_window:
        mask_ts &= query_t - key_s < sliding_window
    mask_Bts = mask_ts & (segments_Bt[:, :, None] == segments_Bs[:, None, :])
    return mask_Bts[:, None, :, None, :]


def _visible(segments_IBt: Array, block: int, sliding_window: int) -> Array:
    """Whether any query of block i may see any key of block j, [I, J]; the diagonal is true."""
    num_blocks = segments_IBt.shape[0]
    i, j = jnp.arange(num_blocks)[:, None], jnp.arange(num_blocks)[None, :]
    visible_IJ = j <= i
    if sliding_window:
        visible_IJ &= (i - j - 1) * block + 1 < sliding_window
    low_IB, high_IB = jnp.min(segments_IBt, axis=-1), jnp.max(segments_IBt, axis=-1)
    overlap_IJB = (low_IB[:, None] <= high_IB[None]) & (low_IB[None] <= high_IB[:, None])
    return visible_IJ & jnp.any(overlap_IJB, axis=-1)


def _time_blocks(x_BT: Array, block: int) -> Array:
    """[B, T, ...] -> [I, B, t, ...]; the last block is filled with zeros.

    The zeros come after every real token, so that causal order hides them.
    """
    missing = -x_BT.shape[1] % block
    x_BT = jnp.pad(x_BT, [(0, 0), (0, missing)] + [(0, 0)] * (x_BT.ndim - 2))
    x_BIt = x_BT.reshape(x_BT.shape[0], -1, block, *x_BT.shape[2:])
    return jnp.moveaxis(x_BIt, 1, 0)


def _key_blocks(k_BTKH: Array, block: int) -> Array:
    return jnp.moveaxis(_time_blocks(k_BTKH, block), 3, 2)


def _from_key_blocks(k_JBKsH: Array, time: int) -> Array:
    k_BJsKH = jnp.transpose(k_JBKsH, (1, 0, 3, 2, 4))
    return k_BJsKH.reshape(k_BJsKH.shape[0], -1, *k_BJsKH.shape[3:])[:, :time]


def _query_blocks(q_BTNH: Array, num_kv_heads: int, block: int) -> Array:
    """[B, T, N, H] -> [I, B, K, t, G, H]."""
    batch, time, num_heads, head_dim = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(batch, time, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return jnp.moveaxis(_time_blocks(q_BTKGH, block), 3, 2)


def _from_query_blocks(q_IBKtGH: Array, time: int) -> Array:
    q_BItKGH = jnp.transpose(q_IBKtGH, (1, 0, 3, 2, 4, 5))
    batch, _, _, num_kv_heads, group, head_dim = q_BItKGH.shape
    return q_BItKGH.reshape(batch, -1, num_kv_heads * group, head_dim)[:, :time]
