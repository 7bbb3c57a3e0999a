"""Flash attention kernels in Pallas; each program computes one block of its result.

Scores, softmax and sums are in the type of `log_z`, float32 or wider. Triton's tiles have powers
of two: the features of other heads are loaded with zeros after them.

Shapes: as in `flash.py`; p buckets of a relative position bias, in order of positions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxscale.ops.attention.blocks import HIDDEN, Scoring, in_reach


class Settings(NamedTuple):
    """Compile-time settings."""

    scoring: Scoring
    block: int
    head_dim: int  # of queries and keys
    value_dim: int
    interpret: bool = False  # on a CPU, slowly
    of_pair: bool = False  # of two chunks of a sequence, mostly one before the other

    @property
    def whole(self) -> bool:
        """Whether queries see all keys rather than half; part of the kernels' names, from which
        FLOPs are counted."""
        return self.of_pair or not self.scoring.causal


class FlashArrays(NamedTuple):
    """A kernel's inputs: whole arrays outside of it, references to a program's parts inside."""

    ranges: Any  # [B, I, 2], the blocks visible to each block
    offset: Any  # [1], position of the first query minus that of the first key
    q: Any  # FLOPs are counted from the order of the next three
    k: Any
    v: Any
    segments_BT: Any
    segments_BS: Any
    sinks_N: Any = None
    biases_NL: Any = None  # of relative positions from -l to l, L = 2 l + 1
    buckets_L: Any = None  # the number p of their buckets
    grad: Any = None  # of the output
    log_z_BNT: Any = None
    inner_BNT: Any = None


def flash_forward(settings: Settings, given: FlashArrays, out_ref, log_z_ref) -> None:
    """The output of a block of queries of one head, and its log(sum(exp(score)))."""
    q_tH, segments_t = _features(given.q, settings.head_dim), given.segments_BT[...]
    block, scoring, wide = settings.block, settings.scoring, log_z_ref.dtype
    first = given.offset[0] + pl.program_id(0) * block

    def visit(j, carry):
        out_tV, high_t, total_t = carry
        keys, distance = pl.ds(j * block, block), first - j * block
        k_sH = _features(given.k.at[keys, :], settings.head_dim)
        v_sV = _features(given.v.at[keys, :], settings.value_dim)
        mask_ts = _mask(scoring, distance, segments_t, given.segments_BS[keys])
        scores_ts, _ = _scores(scoring, q_tH, k_sH, _biases(given, distance, block), wide)
        scores_ts = jnp.where(mask_ts, scores_ts, HIDDEN)
        new_high_t = jnp.maximum(high_t, jnp.max(scores_ts, axis=1))
        shrink_t = jnp.exp(high_t - new_high_t)
        p_ts = jnp.exp(scores_ts - new_high_t[:, None])
        # Rounded to the values' type, for 16-bit tensor cores; sums stay in `wide`.
        more_tV = _dot(p_ts.astype(v_sV.dtype), v_sV, wide)
        out_tV = out_tV * shrink_t[:, None] + more_tV
        return out_tV, new_high_t, total_t * shrink_t + jnp.sum(p_ts, axis=1)

    zeros_t = jnp.zeros(block, wide)
    has_sink = given.sinks_N is not None
    # A sink acts as a key with value zero, before the others: high = sink and total = 1.
    high_t = jnp.full(block, given.sinks_N[0] if has_sink else HIDDEN, wide)
    begin = jnp.zeros((block, given.v.shape[-1]), wide), high_t, zeros_t + has_sink
    out_tV, high_t, total_t = jax.lax.fori_loop(given.ranges[0], given.ranges[1], visit, begin)
    # Rows without a visible key: -1e30 stands for -inf, with which exp(score - high) would be nan.
    seen_t = high_t > HIDDEN / 2
    out_tV = jnp.where(seen_t, 1 / total_t, 0)[:, None] * out_tV
    _store(out_ref, out_tV, settings.value_dim)
    log_z_ref[...] = jnp.where(seen_t, high_t + jnp.log(total_t), HIDDEN)


def flash_query_gradients(settings: Settings, given: FlashArrays, out_ref, *sums_ref) -> None:
    """The gradient of a block of queries of one head; and sums by bucket of that of the biases."""
    q_tH, grad_tV = (
        _features(given.q, settings.head_dim),
        _features(given.grad, settings.value_dim),
    )
    segments_t, log_z_t, inner_t = (
        ref[...] for ref in (given.segments_BT, given.log_z_BNT, given.inner_BNT)
    )
    block, scoring, wide = settings.block, settings.scoring, log_z_t.dtype
    first = given.offset[0] + pl.program_id(0) * block

    def visit(j, carry):
        sum_tH, *sums_tp = carry
        keys, distance = pl.ds(j * block, block), first - j * block
        k_sH = _features(given.k.at[keys, :], settings.head_dim)
        v_sV = _features(given.v.at[keys, :], settings.value_dim)
        mask_ts = _mask(scoring, distance, segments_t, given.segments_BS[keys])
        biases_ts = _biases(given, distance, block)
        tiles = q_tH, k_sH, v_sV, grad_tV, log_z_t, inner_t, mask_ts, biases_ts
        _, grad_ts, grad_biases_ts = _score_gradients(scoring, *tiles)
        sum_tH += _dot(grad_ts.astype(k_sH.dtype), k_sH, wide)
        return sum_tH, *(_add_by_bucket(given, distance, grad_biases_ts, x) for x in sums_tp)

    shapes = q_tH.shape, *((block, ref.shape[-1]) for ref in sums_ref)
    zeros = tuple(jnp.zeros(shape, wide) for shape in shapes)
    sum_tH, *sums_tp = jax.lax.fori_loop(given.ranges[0], given.ranges[1], visit, zeros)
    _store(out_ref, sum_tH, settings.head_dim)
    for ref, sum_tp in zip(sums_ref, sums_tp):
        ref[...] = jnp.sum(sum_tp, axis=0)


def flash_key_gradients(settings: Settings, given: FlashArrays, out_k_ref, out_v_ref) -> None:
    """The gradients of a block of keys of one head, and of their values."""
    k_sH, v_sV = _features(given.k, settings.head_dim), _features(given.v, settings.value_dim)
    segments_s, wide = given.segments_BS[...], given.log_z_BNT.dtype
    block, scoring = settings.block, settings.scoring
    first = given.offset[0] - pl.program_id(0) * block

    def visit_head(g, sums):
        def visit(i, sums):
            sum_k_sH, sum_v_sV = sums
            rows, distance = pl.ds(i * block, block), first + i * block
            q_tH = _features(given.q.at[rows, g, :], settings.head_dim)
            grad_tV = _features(given.grad.at[rows, g, :], settings.value_dim)
            log_z_t, inner_t = given.log_z_BNT[g, rows], given.inner_BNT[g, rows]
            mask_ts = _mask(scoring, distance, given.segments_BT[rows], segments_s)
            biases_ts = _biases(given, distance, block, g)
            tiles = q_tH, k_sH, v_sV, grad_tV, log_z_t, inner_t, mask_ts, biases_ts
            p_ts, grad_ts, _ = _score_gradients(scoring, *tiles)
            sum_k_sH += _dot(grad_ts.astype(q_tH.dtype).T, q_tH, wide)
            sum_v_sV += _dot(p_ts.astype(grad_tV.dtype).T, grad_tV, wide)
            return sum_k_sH, sum_v_sV

        return jax.lax.fori_loop(given.ranges[0], given.ranges[1], visit, sums)

    zeros = jnp.zeros(k_sH.shape, wide), jnp.zeros(v_sV.shape, wide)
    sum_k_sH, sum_v_sV = jax.lax.fori_loop(0, given.q.shape[1], visit_head, zeros)
    _store(out_k_ref, sum_k_sH, settings.head_dim)
    _store(out_v_ref, sum_v_sV, settings.value_dim)


def _features(ref: Any, size: int) -> Array:
    """A tile of features of heads; those after the first `size` are zero."""
    width = ref.shape[-1]
    if width == size:
        return triton.load(ref)
    # Without the mask a tile has features of the next head, or is beyond the array.
    return triton.load(ref, mask=jnp.arange(width)[None] < size, other=0)


def _store(ref: Any, tile_tH: Array, size: int) -> None:
    """Writes the first `size` features of a tile."""
    tile_tH = tile_tH.astype(ref.dtype)
    if ref.shape[-1] == size:
        ref[...] = tile_tH
    else:
        triton.store(ref, tile_tH, mask=jnp.arange(ref.shape[-1])[None] < size)


def _scores(
    scoring: Scoring, q_tH: Array, k_sH: Array, biases_ts: Array | None, wide: Any
) -> tuple[Array, Array | None]:
    """Scores [t, s], and the tanh that caps them."""
    scores_ts, tanh_ts = scoring.scale * _dot(q_tH, k_sH.T, wide), None
    if scoring.soft_cap:
        tanh_ts = jnp.tanh(scores_ts / scoring.soft_cap)
        scores_ts = scoring.soft_cap * tanh_ts
    return scores_ts if biases_ts is None else scores_ts + biases_ts, tanh_ts


def _score_gradients(
    scoring: Scoring, q_tH, k_sH, v_sV, grad_tV, log_z_t, inner_t, mask_ts, biases_ts
) -> tuple[Array, Array, Array]:
    """The softmax, the gradient of the inner product of query and key, and that of the score; all
    [t, s]."""
    wide = log_z_t.dtype
    scores_ts, tanh_ts = _scores(scoring, q_tH, k_sH, biases_ts, wide)
    # Masked after the exponential: for a row without visible keys log_z is HIDDEN, and exp(score -
    # HIDDEN) is infinite.
    p_ts = jnp.where(mask_ts, jnp.exp(scores_ts - log_z_t[:, None]), 0)
    grad_p_ts = _dot(grad_tV, v_sV.T, wide)
    grad_scores_ts = p_ts * (grad_p_ts - inner_t[:, None])
    grad_ts = scoring.scale * grad_scores_ts
    return p_ts, grad_ts if tanh_ts is None else grad_ts * (1 - tanh_ts * tanh_ts), grad_scores_ts


def _mask(scoring: Scoring, distance: Array, segments_t: Array, segments_s: Array) -> Array:
    """The visibility mask of a block of queries and a block of keys, [t, s].

    Args:
      distance: position of the first query minus that of the first key.
    """
    t, s = len(segments_t), len(segments_s)
    distance_ts = distance + jnp.arange(t)[:, None] - jnp.arange(s)[None, :]
    mask_ts = segments_t[:, None] == segments_s[None, :]
    seen_ts = in_reach(distance_ts, scoring.window, scoring.causal)
    return mask_ts if seen_ts is None else mask_ts & seen_ts


def _biases(given: FlashArrays, distance: Array, block: int, *head: Any) -> Array | None:
    """The position biases of a block of scores, [t, s]; None without biases.

    Args:
      head: its number, if `given` has the biases of several.
    """
    if given.biases_NL is None:
        return None
    return _by_distance(given.biases_NL, distance, block, *head)


def _by_distance(line_ref: Any, distance: Array, block: int, *head: Any) -> Array:
    """Spreads a line of numbers by relative position over a block of scores, [t, s]."""
    furthest = line_ref.shape[-1] // 2
    low, high = 1 - block - distance, block - 1 - distance

    def near() -> Array:
        i_t, i_s = jnp.arange(block)[:, None], jnp.arange(block)[None]
        # Neighbouring keys load neighbouring numbers of a line of a kilobyte, which is cached.
        return line_ref[*head, jnp.clip(i_s - i_t - distance, -furthest, furthest) + furthest]

    def far() -> Array:
        return jnp.full((block, block), line_ref[*head, jnp.where(high < 0, 0, 2 * furthest)])

    # Most blocks of a long sequence are far from their queries, with one bucket in each: they load
    # a single number.
    return jax.lax.cond((high <= -furthest) | (low >= furthest), far, near)


def _add_by_bucket(given: FlashArrays, distance: Array, grad_ts: Array, sums_tp: Array) -> Array:
    """Adds a block's gradients of biases to each query's sums by bucket."""
    block, furthest = len(grad_ts), given.buckets_L.shape[0] // 2
    buckets_ts = _by_distance(given.buckets_L, distance, block)

    def bucket_of(position: Array) -> Array:
        return given.buckets_L[jnp.clip(position, -furthest, furthest) + furthest]

    def add(p: Array, sums_tp: Array) -> Array:
        # Over keys alone: sums over queries, between warps, are left to the end of the kernel.
        sum_t = jnp.sum(jnp.where(buckets_ts == p, grad_ts, 0), axis=1)
        here = jnp.arange(sums_tp.shape[1])[None] == p
        return sums_tp + jnp.where(here, sum_t[:, None], 0)

    # The buckets of a block are consecutive: one, if it is far.
    first, last = bucket_of(1 - block - distance), bucket_of(block - 1 - distance)
    return jax.lax.fori_loop(first, last + 1, add, sums_tp)


def _dot(x: Array, y: Array, wide: Any) -> Array:
    return jnp.dot(x, y, preferred_element_type=wide)
