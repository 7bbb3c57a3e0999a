"""Routers, token by token, against what their papers say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops.experts.routing import (
    Router,
    balanced_scores,
    choice_counts,
    choose_experts,
    chosen_by_experts,
    expert_gates,
    load_balance,
    router_logits,
    router_scores,
    router_z,
)

B, T, E = 2, 16, 8
LOGITS = np.random.default_rng(0).normal(size=(B, T, E)) * 2


def routed(router, bias=None):
    scores = router_scores(LOGITS, router)
    ranked = LOGITS if router.scores == "softmax_of_chosen" else scores
    experts = choose_experts(ranked, router, bias)
    return scores, np.asarray(experts), np.asarray(expert_gates(LOGITS, scores, experts, router))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.proof
def test_top_k_takes_the_best_experts_and_weighs_them_by_their_scores():
    order = np.argsort(-LOGITS, axis=-1, kind="stable")[..., :3]
    p = np.take_along_axis(softmax(LOGITS), order, -1)
    for router, gates in (
        (Router(3), p),
        (Router(3, normalized=True, scale=2.5), 2.5 * p / p.sum(-1, keepdims=True)),
        (Router(3, "softmax_of_chosen"), p / p.sum(-1, keepdims=True)),
    ):
        _, experts, got = routed(router)
        np.testing.assert_array_equal(experts, order)
        np.testing.assert_allclose(got, gates, rtol=1e-12)


def test_of_equal_scores_the_first_expert_wins():
    tied = jnp.zeros((1, 1, E))
    assert choose_experts(tied, Router(3)).tolist() == [[[0, 1, 2]]]


def test_a_bias_changes_the_choice_and_not_the_weights():
    sigmoid, bias = 1 / (1 + np.exp(-LOGITS)), np.zeros(E)
    bias[5] = 10
    _, experts, gates = routed(Router(2, "sigmoid"), bias)
    assert (experts[..., 0] == 5).all()
    np.testing.assert_allclose(gates, np.take_along_axis(sigmoid, experts, -1), rtol=1e-12)


def test_a_tokens_experts_are_of_its_best_groups():
    """DeepSeek-V3: four groups of two, two of them kept, by the sum of their two best."""
    _, experts, _ = routed(Router(2, "sigmoid", groups=4, groups_kept=2))
    sigmoid = 1 / (1 + np.exp(-LOGITS))
    for token, scores in zip(experts.reshape(-1, 2), sigmoid.reshape(-1, E)):
        groups = np.argsort(-scores.reshape(4, 2).sum(1), kind="stable")[:2]
        allowed = np.where(np.isin(np.arange(E) // 2, groups), scores, -1)
        assert set(token) == set(np.argsort(-allowed, kind="stable")[:2])


@pytest.mark.proof
def test_one_prototype_is_the_switch_router_to_the_bit():
    """And Z prototypes have an expert of each, with a softmax of each (arXiv 2105.15082)."""
    one, switch = routed(Router(1, kind="prototypes")), routed(Router(1))
    for got, wanted in zip(one, switch):
        np.testing.assert_array_equal(got, wanted)
    scores, experts, gates = routed(Router(4, kind="prototypes"))
    np.testing.assert_array_equal(experts // 2, np.broadcast_to(np.arange(4), experts.shape))
    parts = softmax(LOGITS.reshape(B, T, 4, 2))
    np.testing.assert_allclose(gates, parts.max(-1), rtol=1e-12)
    np.testing.assert_allclose(np.sum(scores, -1), 4)


@pytest.mark.proof
def test_the_z_loss_is_of_each_softmax():
    """Of all experts, or of each prototype's, of which it is the mean."""
    sums = np.log(np.exp(LOGITS).sum(-1))
    for router in (Router(2), Router(1, kind="prototypes")):
        np.testing.assert_allclose(router_z(LOGITS, router), sums**2, rtol=1e-12)
    parts = np.log(np.exp(LOGITS.reshape(B, T, 4, 2)).sum(-1))
    found = router_z(LOGITS, Router(4, kind="prototypes"))
    np.testing.assert_allclose(found, (parts**2).mean(-1), rtol=1e-12)


@pytest.mark.proof
def test_as_many_prototypes_as_experts_are_all_experts_with_weight_one():
    _, experts, gates = routed(Router(E, kind="prototypes"))
    np.testing.assert_array_equal(experts, np.broadcast_to(np.arange(E), experts.shape))
    np.testing.assert_array_equal(gates, 1)


