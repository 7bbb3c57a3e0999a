"""Robust fits of the logarithm of a sum of exponentials: the form of all scaling laws here.

With each term of a law as the exponential of a linear function of the fitted values, the logarithm
of the loss is a log-sum-exp of them. It is fitted by the Huber loss of residuals of the log loss
and L-BFGS from many starts, as in Chinchilla (arXiv 2203.15556, appendix D.3).

Shapes: T terms of the law, P points (runs), V fitted values, S starts.
"""

from typing import NamedTuple

import numpy as np
from scipy import optimize

CLOSE = 1.02
"""Solutions are as good as the best up to this factor of the objective."""
NOTHING = 1e-4
"""Objective of residuals of a hundredth of Huber's delta, which fit as well as smaller ones."""
EXACT = 1e-14
"""Objective that is not minimised further."""

POLISHED = 3
"""Solutions, the best ones, that are minimised to the precision of the numbers."""


class Minimum(NamedTuple):
    """The end of one minimisation."""

    values_V: np.ndarray
    objective: float  # mean Huber loss of the residuals over delta; 0.5 for residuals of delta


def fit_log_sum(
    terms_TPV: np.ndarray,
    log_loss_P: np.ndarray,
    starts_SV: np.ndarray,
    bounds: list[tuple[float, float]],
    *,
    delta: float,
    num_starts: int,
) -> list[Minimum]:
    """Minimises the Huber loss of log-sum-exp(terms @ values) - log_loss by L-BFGS-B.

    Args:
      terms_TPV: derivatives of each term's exponent by each value.
      starts_SV: candidates, of which those with the lowest objective are used.
      bounds: of each value.
      delta: residual from which the loss is linear instead of quadratic.
      num_starts: minimisations.

    Returns:
      The solutions, best first.
    """
    num_terms, num_points, num_values = terms_TPV.shape
    matrix = terms_TPV.reshape(num_terms * num_points, num_values)
    arguments = (matrix, log_loss_P, delta)
    lower, upper = np.array(bounds).T
    starts_SV = np.clip(starts_SV, lower, upper)
    order = np.argsort([_objective(x, *arguments)[0] for x in starts_SV], kind="stable")

    def descend(values_V: np.ndarray, iterations: int, tolerance: float) -> Minimum:
        end = optimize.minimize(
            _objective,
            values_V,
            arguments,
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": iterations, "ftol": tolerance, "gtol": 1e-12},
        )
        return Minimum(end.x, float(end.fun))

    found = [descend(starts_SV[index], 300, 1e-9) for index in order[:num_starts]]
    found.sort(key=lambda one: one.objective)
    for index, solution in enumerate(found[:POLISHED]):
        after = descend(solution.values_V, 3000, 1e-15)
        # A restart forgets curvature of earlier parts of a narrow valley.
        while EXACT < after.objective < 0.999 * solution.objective:
            solution, after = after, descend(after.values_V, 3000, 1e-15)
        found[index] = after
    return sorted(found, key=lambda one: one.objective)


def as_good(solutions: list[Minimum]) -> list[Minimum]:
    """The solutions within 2 % of the lowest objective, or that fit exactly."""
    most = max(CLOSE * solutions[0].objective, NOTHING)
    return [one for one in solutions if one.objective <= most]


def _objective(
    values_V: np.ndarray, matrix: np.ndarray, log_loss_P: np.ndarray, delta: float
) -> tuple[float, np.ndarray]:
    """The mean Huber loss of residuals in units of delta, and its gradient.

    Args:
      matrix: [T P, V], the terms.
    """
    terms_TP = (matrix @ values_V).reshape(-1, len(log_loss_P))
    top_P = terms_TP.max(axis=0)
    shares_TP = np.exp(terms_TP - top_P)
    sum_P = shares_TP.sum(axis=0)
    residual_P = (top_P + np.log(sum_P) - log_loss_P) / delta
    size_P = np.abs(residual_P)
    huber_P = np.where(size_P <= 1, residual_P**2 / 2, size_P - 0.5)
    slope_TP = shares_TP / sum_P * np.clip(residual_P, -1, 1) / delta
    return float(huber_P.mean()), slope_TP.ravel() @ matrix / len(log_loss_P)
