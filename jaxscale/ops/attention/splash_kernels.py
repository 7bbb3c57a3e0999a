"""Flash attention kernels in Pallas for TPUs; each step of a grid computes one visit.

A visit is a block of queries and a block of keys that it sees. Scores are transposed, [s, t]: the
numbers of a query (maximum, sum, log-sum-exp) are then a row, which a TPU's vector unit reduces and
broadcasts without moving values between lanes. Of the matmuls' operands only values (forward) and
keys (queries' gradient) are transposed first.

Scores, softmax and sums are in the type of `log_z`, float32 or wider.

Shapes: as in `splash.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxscale.ops.attention.blocks import HIDDEN, Scoring, in_reach
from jaxscale.ops.sizes import LANES

FIRST, LAST, MASKED, OPEN = 1, 2, 4, 8
"""Flags of a visit: the first and last of its result's block; some keys are hidden, or none. A
visit with neither of the latter computes nothing."""

NN, NT = ((1,), (0,)), ((1,), (1,))
"""The contracted dimensions of a matmul, and of one with the second operand transposed."""

SUBLANES = 8
"""Rows of a TPU's vector register."""

COLUMN_BITS, ROW_BITS = 4, 17
"""The first bits of the numbers of a visit's blocks: the other's, and the result's."""


class SplashSettings(NamedTuple):
    """Compile-time settings."""

    scoring: Scoring
    block: int
    interpret: bool = False  # on a CPU, slowly


class SplashArrays(NamedTuple):
    """A kernel's inputs: whole arrays outside of it, references to a visit's blocks inside."""

    visits: Any  # [B, visits], int32 as in `COLUMN_BITS`
    query_blocks: Any  # [I], positions in the whole sequence, in blocks
    key_blocks: Any  # [J]
    sinks: Any = None  # [N]
    q: Any = None  # FLOPs are counted from the order of the next two
    k: Any = None
    v: Any = None
    segments_t: Any = None
    segments_s: Any = None
    biases: Any = None  # of a distance of blocks: that of query i and key j is at (i - j) % L
    grad: Any = None  # of the output
    log_z: Any = None  # of all keys; in the forward pass of others
    inner: Any = None
    out: Any = None  # for other keys
    grad_q: Any = None  # from other keys


def splash_forward(settings: SplashSettings, given: SplashArrays, *refs) -> None:
    """The output of a block of queries of one head, and its log(sum(exp(score)))."""
    out_ref, log_z_ref, sum_ref, high_ref, total_ref = refs
    visit, wide = _visit(given), log_z_ref.dtype
    # A sink acts as a key with value zero, before the others: high = sink and total = 1.
    has_sink = given.sinks is not None
    high = given.sinks[pl.program_id(1)] if has_sink else HIDDEN

    @pl.when(visit & FIRST != 0)
    def _() -> None:
        if given.out is not None:  # acts as a key, too
            high_ref[...] = given.log_z[...]
            total_ref[...] = jnp.ones(total_ref.shape, wide)
            sum_ref[...] = given.out[...].T
            return
        high_ref[...] = jnp.full(high_ref.shape, high, wide)
        total_ref[...] = jnp.full(total_ref.shape, float(has_sink), wide)
        sum_ref[...] = jnp.zeros(sum_ref.shape, wide)

    def attend(masked: bool) -> None:
        scores_st, _ = _scores(settings, given, wide)
        if masked:
            scores_st = jnp.where(_mask(settings, given, visit), scores_st, HIDDEN)
        high_1t = high_ref[...]
        new_high_1t = jnp.maximum(high_1t, jnp.max(scores_st, axis=0, keepdims=True))
        shrink_1t = jnp.exp(high_1t - new_high_1t)
        p_st = jnp.exp(scores_st - new_high_1t)
        high_ref[...] = new_high_1t
        total_ref[...] = total_ref[...] * shrink_1t + jnp.sum(p_st, axis=0, keepdims=True)
        more_Vt = _dot(given.v[...].T, p_st.astype(given.v.dtype), wide)
        sum_ref[...] = sum_ref[...] * shrink_1t + more_Vt

    _on_visit(visit, attend)

    @pl.when(visit & LAST != 0)
    def _() -> None:
        high_1t, total_1t = high_ref[...], total_ref[...]
        # Rows without a visible key: -1e30 stands for -inf, with which exp(score - high) is nan.
        seen_1t = high_1t > HIDDEN / 2
        total_1t = jnp.where(seen_1t, total_1t, 1)
        out_Vt = jnp.where(seen_1t, sum_ref[...] / total_1t, 0)
        out_ref[...] = out_Vt.T.astype(out_ref.dtype)
        log_z_ref[...] = jnp.where(seen_1t, high_1t + jnp.log(total_1t), HIDDEN)


