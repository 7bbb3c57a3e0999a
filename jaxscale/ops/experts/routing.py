"""MoE routers: expert choice, gates and auxiliary losses.

Everything here is in float32 or wider and per token, so that the choice does not depend on the
layout; among equal scores the expert with the smaller number wins. Letters: B batch, T time, K
choices of a token, E experts.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

SINKHORN = 8
"""Iterations of `balanced_scores`."""


@dataclass(frozen=True)
class Router:
    """Router settings.

    Scores are a softmax of the logits over all experts, a sigmoid of each, or, after the choice, a
    softmax over a token's chosen experts.

    With "prototypes" the experts are `choices` sets with separate softmaxes, and a token uses the
    best expert of each (k top-1 of M6-T, arXiv 2105.15082); one set is the Switch Transformer's
    router (arXiv 2101.03961). With "expert_choice" each expert chooses the tokens of a sequence
    with the highest scores (arXiv 2202.09368), so a token has any number of experts, `choices` on
    average. With "balanced" the scores of a sequence are first balanced over its tokens and over
    the experts (`balanced_scores`). With `groups` a token's experts are limited to the
    `groups_kept` groups with the largest sum of their two best scores (DeepSeek-V3, arXiv
    2412.19437, section 2.1.2).
    """

    choices: int
    scores: str = "softmax"  # or "sigmoid", or "softmax_of_chosen"
    kind: str = "top_k"  # or "prototypes", "expert_choice" or "balanced"
    normalized: bool = False  # whether a token's gates are divided by their sum
    scale: float = 1.0  # factor of the gates
    groups: int = 1
    groups_kept: int = 1

    @property
    def by_scores_alone(self) -> "Router":
        """The router without groups: a token's best scores decide."""
        return replace(self, groups=1, groups_kept=1)


def router_logits(x_BTD: Array, router_DE: Array) -> Array:
    """[B, T, E] in float32 or wider."""
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    # By default a TPU multiplies float32 in bfloat16, and a GPU in TF32.
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("btd,de->bte", x_BTD.astype(wide), router_DE.astype(wide), precision=exact)


def router_scores(logits_BTE: Array, router: Router) -> Array:
    """Positive scores of the experts, from which gates are taken unless the softmax follows the
    choice."""
    if router.kind == "prototypes":
        return jax.nn.softmax(_by_prototype(logits_BTE, router), axis=-1).reshape(logits_BTE.shape)
    if router.scores == "sigmoid":
        return jax.nn.sigmoid(logits_BTE)
    return jax.nn.softmax(logits_BTE, axis=-1)


def _by_prototype(x_BTE: Array, router: Router) -> Array:
    """[B, T, K, experts of a set]."""
    return x_BTE.reshape(*x_BTE.shape[:-1], router.choices, -1)


def choose_experts(scores_BTE: Array, router: Router, bias_E: Array | None = None) -> Array:
    """The experts of each token, [B, T, K] int32.

    Args:
      scores_BTE: or logits.
      bias_E: added to the scores for the choice only (auxiliary-loss-free balancing, arXiv
        2408.15664).
    """
    if bias_E is not None:
        scores_BTE = scores_BTE + bias_E
    if router.kind == "prototypes":
        parts = _by_prototype(scores_BTE, router)
        first_K = jnp.arange(router.choices, dtype=jnp.int32) * parts.shape[-1]
        return jnp.argmax(parts, axis=-1).astype(jnp.int32) + first_K
    if router.groups > 1:
        scores_BTE = _in_best_groups(scores_BTE, router)
    return jax.lax.top_k(scores_BTE, router.choices)[1]


def chosen_by_experts(scores_BTE: Array, capacity: int) -> Array:
    """Expert-choice routing: [B, T, E] int32, the expert's number where it chose the token, else
    -1.

    Args:
      scores_BTE: of whole sequences; minus infinity excludes a token.
      capacity: tokens of a sequence that each expert chooses.
    """
    places_BEC = jax.lax.top_k(scores_BTE.swapaxes(1, 2), capacity)[1]
    rows_B, experts_E = (jnp.arange(size) for size in (scores_BTE.shape[0], scores_BTE.shape[2]))
    taken_BTE = jnp.zeros(scores_BTE.shape, bool)
    taken_BTE = taken_BTE.at[rows_B[:, None, None], places_BEC, experts_E[:, None]].set(True)
    taken_BTE &= scores_BTE > -jnp.inf
    return jnp.where(taken_BTE, experts_E, -1).astype(jnp.int32)


