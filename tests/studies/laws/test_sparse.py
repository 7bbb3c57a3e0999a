"""The laws of sparse training give the tables that follow from them."""

import math

import numpy as np
import pytest

from jaxscale.studies.laws.sparse import SPARSE_LAWS, fit_sparse

T5, VIT = SPARSE_LAWS.values()
STEP = 128 * 512
"""Tokens of a step of the paper."""


def grid():
    """S, N, D of the paper's 48 runs of T5."""
    sizes, steps = (1.3e6, 5.3e6, 2.1e7, 8.5e7), (2.5e5, 5e5, 1e6)
    some = np.meshgrid((0, 0.5, 0.75, 0.875), sizes, np.multiply(steps, STEP))
    return [one.ravel() for one in some]


@pytest.mark.parametrize(
    ("law", "gains"), [(T5, (1.59, 2.16, 2.63, 2.99)), (VIT, (1.60, 2.17, 2.63, 2.96))]
)
def test_a_sparse_model_is_as_good_as_a_larger_dense_one(law, gains):
    found = law.gain(np.array([0.5, 0.75, 0.875, 0.9375]))
    np.testing.assert_allclose(found, gains, atol=0.006)
    dense = law.loss(0, found * 1e8, 1e10)
    np.testing.assert_allclose(dense, law.loss(np.array([0.5, 0.75, 0.875, 0.9375]), 1e8, 1e10))


def test_a_larger_model_of_the_paper_is_predicted():
    """75 % sparse, 604 million weights, 500,000 steps of 128 x 512 tokens; measured: 1.4828."""
    assert abs(T5.loss(0.75, 6.04e8, 5e5 * STEP) - 1.468) < 1e-3  # of unrounded constants


@pytest.mark.parametrize(
    ("law", "gradual", "best"),
    [
        (T5, False, (0, 0, 0.06, 0.19, 0.31, 0.40, 0.49)),
        (VIT, False, (0, 0.21, 0.45, 0.62, 0.73, 0.81, 0.87)),
        (T5, True, (0.43, 0.48, 0.54, 0.59, 0.63, 0.67, 0.71)),
        (VIT, True, (0.35, 0.54, 0.68, 0.77, 0.84, 0.89, 0.92)),
    ],
)
def test_the_best_sparsity_rises_with_flops(law, gradual, best):
    for power, expected in enumerate(best):
        flops = 2**power * law.dense_flops(1e8)
        found = law.best_sparsity(1e8, flops, gradual=gradual)
        assert abs(found - expected) < 0.0065
        if not gradual:
            share = law.b_n * (law.a_s + law.c_s) / (law.a_s * law.b_s) / 2 ** (power * law.b_d)
            closed = 1 - share ** (1 / (law.b_d + law.b_s))
            assert math.isclose(found, max(0, closed), abs_tol=1e-4)


@pytest.mark.proof
@pytest.mark.parametrize(("noise", "gain_error"), [(0.0, 1e-3), (0.002, 0.05)])
def test_a_fit_recovers_losses_and_gains(noise, gain_error):
    """Constants are not unique, so that the objective and what follows are compared."""
    some = grid()
    error = noise * np.random.default_rng(0).standard_normal(48)
    losses = T5.loss(*some) * np.exp(error)
    law, objective = fit_sparse(*some, losses)
    sizes = np.abs(error) / 1e-3
    truth = np.where(sizes < 1, sizes**2 / 2, sizes - 0.5).mean()
    assert objective <= truth + 1e-6
    larger = (0.75, 6.04e8, 5e5 * STEP)
    assert abs(law.loss(*larger) / T5.loss(*larger) - 1) < 0.01
    sparsities = np.array([0.5, 0.75, 0.875])
    np.testing.assert_allclose(law.gain(sparsities), T5.gain(sparsities), atol=gain_error)


def test_runs_that_determine_no_law_are_refused():
    some = grid()
    losses = T5.loss(*some)
    dense = some[0] == 0
    with pytest.raises(ValueError, match=r"1 sparsities do not determine a law .* needs 3; train"):
        fit_sparse(*(one[dense] for one in some), losses[dense])
    few = slice(0, None, 7)
    with pytest.raises(ValueError, match="7 runs do not determine a law"):
        fit_sparse(*(one[few] for one in some), losses[few])
