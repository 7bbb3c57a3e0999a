"""Fits of scaling laws recover the laws that made their data, and refuse data without one."""

import math

import numpy as np
import pytest
from scipy import optimize

from jaxscale.studies.laws.chinchilla import (
    EPOCH,
    HOFFMANN,
    ScalingLaw,
    bootstrap_interval,
    fit_envelope,
    fit_isoflop,
    fit_parametric,
    make_points,
)


def synthetic(noise=0.0, seed=1, law=HOFFMANN):
    """63 runs: 9 budgets from 1e18 to 1e22 FLOPs, 7 sizes around the optimum of each."""
    flops = np.repeat(np.logspace(18, 22, 9), 7)
    params = law.optimal(flops).params * np.tile(10 ** np.linspace(-0.6, 0.6, 7), 9)
    tokens = flops / 6 / params
    error = noise * np.random.default_rng(seed).standard_normal(63)
    return make_points(params, tokens, law.loss(params, tokens) * np.exp(error))


@pytest.mark.parametrize(
    ("law", "flops", "params", "tokens", "ratio", "loss"),
    [
        (HOFFMANN, 1e21, 1.82e9, 9.14e10, 50.1, 2.329),
        (HOFFMANN, 5.76e23, 3.22e10, 2.98e12, 92.6, 1.931),
        (EPOCH, 1e21, 2.78e9, 6.00e10, 21.6, 2.306),
        (EPOCH, 5.76e23, 7.22e10, 1.33e12, 18.4, 1.974),
    ],
)
def test_the_optimum_is_that_of_a_search(law, flops, params, tokens, ratio, loss):
    best = law.optimal(flops)
    assert best.params == pytest.approx(params, rel=3e-3)
    assert best.tokens == pytest.approx(tokens, rel=3e-3)
    assert best.tokens / best.params == pytest.approx(ratio, rel=3e-3)
    assert abs(best.loss - loss) < 6e-4
    assert 6 * best.params * best.tokens == pytest.approx(flops, rel=1e-12)
    found = optimize.minimize_scalar(
        lambda log: law.loss(math.exp(log), flops / 6 / math.exp(log)),
        bracket=(math.log(best.params) - 1, math.log(best.params) + 1),
        tol=1e-10,
    )
    assert math.exp(found.x) == pytest.approx(best.params, rel=1e-4)


def test_a_fit_recovers_a_law_from_its_losses_to_four_digits():
    fit = fit_parametric(synthetic())
    np.testing.assert_allclose(fit.law, HOFFMANN, rtol=1e-5)
    assert not fit.degenerate


@pytest.mark.parametrize(("noise", "exponents", "coefficients"), [(2e-3, 3e-3, 0.06)])
def test_a_fit_recovers_a_law_from_noisy_losses(noise, exponents, coefficients):
    fit = fit_parametric(synthetic(noise))
    assert abs(fit.law.alpha - HOFFMANN.alpha) < exponents
    assert abs(fit.law.beta - HOFFMANN.beta) < exponents
    assert abs(fit.law.a / HOFFMANN.a - 1) < coefficients
    assert abs(fit.law.b / HOFFMANN.b - 1) < coefficients
    assert abs(fit.law.loss(7e10, 1.4e12) - HOFFMANN.loss(7e10, 1.4e12)) < 3e-3
    assert not fit.degenerate


@pytest.mark.parametrize("seed", [0, 1])
def test_one_percent_of_noise_moves_the_allocation_by_a_hundredth(seed):
    fit = fit_parametric(synthetic(0.01, seed))
    assert abs(fit.law.exponent - HOFFMANN.exponent) < 0.01


def test_parabolas_recover_the_exponent_and_its_interval_covers_it():
    exponent = HOFFMANN.beta / (HOFFMANN.alpha + HOFFMANN.beta)
    fit = fit_isoflop(synthetic())
    assert abs(fit.exponent - exponent) < 1e-4
    assert round(fit.exponent, 4) == 0.4516
    assert fit.optimal_params(1e20) == pytest.approx(HOFFMANN.optimal(1e20).params, rel=0.02)
    with pytest.raises(ValueError, match=r"1e\+24 FLOPs are more than a decade beyond the runs"):
        fit.optimal_params(1e24)
    low, high = bootstrap_interval(synthetic(2e-3), lambda some: fit_isoflop(some).exponent)
    assert low < exponent < high
    assert high - low < 0.05


def test_the_interval_of_a_parametric_fit_covers_its_exponent():
    points = synthetic(2e-3)
    low, high = bootstrap_interval(
        points, lambda some: fit_parametric(some, starts=[HOFFMANN]).law.exponent, draws=40
    )
    assert low < HOFFMANN.exponent < high
    assert high - low < 0.03


def test_the_envelope_of_fixed_sizes_has_about_the_exponent():
    sizes, flops = np.meshgrid(np.logspace(8, 10.5, 12), np.logspace(19, 22, 7))
    sizes, tokens = sizes.ravel(), (flops / 6 / sizes).ravel()
    points = make_points(sizes, tokens, HOFFMANN.loss(sizes, tokens))
    fit = fit_envelope(points)
    assert abs(fit.exponent - HOFFMANN.exponent) < 0.02
    assert {*fit.params} <= {*sizes}
    assert min(sizes) < min(fit.params) < max(fit.params) < max(sizes)


@pytest.mark.proof
def test_data_that_determine_no_law_are_refused():
    points = synthetic()
    one = np.full(9, 1e9)
    with pytest.raises(ValueError, match=r"the 9 runs have 1 model size, and a law .* train other"):
        make_points(one, np.logspace(9, 11, 9), np.linspace(3, 2, 9))
    with pytest.raises(ValueError, match="loss of runs must be finite and above 0"):
        make_points([1, 2, 3], [1, 2, 3], [1, 2, float("nan")])
    with pytest.raises(ValueError, match="1 budgets have their optimum between"):
        fit_isoflop(points.part(np.arange(7)))
    with pytest.raises(ValueError, match="FLOPs has 2 model sizes, and a parabola needs 3"):
        fit_isoflop(points.part(np.r_[0:9, 14:21]))
    with pytest.raises(ValueError, match="5 runs with 5 numbers of tokens do not determine"):
        fit_parametric(points.part(np.arange(5)))
    with pytest.raises(ValueError, match="the envelope has 0 sizes between"):
        fit_envelope(points)  # no size has two budgets
    with pytest.raises(ValueError, match="of 10 draws of the runs do not determine the fit"):
        bootstrap_interval(points.part(np.r_[0:3, 7:10]), fit_isoflop, draws=10)


def test_a_fit_that_the_data_do_not_determine_is_degenerate():
    """Without an irreducible loss its bound is met; with one ratio of tokens to parameters both
    terms are the same function."""
    without = fit_parametric(synthetic(law=ScalingLaw(1e-9, 20.0, 30.0, 0.05, 0.06)))
    assert any("irreducible loss is at its bound" in one for one in without.degenerate)
    params = np.logspace(8, 10, 12)
    noise = 2e-3 * np.random.default_rng(0).standard_normal(12)
    losses = ScalingLaw(1.0, 406.4, 30.0, 0.5, 0.15).loss(params, 20 * params) * np.exp(noise)
    of_ratio = fit_parametric(make_points(params, 20 * params, losses))
    assert any("solutions within 2 % of the objective" in one for one in of_ratio.degenerate)
