"""Blockwise attention arithmetic for some queries and some keys, anywhere in a sequence.

Only the scores of one block of queries with one block of keys exist at a time (FlashAttention-2,
arXiv 2307.08691). Blocks hidden by causal order, window or documents are not computed.

Shapes: B batch, T time, N query heads, K key heads, G query heads per key head (N = K * G),
H head_dim, I blocks of queries, J blocks of keys, t queries of a block, s keys of a block,
b buckets of a relative position bias.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxscale.ops.array_stack import at
from jaxscale.ops.attention import relative_bias
from jaxscale.ops.sizes import BLOCK_SCORES

HIDDEN = -1e30  # a hidden key's score in a kernel: its exponential is 0 relative to any other's


class Scoring(NamedTuple):
    """Scoring and visibility of keys: settings of a layer, fixed at compile time.

    Scores are scaled, capped to cap * tanh(score / cap), then biased.
    """

    scale: float
    window: int = 0  # with `causal`: keys that a query sees, itself included; 0 is all
    causal: bool = True  # False: a window extends as far after the query as before it
    soft_cap: float = 0.0  # 0 disables
    max_distance: int = 128  # of a relative position bias

    @property
    def bucketing(self) -> dict:
        """Keyword arguments of the functions in `relative_bias`."""
        return {"causal": self.causal, "max_distance": self.max_distance}


class AttentionArrays(NamedTuple):
    """The array arguments of attention, in the order of every implementation."""

    q_BTNH: Array
    k_BSKH: Array
    v_BSKH: Array  # may have another number of features than keys
    segments_BT: Array
    segments_BS: Array | None = None  # the keys', if they are not those of the queries
    bias_bN: Array | None = None  # the table of T5's relative position bias (`relative_bias.py`)
    sinks_N: Array | None = None  # one logit per head in the softmax's denominator, without a value
    begin: Array | None = None  # int32, of queries that are a part of the keys' tokens: the first's
    # position among them

    @property
    def wide(self) -> jnp.dtype:
        """The type of scores and sums: float32 or wider."""
        return _wide(self.q_BTNH)

    @property
    def crosses(self) -> bool:
        """Whether this is cross attention: keys of other sequences than the queries."""
        return self.segments_BS is not None and self.begin is None

    def widened(self) -> "AttentionArrays":
        """Casts bias and sinks to the type of the scores, in which their gradients are summed."""
        bias_bN, sinks_N = (None if x is None else x.astype(self.wide) for x in self[5:7])
        return self._replace(bias_bN=bias_bN, sinks_N=sinks_N)


class Queries(NamedTuple):
    """Blocks of queries."""

    q: Array  # [I, B, K, G, t, H]
    segments: Array  # [I, B, t]


class Keys(NamedTuple):
    """Blocks of keys, with their values."""

    k: Array  # [J, B, K, s, H]
    v: Array  # [J, B, K, s, H]
    segments: Array  # [J, B, s]


class Softmax(NamedTuple):
    """Online softmax over the keys seen so far, in float32 or wider."""

    out: Array  # [I, B, K, G, t, H], not yet divided by `total`
    high: Array  # [I, B, K, G, t], the highest score
    total: Array  # [I, B, K, G, t], sum(exp(score - high))


class Output(NamedTuple):
    """Per-query values for the backward pass, after all keys."""

    log_z: Array  # [I, B, K, G, t], log(sum(exp(score)))
    grad: Array  # [I, B, K, G, t, H], of the output
    inner: Array  # [I, B, K, G, t], sum(output * grad) over H


def block_size(q_BTNH: Array) -> int:
    """Queries (and keys) of a block: a power of two, limited by `BLOCK_SCORES`."""
    batch, _, num_heads, _ = q_BTNH.shape
    sizes = (size for size in (512, 256, 128) if batch * num_heads * size**2 <= BLOCK_SCORES)
    return next(sizes, 64)


def start(q: Array, value_dim: int, sinks_N: Array | None = None) -> Softmax:
    """The softmax before any key, with sinks if given; `q` as in `Queries`, or one block of it."""
    wide, rows = _wide(q), q.shape[:-1]
    if sinks_N is None:
        high, total = jnp.full(rows, _masked(wide)), jnp.zeros(rows, wide)
    else:
        high = jnp.broadcast_to(sinks_N.astype(wide).reshape(*rows[-3:-1], 1), rows)
        total = jnp.ones(rows, wide)
    return Softmax(jnp.zeros((*rows, value_dim), wide), high, total)


def attend(
    softmax: Softmax,
    queries: Queries,
    keys: Keys,
    bias_bN: Array | None = None,
    *,
    offset: Array | int,
    scoring: Scoring,
) -> Softmax:
    """Adds keys to the softmax of queries.

    Args:
      bias_bN: the table of a relative position bias.
      offset: position of the first query minus that of the first key.
    """
    reach = reaches(queries, keys, offset=offset, scoring=scoring)

    def query_block(arguments):
        softmax, queries, reach = arguments
        return attend_block(softmax, queries, reach, keys, bias_bN, scoring=scoring)

    return jax.lax.map(query_block, (softmax, queries, reach))


class Reach(NamedTuple):
    """The keys visible to blocks of queries; each [I]."""

    distance: Array  # position of a block's first query minus that of the first key
    begin: Array  # blocks of keys outside begin .. end - 1 are hidden
    end: Array


def reaches(queries: Queries, keys: Keys, *, offset: Array | int, scoring: Scoring) -> Reach:
    """The reach of every block of queries; arguments as in `attend`."""
    visible_IJ = visible(queries.segments, keys.segments, offset=offset, scoring=scoring)
    distance_I = offset + queries.segments.shape[-1] * jnp.arange(len(queries.segments))
    return Reach(distance_I, *visible_ranges(visible_IJ))


def attend_block(
    softmax: Softmax,
    queries: Queries,
    reach: Reach,
    keys: Keys,
    bias_bN: Array | None = None,
    *,
    scoring: Scoring,
) -> Softmax:
    """`attend` for one block of queries: all arrays except the keys' lack the leading [I]."""
    q_BKGtH, segments_Bt = queries
    wide, block = _wide(q_BKGtH), keys.segments.shape[-1]
    matmul = functools.partial(jnp.einsum, preferred_element_type=wide)
    scale = jnp.asarray(scoring.scale, wide)

    def key_block(j, softmax):
        out_BKGtH, high_BKGt, total_BKGt = softmax
        k_BKsH, v_BKsH, segments_Bs = at(keys, j)
        distance = reach.distance - j * block
        mask_Bts = _mask(segments_Bt, segments_Bs, distance, scoring)
        scores_BKGts = scale * matmul("BKGtH,BKsH->BKGts", q_BKGtH, k_BKsH)
        if scoring.soft_cap:
            scores_BKGts = scoring.soft_cap * jnp.tanh(scores_BKGts / scoring.soft_cap)
        if bias_bN is not None:
            scores_BKGts += _biases(bias_bN, distance, scores_BKGts.shape[1:], scoring)
        # A query without visible keys so far accumulates garbage; its first visible score shrinks
        # that by exp(masked - score) = 0.
        scores_BKGts = jnp.where(mask_Bts[:, None, None], scores_BKGts, _masked(wide))
        new_high_BKGt = jnp.maximum(high_BKGt, jnp.max(scores_BKGts, axis=-1))
        shrink_BKGt = jnp.exp(high_BKGt - new_high_BKGt)
        p_BKGts = jnp.exp(scores_BKGts - new_high_BKGt[..., None])
        total_BKGt = total_BKGt * shrink_BKGt + jnp.sum(p_BKGts, axis=-1)
        more_BKGtH = matmul("BKGts,BKsH->BKGtH", p_BKGts.astype(v_BKsH.dtype), v_BKsH)
        return Softmax(out_BKGtH * shrink_BKGt[..., None] + more_BKGtH, new_high_BKGt, total_BKGt)

    return jax.lax.fori_loop(reach.begin, reach.end, key_block, softmax)