def balanced_scores(scores_BTE: Array) -> Array:
    """Logarithms of scores whose sums are equal over the experts for every token of a sequence, and
    nearly over its tokens for every expert: Sinkhorn's iterations (arXiv 1306.0895).

    In place of CPM-2's linear assignment on the host (arXiv 2106.10715), as `Router` with
    "balanced". `scores_BTE` as in `chosen_by_experts`.
    """
    is_token_BT1 = scores_BTE[..., :1] > -jnp.inf
    least = jnp.finfo(scores_BTE.dtype).tiny  # sigmoids may underflow
    logs_BTE = jnp.log(jnp.maximum(scores_BTE, least))

    def shares(logs_BTE: Array, axis: int) -> Array:
        logs_BTE = jnp.where(is_token_BT1, logs_BTE, -jnp.inf)
        total = jax.nn.logsumexp(logs_BTE, axis=axis, keepdims=True)
        return logs_BTE - jnp.where(jnp.isfinite(total), total, 0)

    for _ in range(SINKHORN):
        logs_BTE = shares(shares(logs_BTE, axis=1), axis=2)
    return logs_BTE


def _in_best_groups(scores_BTE: Array, router: Router) -> Array:
    """Sets scores outside a token's best groups to minus infinity."""
    parts = scores_BTE.reshape(*scores_BTE.shape[:-1], router.groups, -1)
    best = jnp.sum(jax.lax.top_k(parts, 2)[0], axis=-1)
    chosen = jax.lax.top_k(best, router.groups_kept)[1]
    kept = jnp.any(chosen[..., None] == jnp.arange(router.groups), axis=-2)
    return jnp.where(kept[..., None], parts, -jnp.inf).reshape(scores_BTE.shape)


def expert_gates(logits_BTE: Array, scores_BTE: Array, experts_BTK: Array, router: Router) -> Array:
    """The gates, factors of the outputs of a token's experts, [B, T, K]."""
    after = router.scores == "softmax_of_chosen"
    values_BTE = logits_BTE if after else scores_BTE
    # A sum over comparisons, not a gather: the partitioner may have sharded the sequence.
    chosen = experts_BTK[..., None] == jnp.arange(values_BTE.shape[-1])
    gates_BTK = jnp.sum(jnp.where(chosen, values_BTE[..., None, :], 0), axis=-1)
    if after:
        gates_BTK = jax.nn.softmax(gates_BTK, axis=-1)
    if router.normalized:
        gates_BTK = _over_their_sum(gates_BTK)  # padding has no expert
    return gates_BTK * router.scale


def _over_their_sum(x: Array) -> Array:
    """Divides by the sum over the last axis, unless it is 0 (underflowed sigmoids)."""
    total = jnp.sum(x, axis=-1, keepdims=True)
    return x / jnp.where(total > 0, total, 1)


def choice_counts(experts_BTK: Array, num_experts: int) -> Array:
    """Tokens per row and expert, [B, E] float32; -1 is no expert."""
    chosen = experts_BTK[..., None] == jnp.arange(num_experts)
    return jnp.sum(chosen, axis=(1, 2), dtype=jnp.float32)


def load_balance(scores_BTE: Array, valid_BT: Array, counts_BE: Array) -> Array:
    """Load-balance loss of each row, [B]; 1 if the experts' load is even.

    The sum over experts of the fraction of choices times the mean normalised score, times the
    number of experts (Switch Transformer, equation 4; by sequence as in DeepSeek-V3, equations 17
    to 20).

    Args:
      valid_BT: whether a token counts.
      counts_BE: `choice_counts` of these rows, or [1, E] for all rows balanced together; of choices
        by scores only, without biases and groups (DeepSeek-V3, equation 18).
    """
    p_BTE = _over_their_sum(scores_BTE)
    tokens_B1 = jnp.maximum(jnp.sum(valid_BT, axis=1, keepdims=True), 1)
    p_BE = jnp.sum(jnp.where(valid_BT[..., None], p_BTE, 0), axis=1) / tokens_B1
    total_B1 = jnp.maximum(jnp.sum(counts_BE, axis=-1, keepdims=True), 1)
    return scores_BTE.shape[-1] * jnp.sum(p_BE * counts_BE / total_B1, axis=-1)


def router_z(logits_BTE: Array, router: Router) -> Array:
    """Router z-loss, [B, T]: the squared logarithm of the softmax's sum (ST-MoE, arXiv 2202.08906,
    equation 5); with prototypes the mean over their softmaxes."""
    if router.kind == "prototypes":
        sums_BTK = jax.nn.logsumexp(_by_prototype(logits_BTE, router), axis=-1)
        return jnp.mean(jnp.square(sums_BTK), axis=-1)
    return jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