def splash_query_gradients(settings: SplashSettings, given: SplashArrays, *refs) -> None:
    """The gradient of a block of queries of one head; with biases those of a head's lines, too."""
    grad_q_ref, *lines_ref, sum_ref = refs
    visit = _visit(given)

    @pl.when(visit & FIRST != 0)
    def _() -> None:
        none_Ht = jnp.zeros(sum_ref.shape, sum_ref.dtype)
        sum_ref[...] = none_Ht if given.grad_q is None else given.grad_q[...].T

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        for lines in lines_ref:
            lines[...] = jnp.zeros(lines.shape, lines.dtype)

    def attend(masked: bool) -> None:
        _, grad_st, grad_bias_st = _score_gradients(settings, given, visit, masked)
        k_sH = given.k[...]
        sum_ref[...] += _dot(k_sH.T, grad_st.astype(k_sH.dtype), sum_ref.dtype)
        for lines in lines_ref:
            line = window(settings, given.query_blocks, given.key_blocks, *blocks_of(visit))
            lines[pl.ds(line, 1), :] += _sum_diagonals(grad_bias_st, lines.shape[1])

    _on_visit(visit, attend)

    @pl.when(visit & LAST != 0)
    def _() -> None:
        grad_q_ref[...] = sum_ref[...].T.astype(grad_q_ref.dtype)


def splash_key_gradients(settings: SplashSettings, given: SplashArrays, *refs) -> None:
    """The gradients of a block of keys of one head, and of their values, from the queries of all
    heads of the group: one head for each step of the grid's last dimension."""
    grad_k_ref, grad_v_ref, sum_k_ref, sum_v_ref = refs
    visit, g = _visit(given), pl.program_id(3)

    @pl.when((visit & FIRST != 0) & (g == 0))
    def _() -> None:
        for ref in (sum_k_ref, sum_v_ref):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    def attend(masked: bool) -> None:
        p_st, grad_st, _ = _score_gradients(settings, given, visit, masked, by_keys=True)
        q_tH, grad_tV = given.q[...], given.grad[...]
        sum_v_ref[...] += _dot(p_st.astype(grad_tV.dtype), grad_tV, sum_v_ref.dtype)
        sum_k_ref[...] += _dot(grad_st.astype(q_tH.dtype), q_tH, sum_k_ref.dtype)

    _on_visit(visit, attend)

    @pl.when((visit & LAST != 0) & (g == pl.num_programs(3) - 1))
    def _() -> None:
        grad_k_ref[...] = sum_k_ref[...].astype(grad_k_ref.dtype)
        grad_v_ref[...] = sum_v_ref[...].astype(grad_v_ref.dtype)