def finish_softmax(
    softmax: Softmax, dtype: DTypeLike, *, blind: bool = False
) -> tuple[Array, Array]:
    """The output in `dtype`, and log(sum(exp(score))), after all keys.

    Args:
      blind: whether a query may have no visible key, as in cross attention; its output is zero.
    """
    if blind:
        seen = softmax.high > _masked(softmax.high.dtype)
        total = jnp.where(seen, softmax.total, 1)
        softmax = Softmax(jnp.where(seen[..., None], softmax.out, 0), softmax.high, total)
    out = (softmax.out / softmax.total[..., None]).astype(dtype)
    return out, softmax.high + jnp.log(softmax.total)


class Sums(NamedTuple):
    """Gradients summed over keys, in float32 or wider."""

    q: Array  # [I, B, K, G, t, H]
    bias: Array | None  # [b, N]


def no_sums(queries: Queries, bias_bN: Array | None, wide: DTypeLike) -> Sums:
    """Zeros, before any key."""
    bias = None if bias_bN is None else jnp.zeros(bias_bN.shape, wide)
    return Sums(jnp.zeros(queries.q.shape, wide), bias)


def gradients(
    sums: Sums,
    queries: Queries,
    output: Output,
    keys: Keys,
    bias_bN: Array | None = None,
    *,
    offset: Array | int,
    scoring: Scoring,
    dtype: DTypeLike,
) -> tuple[Sums, Array, Array]:
    """The backward pass of `attend` for one part of the queries' keys.

    Args:
      sums: from other keys.
      bias_bN, offset, scoring: as in `attend`.
      dtype: of the keys' and values' gradients.

    Returns:
      The sums with these keys added; the gradients of keys and values from these queries only,
      [J, B, K, s, H].
    """
    wide, block = sums.q.dtype, keys.segments.shape[-1]
    matmul = functools.partial(jnp.einsum, preferred_element_type=wide)
    scale, soft_cap = jnp.asarray(scoring.scale, wide), scoring.soft_cap

    def key_block(sums, arguments):
        j, begin, end, (k_BKsH, v_BKsH, segments_Bs) = arguments

        # Scores are transposed here, [s, t], so that two of the three matmuls with them read them
        # row by row, which is much faster on a CPU.
        def query_block(i, carry):
            (grad_q_IBKGtH, grad_bias_bN), grad_k_BKsH, grad_v_BKsH = carry
            q_BKGtH, segments_Bt = at(queries, i)
            log_z_BKGt, grad_BKGtH, inner_BKGt = at(output, i)
            distance = offset + (i - j) * block
            mask_Bts = _mask(segments_Bt, segments_Bs, distance, scoring)
            mask_B1s1t = jnp.swapaxes(mask_Bts, 1, 2)[:, None, :, None]
            scores_BKsGt = scale * matmul("BKsH,BKGtH->BKsGt", k_BKsH, q_BKGtH)
            if soft_cap:
                tanh_BKsGt = jnp.tanh(scores_BKsGt / soft_cap)
                scores_BKsGt = soft_cap * tanh_BKsGt
            if bias_bN is not None:
                shape = q_BKGtH.shape[1:4] + segments_Bs.shape[1:]
                biases_KGts = _biases(bias_bN, distance, shape, scoring)
                scores_BKsGt += jnp.moveaxis(biases_KGts, 3, 1)
            p_BKsGt = jnp.exp(scores_BKsGt - log_z_BKGt[:, :, None])
            # Several matmuls read p and the gradients of scores. Without the barriers XLA
            # recomputes them in each.
            p_BKsGt = jax.lax.optimization_barrier(jnp.where(mask_B1s1t, p_BKsGt, 0))
            grad_p_BKsGt = matmul("BKsH,BKGtH->BKsGt", v_BKsH, grad_BKGtH)
            grad_scores_BKsGt = scale * p_BKsGt * (grad_p_BKsGt - inner_BKGt[:, :, None])
            if bias_bN is not None:
                grad_bias_bN += _bias_gradient(
                    jnp.sum(grad_scores_BKsGt, axis=0) / scale, bias_bN, distance, scoring
                )
            if soft_cap:
                grad_scores_BKsGt *= 1 - tanh_BKsGt**2
            grad_scores_BKsGt = jax.lax.optimization_barrier(
                grad_scores_BKsGt.astype(q_BKGtH.dtype)
            )
            p_BKsGt = p_BKsGt.astype(v_BKsH.dtype)
            grad_q_BKGtH = matmul("BKsGt,BKsH->BKGtH", grad_scores_BKsGt, k_BKsH)
            grad_k_BKsH += matmul("BKsGt,BKGtH->BKsH", grad_scores_BKsGt, q_BKGtH)
            grad_v_BKsH += matmul("BKsGt,BKGtH->BKsH", p_BKsGt, grad_BKGtH)
            sums = Sums(grad_q_IBKGtH.at[i].add(grad_q_BKGtH), grad_bias_bN)
            return sums, grad_k_BKsH, grad_v_BKsH

        zeros = (jnp.zeros(x.shape, wide) for x in (k_BKsH, v_BKsH))
        sums, grad_k_BKsH, grad_v_BKsH = jax.lax.fori_loop(begin, end, query_block, (sums, *zeros))
        return sums, (grad_k_BKsH.astype(dtype), grad_v_BKsH.astype(dtype))

    visible_IJ = visible(queries.segments, keys.segments, offset=offset, scoring=scoring)
    xs = jnp.arange(len(keys.segments)), *visible_ranges(visible_IJ.T), keys
    sums, (grad_k_JBKsH, grad_v_JBKsH) = jax.lax.scan(key_block, sums, xs)
    if bias_bN is not None:
        # Ties the table's gradient to the queries': `pipeline.backward_split` would move it to W,
        # which would compute all scores again.
        sums = jax.lax.optimization_barrier(sums)
    return sums, grad_k_JBKsH, grad_v_JBKsH


