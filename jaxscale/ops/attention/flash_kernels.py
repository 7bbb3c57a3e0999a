"""Flash attention kernels in Pallas; each program computes one block of its result.

Scores, softmax and sums are in the type of `log_z`, float32 or wider.

Shapes: as in `flash.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from jaxscale.ops.attention.blocks import HIDDEN, Scoring, in_reach


class Settings(NamedTuple):
    """Compile-time settings."""

    scoring: Scoring
    block: int
    interpret: bool = False  # on a CPU, slowly
    of_pair: bool = False  # of two chunks of a sequence, mostly one before the other

    @property
    def whole(self) -> bool:
        """Whether queries see all keys rather than half; part of the kernels' names, from which
        FLOPs are counted."""
        return self.of_pair or not self.scoring.causal


def flash_forward(settings: Settings, *refs) -> None:
    """The output of a block of queries of one head, and its log(sum(exp(score)))."""
    range_ref, offset_ref, q_ref, k_ref, v_ref, t_ref, s_ref, *sinks_ref, out_ref, log_z_ref = refs
    q_tH, segments_t, wide = q_ref[...], t_ref[...], log_z_ref.dtype
    block, scoring = settings.block, settings.scoring
    first = offset_ref[0] + pl.program_id(0) * block

    def visit(j, carry):
        out_tH, high_t, total_t = carry
        keys = pl.ds(j * block, block)
        mask_ts = _mask(scoring, first - j * block, segments_t, s_ref[keys])
        scores_ts = jnp.where(mask_ts, _scores(scoring, q_tH, k_ref[keys, :], wide)[0], HIDDEN)
        new_high_t = jnp.maximum(high_t, jnp.max(scores_ts, axis=1))
        shrink_t = jnp.exp(high_t - new_high_t)
        p_ts = jnp.exp(scores_ts - new_high_t[:, None])
        # Rounded to the values' type, for 16-bit tensor cores; sums stay in `wide`.
        more_tH = _dot(p_ts.astype(v_ref.dtype), v_ref[keys, :], wide)
        out_tH = out_tH * shrink_t[:, None] + more_tH
        return out_tH, new_high_t, total_t * shrink_t + jnp.sum(p_ts, axis=1)

    zeros_t = jnp.zeros(block, wide)
    # A sink acts as a key with value zero, before the others: high = sink and total = 1.
    high_t = jnp.full(block, sinks_ref[0][0] if sinks_ref else HIDDEN, wide)
    begin = jnp.zeros(q_tH.shape, wide), high_t, zeros_t + len(sinks_ref)
    out_tH, high_t, total_t = jax.lax.fori_loop(range_ref[0], range_ref[1], visit, begin)
    # Rows without a visible key: -1e30 stands for -inf, with which exp(score - high) would be nan.
    seen_t = high_t > HIDDEN / 2
    out_tH = jnp.where(seen_t, 1 / total_t, 0)[:, None] * out_tH
    out_ref[...] = out_tH.astype(out_ref.dtype)
    log_z_ref[...] = jnp.where(seen_t, high_t + jnp.log(total_t), HIDDEN)


def flash_query_gradients(settings: Settings, *refs) -> None:
    """The gradient of a block of queries of one head."""
    range_ref, offset_ref, q_ref, k_ref, v_ref, t_ref, s_ref, *others = refs
    grad_ref, log_z_ref, inner_ref, out_ref = others
    q_tH, grad_tH, segments_t = q_ref[...], grad_ref[...], t_ref[...]
    log_z_t, inner_t = log_z_ref[...], inner_ref[...]
    first = offset_ref[0] + pl.program_id(0) * settings.block

    def visit(j, sum_tH):
        keys = pl.ds(j * settings.block, settings.block)
        k_sH, v_sH = k_ref[keys, :], v_ref[keys, :]
        distance = first - j * settings.block
        mask_ts = _mask(settings.scoring, distance, segments_t, s_ref[keys])
        _, grad_ts = _score_gradients(
            settings.scoring, q_tH, k_sH, v_sH, grad_tH, log_z_t, inner_t, mask_ts
        )
        return sum_tH + _dot(grad_ts.astype(k_sH.dtype), k_sH, sum_tH.dtype)

    zeros_tH = jnp.zeros(q_tH.shape, log_z_t.dtype)
    sum_tH = jax.lax.fori_loop(range_ref[0], range_ref[1], visit, zeros_tH)
    out_ref[...] = sum_tH.astype(out_ref.dtype)


def flash_key_gradients(settings: Settings, *refs) -> None:
    """The gradients of a block of keys of one head, and of their values."""
    range_ref, offset_ref, q_ref, k_ref, v_ref, t_ref, s_ref, *others = refs
    grad_ref, log_z_ref, inner_ref, out_k_ref, out_v_ref = others
    k_sH, v_sH, segments_s, wide = k_ref[...], v_ref[...], s_ref[...], log_z_ref.dtype
    first = offset_ref[0] - pl.program_id(0) * settings.block

    def visit_head(g, sums):
        def visit(i, sums):
            sum_k_sH, sum_v_sH = sums
            rows = pl.ds(i * settings.block, settings.block)
            q_tH, grad_tH = q_ref[rows, g, :], grad_ref[rows, g, :]
            distance = first + i * settings.block
            mask_ts = _mask(settings.scoring, distance, t_ref[rows], segments_s)
            p_ts, grad_ts = _score_gradients(
                settings.scoring,
                q_tH,
                k_sH,
                v_sH,
                grad_tH,
                log_z_ref[g, rows],
                inner_ref[g, rows],
                mask_ts,
            )
            sum_k_sH += _dot(grad_ts.astype(q_tH.dtype).T, q_tH, wide)
            sum_v_sH += _dot(p_ts.astype(grad_tH.dtype).T, grad_tH, wide)
            return sum_k_sH, sum_v_sH

        return jax.lax.fori_loop(range_ref[0], range_ref[1], visit, sums)

    zeros_sH = jnp.zeros(k_sH.shape, wide)
    sums = jax.lax.fori_loop(0, q_ref.shape[1], visit_head, (zeros_sH, zeros_sH))
    out_k_ref[...], out_v_ref[...] = (sum_sH.astype(out_k_ref.dtype) for sum_sH in sums)


def _scores(scoring: Scoring, q_tH: Array, k_sH: Array, wide: Any) -> tuple[Array, Array | None]:
    """Scores [t, s], and the tanh that caps them."""
    scores_ts = scoring.scale * _dot(q_tH, k_sH.T, wide)
    if not scoring.soft_cap:
        return scores_ts, None
    tanh_ts = jnp.tanh(scores_ts / scoring.soft_cap)
    return scoring.soft_cap * tanh_ts, tanh_ts


def _score_gradients(
    scoring: Scoring, q_tH, k_sH, v_sH, grad_tH, log_z_t, inner_t, mask_ts
) -> tuple[Array, Array]:
    """The softmax, and the gradient of the inner product of query and key, both [t, s]."""
    wide = log_z_t.dtype
    scores_ts, tanh_ts = _scores(scoring, q_tH, k_sH, wide)
    # Masked after the exponential: for a row without visible keys log_z is HIDDEN, and exp(score -
    # HIDDEN) is infinite.
    p_ts = jnp.where(mask_ts, jnp.exp(scores_ts - log_z_t[:, None]), 0)
    grad_p_ts = _dot(grad_tH, v_sH.T, wide)
    grad_ts = scoring.scale * p_ts * (grad_p_ts - inner_t[:, None])
    return p_ts, grad_ts if tanh_ts is None else grad_ts * (1 - tanh_ts * tanh_ts)


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


def _dot(x: Array, y: Array, wide: Any) -> Array:
    return jnp.dot(x, y, preferred_element_type=wide)