@pytest.mark.proof
def test_each_expert_takes_its_best_tokens_and_no_padding():
    scores = LOGITS.copy()
    scores[0, 2:] = -np.inf  # of the first row, two tokens are there
    taken = np.asarray(chosen_by_experts(jnp.asarray(scores), 3))
    for row, expert in np.ndindex(B, E):
        best = np.argsort(-scores[row, :, expert], kind="stable")[: (2, 3)[row]]
        wanted = np.isin(np.arange(T), best)
        np.testing.assert_array_equal(taken[row, :, expert], np.where(wanted, expert, -1))


def test_balanced_experts_take_even_shares_and_leave_fewer_tokens_out():
    """Every expert T / E tokens of a sequence, here with one popular expert; no padding."""
    tokens, each = 64, 64 // E
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, tokens, E)) + 2 * rng.normal(size=(4, tokens, 1)) * np.ones(E)
    logits[..., 0] += 3
    scores = np.exp(logits)
    scores[0, -8:] = -np.inf
    plan = balanced_scores(jnp.asarray(scores))
    np.testing.assert_allclose(jax.nn.logsumexp(plan[1:], axis=2), 0, atol=1e-12)
    np.testing.assert_allclose(jnp.exp(plan[1:]).sum(1), each, rtol=0.05)
    taken, raw = (
        np.asarray(chosen_by_experts(one, each)) >= 0 for one in (plan, jnp.asarray(scores))
    )
    np.testing.assert_array_equal(taken.sum(1), each)
    assert not taken[0, -8:].any()
    assert (taken[1:].sum(2) == 0).mean() < 0.7 * (raw[1:].sum(2) == 0).mean()


@pytest.mark.proof
def test_balance_is_one_where_even_and_grows_to_the_number_of_experts():
    valid = np.ones((1, T), bool)
    even = np.arange(T).reshape(1, T, 1) % E
    scores = np.full((1, T, E), 1 / E)
    assert load_balance(scores, valid, choice_counts(jnp.asarray(even), E)) == pytest.approx(1)
    all_to_one = jnp.zeros((1, T, 1), jnp.int32)
    certain = np.eye(E)[np.zeros((1, T), int)]
    assert load_balance(certain, valid, choice_counts(all_to_one, E)) == pytest.approx(E)


@pytest.mark.proof
def test_scores_that_underflow_have_a_finite_balance():
    """Sigmoids of logits below -104 are zero in float32, and so is their sum."""
    scores = router_scores(jnp.full((1, T, E), -200, jnp.float32), Router(2, "sigmoid"))
    counts, valid = jnp.full((1, E), 2.0 * T / E), np.ones((1, T), bool)
    found, gradient = jax.value_and_grad(lambda x: load_balance(x, valid, counts)[0])(scores)
    assert found == 0
    assert np.isfinite(gradient).all()


@pytest.mark.proof
def test_padding_is_no_choice():
    experts = jnp.array([[[0, 1], [-1, -1], [1, 2]]])
    assert choice_counts(experts, 4).tolist() == [[1, 2, 1, 0]]
    valid, scores = np.array([[True, False, True]]), np.full((1, 3, 4), 0.25)
    scores[0, 1] = [1, 0, 0, 0]
    even = load_balance(scores, valid, choice_counts(experts, 4))
    assert even == pytest.approx(4 * 0.25)  # the padding's own score counts for nothing


@pytest.mark.proof
def test_a_token_without_an_expert_has_weights_and_gradients_of_zero():
    """In float32, where the square of a small number to divide by would be none."""
    logits, router = jnp.ones((1, 2, 4), jnp.float32), Router(2, "sigmoid", normalized=True)
    experts = jnp.array([[[0, 1], [-1, -1]]])

    def gates(logits):
        return expert_gates(logits, router_scores(logits, router), experts, router)

    with jax.debug_nans(True):
        found, pullback = jax.vjp(gates, logits)
        (gradient,) = pullback(jnp.array([[[1.0, 2.0], [0.0, 0.0]]], jnp.float32))
    np.testing.assert_array_equal(found[0, 1], 0)
    np.testing.assert_array_equal(gradient[0, 1], 0)
    assert np.abs(gradient[0, 0]).max() > 0


def test_routing_is_in_float32_whatever_the_stream_is():
    """In bfloat16 the router's weights would be 1."""
    x, w = jnp.ones((1, 1, 4096), jnp.bfloat16), jnp.full((4096, 2), 1 + 2.0**-10, jnp.float32)
    logits = router_logits(x, w)
    assert logits.dtype == jnp.float32
    assert logits.tolist() == [[[4100.0, 4100.0]]]