def _biases(bias_bN: Array, distance: Array, shape: tuple[int, ...], scoring: Scoring) -> Array:
    """The biases of a block of scores, [K, G, t, s], which is `shape`."""
    t, s = shape[2:]
    line_NL = relative_bias.line(bias_bN, distance, t, s, **scoring.bucketing)
    return relative_bias.spread_line(line_NL, t, s).reshape(shape)


def _bias_gradient(grad_KsGt: Array, bias_bN: Array, distance: Array, scoring: Scoring) -> Array:
    """The gradient of the bias table, [b, N], from that of a block's (transposed) scores."""
    t, s = grad_KsGt.shape[3], grad_KsGt.shape[1]
    grad_Nts = jnp.moveaxis(grad_KsGt, 1, 3).reshape(-1, t, s)
    grad_NL = relative_bias.sum_diagonals(grad_Nts)
    return relative_bias.line_gradient(grad_NL, bias_bN, distance, t, s, **scoring.bucketing)


def output(
    out_BTNH: Array, grad_BTNH: Array, log_z_IBKGt: Array, num_kv_heads: int, block: int
) -> Output:
    """`Output`, from attention's output and its gradient."""
    wide = log_z_IBKGt.dtype
    inner_BTN1 = jnp.sum(out_BTNH.astype(wide) * grad_BTNH.astype(wide), axis=-1, keepdims=True)
    return Output(
        log_z_IBKGt,
        _query_blocks(grad_BTNH, num_kv_heads, block),
        _query_blocks(inner_BTN1, num_kv_heads, block)[..., 0],
    )


