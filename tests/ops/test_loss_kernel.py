"""The kernel that reduces logits, interpreted: against XLA's reduction in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops.loss import _reduced_at_once
from jaxscale.ops.loss_kernel import LogitBlock, log_z_and_target

kernel = functools.partial(log_z_and_target, block=LogitBlock(64, 4), interpret=True)


@pytest.mark.proof
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize(
    ("columns", "end"), [(256, 256), (300, 300), (300, 217), (300, 128), (9, 9)]
)
def test_it_is_the_reduction_in_blocks_and_after_the_last_whole_one(columns, end, soft_cap):
    """Of float32 logits; a target may be before these columns, among them, or beyond."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(5 * rng.normal(size=(6, columns)), jnp.float32)
    targets = jnp.array([0, end - 1, end // 2, -1, columns, end], jnp.int32)
    run = jax.jit(functools.partial(kernel, soft_cap=soft_cap))
    log_z, target = run(logits, targets, end)
    assert log_z.dtype == target.dtype == jnp.float32
    wide = logits.astype(jnp.float64)
    wide = soft_cap * jnp.tanh(wide / soft_cap) if soft_cap else wide
    is_real = jnp.arange(columns) < end
    is_target = is_real & (jnp.arange(columns) == targets[:, None])
    expected, expected_target = _reduced_at_once(wide, is_target, is_real)
    np.testing.assert_allclose(log_z, expected, rtol=3e-7)
    np.testing.assert_allclose(target, expected_target, rtol=3e-7)
    assert not np.any(target[3:])


@pytest.mark.proof
def test_extremes_are_those_of_logsumexp():
    """In whole blocks and after them, with neighbours that are far apart, masked, or the most that
    float32 has."""
    rng = np.random.default_rng(1)
    rows = {
        "far apart": rng.choice([-1e4, 1e4, 0.0], 150),
        "far below": np.full(150, -1e4),
        "one seen": np.where(np.arange(150) == 70, 2.5, -np.inf),
        "one seen after the blocks": np.where(np.arange(150) == 149, 2.5, -np.inf),
        "some seen": np.where(rng.random(150) < 0.5, rng.normal(size=150), -np.inf),
        "most and least": np.where(np.arange(150) % 2, 3e38, -3e38),
        "none seen": np.full(150, -np.inf),
        "nan": np.where(np.arange(150) == 70, np.nan, 1.0),
    }
    logits = jnp.asarray(np.stack(list(rows.values())), jnp.float32)
    log_z, target = kernel(logits, jnp.full(len(rows), 70, jnp.int32), 150)
    expected = jax.nn.logsumexp(logits.astype(jnp.float64), axis=1)
    np.testing.assert_allclose(log_z, expected, rtol=3e-7)
    np.testing.assert_array_equal(target, logits[:, 70])


def test_of_nothing_but_padding_the_sum_is_zero():
    log_z, target = kernel(jnp.ones((3, 100), jnp.float32), jnp.zeros(3, jnp.int32), 0)
    np.testing.assert_array_equal(log_z, -np.inf)
    np.testing.assert_array_equal(target, 0)