def windows(settings: SplashSettings) -> int:
    """The distance of blocks from which on all keys of a block are at `max_distance` or further."""
    return -(-(settings.scoring.max_distance + settings.block - 1) // settings.block)


def line_width(settings: SplashSettings) -> int:
    """L, at least the lanes of a register."""
    return max(2 * settings.block, LANES)


def window(
    settings: SplashSettings, query_blocks: Any, key_blocks: Any, i: Array, j: Array
) -> Array:
    """The line of biases of a block of queries and one of keys, of 2 `windows` + 1."""
    most = windows(settings)
    return jnp.clip(query_blocks[i] - key_blocks[j], -most, most) + most


def blocks_of(visit: Array) -> tuple[Array, Array]:
    """The numbers of the result's block, and of the other one."""
    return visit >> ROW_BITS, (visit >> COLUMN_BITS) & (2 ** (ROW_BITS - COLUMN_BITS) - 1)


def _visit(given: SplashArrays) -> Array:
    return given.visits[pl.program_id(0), pl.program_id(2)]


def _on_visit(visit: Array, attend: Any) -> None:
    """Most blocks below the diagonal are open, and save the mask's operations."""
    pl.when(visit & MASKED != 0)(lambda: attend(True))
    pl.when(visit & OPEN != 0)(lambda: attend(False))


def _scores(settings: SplashSettings, given: SplashArrays, wide: Any) -> tuple[Array, Array | None]:
    """Scores [s, t], and the tanh that caps them."""
    scoring, tanh_st = settings.scoring, None
    scores_st = _dot(given.k[...], given.q[...], wide, NT)
    if scoring.scale != 1:
        scores_st = scores_st * scoring.scale
    if scoring.soft_cap:
        tanh_st = jnp.tanh(scores_st / scoring.soft_cap)
        scores_st = scoring.soft_cap * tanh_st
    if given.biases is not None:
        scores_st += _spread_line(given.biases[...], *scores_st.shape)
    return scores_st, tanh_st


def _score_gradients(
    settings: SplashSettings, given: SplashArrays, visit: Array, masked: bool, by_keys: bool = False
) -> tuple[Array, Array, Array]:
    """The softmax, the gradient of the inner product of query and key, and that of the score."""
    scoring, wide = settings.scoring, given.log_z.dtype
    scores_st, tanh_st = _scores(settings, given, wide)
    p_st = jnp.exp(scores_st - given.log_z[...])
    if masked:
        # After the exponential: for a row without visible keys log_z is HIDDEN, and exp(score -
        # HIDDEN) is infinite.
        p_st = jnp.where(_mask(settings, given, visit, by_keys), p_st, 0)
    grad_p_st = _dot(given.v[...], given.grad[...], wide, NT)
    grad_score_st = p_st * (grad_p_st - given.inner[...])
    grad_st = grad_score_st if tanh_st is None else grad_score_st * (1 - tanh_st * tanh_st)
    return p_st, grad_st if scoring.scale == 1 else grad_st * scoring.scale, grad_score_st


def _mask(
    settings: SplashSettings, given: SplashArrays, visit: Array, by_keys: bool = False
) -> Array:
    """The visibility mask of a block of keys and a block of queries, [s, t]."""
    i, j = blocks_of(visit)[::-1] if by_keys else blocks_of(visit)
    shape = (settings.block, settings.block)
    index_s, index_t = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    distance = (given.query_blocks[i] - given.key_blocks[j]) * settings.block
    scoring = settings.scoring
    mask_st = given.segments_t[...] == given.segments_s[...].T
    seen_st = in_reach(distance + index_t - index_s, scoring.window, scoring.causal)
    return mask_st if seen_st is None else mask_st & seen_st


def _spread_line(line_1L: Array, s: int, t: int) -> Array:
    """A line of biases expanded to a block, [s, t]: row j is the line moved by j to the right."""
    rows_sL = jnp.broadcast_to(line_1L, (s, line_1L.shape[1]))
    return pltpu.roll(rows_sL, 0, 1, stride=1, stride_axis=0)[:, :t]


def _sum_diagonals(block_st: Array, width: int) -> Array:
    """Sums a block along its diagonals, [1, L]: the transpose of `_spread_line`."""
    s, t = block_st.shape
    rows = jnp.concatenate((block_st, jnp.zeros((s, width - t), block_st.dtype)), axis=1)
    # Row j moves j to the left, part by part. The rotation by rows of Mosaic (jax 0.12) is to the
    # right only. Below a register's 8 rows the parts are rotated onto each other, not cut out.
    while len(rows) > SUBLANES:
        parts = 2 if len(rows) % (2 * SUBLANES) == 0 else len(rows) // SUBLANES
        first, *others = jnp.split(rows, parts)
        for number, other in enumerate(others, start=1):
            first += pltpu.roll(other, width - number * len(first), 1)
        rows = first
    step = len(rows) // 2
    while step:
        rows += pltpu.roll(pltpu.roll(rows, width - step, 1), len(rows) - step, 0)
        step //= 2
    return rows[:1]


def _dot(x: Array, y: Array, wide: Any, contracted: tuple = NN) -> Array:
    return jax.lax.dot_general(x, y, (contracted, ((), ())), preferred_element_type=wide)
