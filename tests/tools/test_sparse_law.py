"""The laws of sparse training give the tables that follow from them."""

import math

import numpy as np
import pytest

from tools.sparse_law import LAWS

T5, VIT = LAWS.values()


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
    assert abs(T5.loss(0.75, 6.04e8, 5e5 * 128 * 512) - 1.468) < 1e-3  # of unrounded constants


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
