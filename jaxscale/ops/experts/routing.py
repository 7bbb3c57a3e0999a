"""Which experts a token goes to, and with which weights.

Everything here is in float32 or wider, token by token, so that the choice does not depend on the
layout; of equal scores the expert of the smaller number wins. Letters: B batch, T time, K choices
of a token, E experts.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class Router:
    """How a token's experts are chosen.

    Scores are made of logits by a softmax over all experts, before the choice; by a sigmoid for
    each expert; or by a softmax over a token's chosen experts, after the choice.

    With "prototypes" the experts are `choices` sets, of which each has a softmax of its own and
    gives a token its best expert (k top-1 of M6-T, arXiv 2105.15082); one set is the Switch
    Transformer's router (arXiv 2101.03961). With "expert_choice" each expert takes the tokens of a
    sequence that score highest (arXiv 2202.09368), so that a token may have from no to all experts,
    `choices` in the mean. With `groups` a token's experts are of the `groups_kept` groups whose two
    best scores have the largest sums (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """

    choices: int
    scores: str = "softmax"  # or "sigmoid", or "softmax_of_chosen"
    kind: str = "top_k"  # or "prototypes", or "expert_choice"
    normalized: bool = False  # whether a token's weights are divided by their sum
    scale: float = 1.0  # that weights are multiplied by
    groups: int = 1
    groups_kept: int = 1

    @property
    def by_scores_alone(self) -> "Router":
        """Whose choices are a token's best scores, of whichever group."""
        return replace(self, groups=1, groups_kept=1)


def router_logits(x_BTD: Array, router_DE: Array) -> Array:
    """[B, T, E] in float32 or wider."""
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    # Otherwise a TPU multiplies float32 in bfloat16, and a GPU in a shorter type.
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("btd,de->bte", x_BTD.astype(wide), router_DE.astype(wide), precision=exact)


def router_scores(logits_BTE: Array, router: Router) -> Array:
    """Positive scores of the experts: what gates are, unless the softmax comes after the choice."""
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
      bias_E: added to the scores for the choice alone (balancing without an auxiliary loss, arXiv
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
    """[B, T, E] int32: its own number where an expert takes a token, -1 where it does not.

    Args:
      scores_BTE: of whole sequences; minus infinity for what no expert may take.
      capacity: tokens that each expert takes of a sequence.
    """
    places_BEC = jax.lax.top_k(scores_BTE.swapaxes(1, 2), capacity)[1]
    rows_B, experts_E = (jnp.arange(size) for size in (scores_BTE.shape[0], scores_BTE.shape[2]))
    taken_BTE = jnp.zeros(scores_BTE.shape, bool)
    taken_BTE = taken_BTE.at[rows_B[:, None, None], places_BEC, experts_E[:, None]].set(True)
    taken_BTE &= scores_BTE > -jnp.inf
    return jnp.where(taken_BTE, experts_E, -1).astype(jnp.int32)


def _in_best_groups(scores_BTE: Array, router: Router) -> Array:
    """The scores, minus infinity outside a token's best groups."""
    parts = scores_BTE.reshape(*scores_BTE.shape[:-1], router.groups, -1)
    best = jnp.sum(jax.lax.top_k(parts, 2)[0], axis=-1)
    chosen = jax.lax.top_k(best, router.groups_kept)[1]
    kept = jnp.any(chosen[..., None] == jnp.arange(router.groups), axis=-2)
    return jnp.where(kept[..., None], parts, -jnp.inf).reshape(scores_BTE.shape)


def expert_gates(logits_BTE: Array, scores_BTE: Array, experts_BTK: Array, router: Router) -> Array:
    """What the outputs of a token's experts are multiplied by, [B, T, K]."""
    after = router.scores == "softmax_of_chosen"
    values_BTE = logits_BTE if after else scores_BTE
    # A sum over comparisons, not a gather: the partitioner may have the sequence spread.
    chosen = experts_BTK[..., None] == jnp.arange(values_BTE.shape[-1])
    gates_BTK = jnp.sum(jnp.where(chosen, values_BTE[..., None, :], 0), axis=-1)
    if after:
        gates_BTK = jax.nn.softmax(gates_BTK, axis=-1)
    if router.normalized:
        gates_BTK = _over_their_sum(gates_BTK)  # padding has no expert
    return gates_BTK * router.scale


def _over_their_sum(x: Array) -> Array:
    """The last axis over its sum; as it is where that is 0, as of sigmoids that underflow."""
    total = jnp.sum(x, axis=-1, keepdims=True)
    return x / jnp.where(total > 0, total, 1)


def choice_counts(experts_BTK: Array, num_experts: int) -> Array:
    """How many tokens of each row chose each expert, [B, E] float32; -1 means no choice."""
    chosen = experts_BTK[..., None] == jnp.arange(num_experts)
    return jnp.sum(chosen, axis=(1, 2), dtype=jnp.float32)


def load_balance(scores_BTE: Array, valid_BT: Array, counts_BE: Array) -> Array:
    """How unevenly each row's tokens are spread over the experts, [B]: 1 where it is even.

    The sum over experts of the share of choices times the mean score, times the number of experts;
    scores are those of a token over their sum (Switch Transformer, equation 4; by sequence as in
    DeepSeek-V3, equations 17 to 20).

    Args:
      valid_BT: whether a token counts.
      counts_BE: `choice_counts` of these rows, or [1, E] of all that are to be balanced together;
        of choices by scores alone, without biases and groups (DeepSeek-V3, equation 18).
    """
    p_BTE = _over_their_sum(scores_BTE)
    tokens_B1 = jnp.maximum(jnp.sum(valid_BT, axis=1, keepdims=True), 1)
    p_BE = jnp.sum(jnp.where(valid_BT[..., None], p_BTE, 0), axis=1) / tokens_B1
    total_B1 = jnp.maximum(jnp.sum(counts_BE, axis=-1, keepdims=True), 1)
    return scores_BTE.shape[-1] * jnp.sum(p_BE * counts_BE / total_B1, axis=-1)


def router_z(logits_BTE: Array, router: Router) -> Array:
    """The squared logarithm of the softmax's sum, [B, T] (ST-MoE, arXiv 2202.08906, equation 5); of
    prototypes the mean over their softmaxes."""
    if router.kind == "prototypes":
        sums_BTK = jax.nn.logsumexp(_by_prototype(logits_BTE, router), axis=-1)
        return jnp.mean(jnp.square(sums_BTK), axis=-1)
    return jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