def sink_gradient(sinks_N: Array | None, output: Output) -> Array | None:
    """The gradient of the sinks, [N]: a sink acts as a key with value zero."""
    if sinks_N is None:
        return None
    *others, num_kv_heads, group, _ = output.log_z.shape
    share = jnp.exp(sinks_N.reshape(num_kv_heads, group, 1) - output.log_z)
    dims = (*range(len(others)), output.log_z.ndim - 1)
    return -jnp.sum(share * output.inner, axis=dims).reshape(sinks_N.shape)


def _wide(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _masked(wide: jnp.dtype) -> Array:
    """A masked score: finite, with an exponential of zero relative to any real score."""
    return jnp.asarray(jnp.finfo(wide).min / 2, wide)


def _mask(segments_Bt: Array, segments_Bs: Array, distance: Array, scoring: Scoring) -> Array:
    """The visibility mask of a block of queries and a block of keys, [B, t, s].

    Args:
      distance: position of the block's first query minus that of its first key.
    """
    index_t, index_s = jnp.arange(segments_Bt.shape[1]), jnp.arange(segments_Bs.shape[1])
    mask_ts = in_reach(distance + index_t[:, None] - index_s, scoring.window, scoring.causal)
    in_segment_Bts = segments_Bt[:, :, None] == segments_Bs[:, None, :]
    return in_segment_Bts if mask_ts is None else mask_ts & in_segment_Bts


def in_reach(distance: Array, window: int, causal: bool) -> Array | None:
    """Whether causal order and window allow a query to see a key `distance` positions before it;
    None if they always do. The other arguments are as in `Scoring`."""
    seen = distance >= 0 if causal else None
    if window:
        near = distance < window if causal else jnp.abs(distance) < window
        seen = near if seen is None else seen & near
    return seen


def visible(
    segments_IBt: Array, segments_JBs: Array, *, offset: Array | int, scoring: Scoring
) -> Array:
    """Whether any query of block i may see a key of block j, [I, J]; may be true in excess."""
    block = segments_JBs.shape[-1]
    i, j = jnp.arange(len(segments_IBt))[:, None], jnp.arange(len(segments_JBs))
    return visible_at(offset + (i - j) * block, segments_IBt, segments_JBs, scoring)


def visible_at(distance_IJ: Array, segments_IBt, segments_JBs, scoring: Scoring) -> Array:
    """`visible`, by the position of a block's first query minus that of a block's first key."""
    block = segments_JBs.shape[-1]
    visible_IJ = distance_IJ > -block if scoring.causal else jnp.bool(True)
    if scoring.window:
        visible_IJ &= distance_IJ - block + 1 < scoring.window
        if not scoring.causal:
            visible_IJ &= distance_IJ + block - 1 > -scoring.window
    # Disjoint ranges of segments have no segment in common.
    low_IB, high_IB = jnp.min(segments_IBt, axis=-1), jnp.max(segments_IBt, axis=-1)
    low_JB, high_JB = jnp.min(segments_JBs, axis=-1), jnp.max(segments_JBs, axis=-1)
    overlap_IJB = (low_IB[:, None] <= high_JB) & (low_JB <= high_IB[:, None])
    return visible_IJ & jnp.any(overlap_IJB, axis=-1)


def visible_ranges(visible: Array) -> tuple[Array, Array]:
    """For each row, the range from the first to the last visible column."""
    end = visible.shape[1] - jnp.argmax(visible[:, ::-1], axis=1)
    return jnp.argmax(visible, axis=1), jnp.where(jnp.any(visible, axis=1), end, 0)


def in_blocks(given: AttentionArrays, block: int) -> tuple[Queries, Keys]:
    """Splits queries and keys into blocks; the last blocks are padded, with segment -1."""
    q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BS, *_ = given
    segments = key_segments = _time_blocks(segments_BT + 1, block) - 1
    if segments_BS is not None:
        key_segments = _time_blocks(segments_BS + 1, block) - 1
    k_JBKsH, v_JBKsH = (jnp.moveaxis(_time_blocks(x, block), 3, 2) for x in (k_BSKH, v_BSKH))
    queries = Queries(_query_blocks(q_BTNH, k_BSKH.shape[2], block), segments)
    return queries, Keys(k_JBKsH, v_JBKsH, key_segments)


def from_query_blocks(q_IBKGtH: Array, time: int) -> Array:
    """[I, B, K, G, t, H] -> [B, T, N, H]."""
    q_BItKGH = jnp.transpose(q_IBKGtH, (1, 0, 4, 2, 3, 5))
    batch, _, _, num_kv_heads, group, head_dim = q_BItKGH.shape
    return q_BItKGH.reshape(batch, -1, num_kv_heads * group, head_dim)[:, :time]


def from_key_blocks(k_JBKsH: Array, time: int) -> Array:
    """[J, B, K, s, H] -> [B, T, K, H]."""
    k_BJsKH = jnp.transpose(k_JBKsH, (1, 0, 3, 2, 4))
    return k_BJsKH.reshape(k_BJsKH.shape[0], -1, *k_BJsKH.shape[3:])[:, :time]


def _query_blocks(q_BTNH: Array, num_kv_heads: int, block: int) -> Array:
    """[B, T, N, H] -> [I, B, K, G, t, H]."""
    batch, time, num_heads, head_dim = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(batch, time, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return jnp.moveaxis(_time_blocks(q_BTKGH, block), 2, 4)


def _time_blocks(x_BT: Array, block: int) -> Array:
    """[B, T, ...] -> [I, B, t, ...]; the last block is padded with zeros."""
    missing = -x_BT.shape[1] % block
    x_BT = jnp.pad(x_BT, [(0, 0), (0, missing)] + [(0, 0)] * (x_BT.ndim - 2))
    x_BIt = x_BT.reshape(x_BT.shape[0], -1, block, *x_BT.shape[2:])
    return jnp.moveaxis(x_BIt, 1, 0)
