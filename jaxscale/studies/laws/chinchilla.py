"""Scaling laws of loss in parameters and tokens, and the compute-optimal allocation (Chinchilla,
arXiv 2203.15556): approach 1 (envelope), 2 (IsoFLOP parabolas) and 3 (parametric).

N is parameters outside the embedding, D tokens, and C = 6 N D the FLOPs of training.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.studies.laws.log_sum import Minimum, as_good, fit_log_sum

SAME_BUDGET = 1.2
"""Runs are of one budget while each has at most this factor of the FLOPs of the one before."""
LEAST_SIZES = 3
ENVELOPE_POINTS = 200
"""Budgets of the envelope, log-spaced."""
DECADE = 10.0
"""Exponents of one mix of data differ from those of another by more than a fit's error, so that a
power law is not trusted further beyond its runs (arXiv 2406.07249 contradicts 2411.02142)."""
LEAST_SHARE = 1e-3
"""Bound of the irreducible loss, as a share of the lowest loss."""
OTHER_EXPONENT = 0.05
"""Solutions differ if their exponents do by this much."""


class ScalingLaw(NamedTuple):
    """L = e + a / N^alpha + b / D^beta, in nats per token."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, params, tokens):
        """The loss; of arrays that broadcast."""
        return self.e + self.a / params**self.alpha + self.b / tokens**self.beta

    @property
    def exponent(self) -> float:
        """That of the compute-optimal N in C."""
        return self.beta / (self.alpha + self.beta)

    def optimal(self, flops):
        """The N and D with the lowest loss for C = 6 N D, and the loss; of arrays.

        >>> HOFFMANN.optimal(5.76e23).params.round(-8)
        np.float64(32200000000.0)
        """
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        params = ratio * np.power(flops / 6, self.exponent)
        tokens = flops / 6 / params
        return Optimum(params, tokens, self.loss(params, tokens))


class Optimum(NamedTuple):
    """A compute-optimal model."""

    params: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray


HOFFMANN = ScalingLaw(1.69, 406.4, 410.7, 0.34, 0.28)
"""Approach 3 of the paper; uncertain, and its figures follow from it."""
EPOCH = ScalingLaw(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
"""A fit of the same data (arXiv 2404.10102), which agrees with 20 tokens a parameter; uncertain."""


class LossPoints(NamedTuple):
    """Runs, each to the end of its learning-rate schedule; three arrays of one length."""

    params: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray

    @property
    def flops(self) -> np.ndarray:
        """C = 6 N D."""
        return 6 * self.params * self.tokens

    def part(self, indices: np.ndarray) -> "LossPoints":
        """The runs with these indices."""
        return LossPoints(*(column[indices] for column in self))

    def by_budget(self) -> list[np.ndarray]:
        """The indices of the runs of each budget, by rising FLOPs."""
        order = np.argsort(self.flops)
        steps = np.diff(np.log(self.flops[order]))
        return np.split(order, np.flatnonzero(steps > np.log(SAME_BUDGET)) + 1)


class Allocation(NamedTuple):
    """N_opt = coefficient C^exponent, and so D_opt = C^(1 - exponent) / (6 coefficient)."""

    coefficient: float
    exponent: float
    flops: np.ndarray  # of the optima from which it is fitted
    params: np.ndarray  # their N

    def optimal_params(self, flops):
        """N_opt of budgets, at most a decade beyond those of the fit.

        Raises:
          ValueError: a budget further away.
        """
        low, high = self.flops.min() / DECADE, self.flops.max() * DECADE
        if np.any((np.asarray(flops) < low) | (np.asarray(flops) > high)):
            raise ValueError(
                f"{np.max(flops):.3g} FLOPs are more than a decade beyond the runs, which allow "
                f"{low:.3g} to {high:.3g}; train larger budgets"
            )
        return self.coefficient * np.power(flops, self.exponent)


class ParametricFit(NamedTuple):
    """A law, and reasons not to trust its exponents."""

    law: ScalingLaw
    objective: float  # mean Huber loss over delta^2
    degenerate: tuple[str, ...]  # reasons; () if it is well determined


def make_points(params: Sequence, tokens: Sequence, loss: Sequence) -> LossPoints:
    """Checks runs for a fit.

    Raises:
      ValueError: values that are not above 0, or fewer than three sizes: no law of N follows.
    """
    points = LossPoints(*(np.asarray(one, np.float64) for one in (params, tokens, loss)))
    for name, column in points._asdict().items():
        if not (np.isfinite(column).all() and (column > 0).all()):
            raise ValueError(f"{name} of runs must be finite and above 0; leave other runs out")
    if (count := len(np.unique(points.params))) < LEAST_SIZES:
        raise ValueError(
            f"the {len(points.params)} runs have {count} model size{'s' * (count > 1)}, and a law "
            f"of size and data needs {LEAST_SIZES}; train other sizes for the same FLOPs"
        )
    return points


def fit_power(flops: np.ndarray, params: np.ndarray) -> Allocation:
    """The power law of optimal sizes, by least squares of logarithms.

    Raises:
      ValueError: fewer than two budgets.
    """
    if len(np.unique(flops)) < 2:
        raise ValueError(
            f"{len(flops)} budgets have their optimum between the trained sizes, and an exponent "
            "needs 2; train more sizes or budgets"
        )
    exponent, intercept = np.polyfit(np.log(flops), np.log(params), 1)
    return Allocation(float(np.exp(intercept)), float(exponent), flops, params)


def fit_isoflop(points: LossPoints) -> Allocation:
    """Approach 2: the minimum of a parabola of the loss in ln N for each budget, and a power law of
    the minima. Budgets whose minimum is not between their sizes are left out."""
    found = [isoflop_minimum(points.part(some)) for some in points.by_budget()]
    optima = [(flops, params) for flops, params, inside in found if inside]
    return fit_power(*np.reshape(optima, (-1, 2)).T)


def isoflop_minimum(budget: LossPoints) -> tuple[float, float, bool]:
    """C of runs of one budget (their geometric mean), N at the parabola's minimum, and whether that
    is a minimum between the trained sizes.

    Raises:
      ValueError: fewer than three sizes.
    """
    log_params = np.log(budget.params)
    flops = float(np.exp(np.log(budget.flops).mean()))
    if len(np.unique(log_params)) < LEAST_SIZES:
        raise ValueError(
            f"the budget of {flops:.3g} FLOPs has {len(np.unique(log_params))} model sizes, and a "
            f"parabola needs {LEAST_SIZES}; train more sizes for it"
        )
    center = log_params.mean()
    square, slope, _ = np.polyfit(log_params - center, budget.loss, 2)
    if square <= 0:
        return flops, float("nan"), False
    least = center - slope / (2 * square)
    inside = log_params.min() < least < log_params.max()
    return flops, float(np.exp(least)), bool(inside)


def fit_envelope(points: LossPoints) -> Allocation:
    """Approach 1: of each budget the size with the lowest loss, and a power law of these.

    The loss of a size with several runs is interpolated between them in the logarithms of loss and
    FLOPs; each run has a whole learning-rate schedule. Budgets whose best size is the smallest or
    the largest one are left out: the optimum may be beyond it.

    Raises:
      ValueError: the envelope has fewer than two sizes.
    """
    flops = points.flops
    grid = np.geomspace(flops.min(), flops.max(), ENVELOPE_POINTS)
    sizes, runs = np.unique(points.params, return_counts=True)
    sizes = sizes[runs > 1]
    losses = np.full((len(sizes), len(grid)), np.inf)
    for row, size in enumerate(sizes):
        some = np.flatnonzero(points.params == size)
        some = some[np.argsort(flops[some])]
        x, y = np.log(flops[some]), np.log(points.loss[some])
        within = (grid >= flops[some[0]] / SAME_BUDGET) & (grid <= flops[some[-1]] * SAME_BUDGET)
        losses[row] = np.where(within, np.interp(np.log(grid), x, y), np.inf)
    best = losses.argmin(axis=0) if len(sizes) else np.zeros(len(grid), int)
    inside = (best > 0) & (best < len(sizes) - 1)
    if len(np.unique(best[inside])) < 2:
        raise ValueError(
            f"the envelope has {len(np.unique(best[inside]))} sizes between the smallest and the "
            "largest, and an exponent needs 2; train more sizes or budgets"
        )
    return fit_power(grid[inside], sizes[best[inside]])


def fit_parametric(
    points: LossPoints, *, delta: float = 1e-3, starts: Sequence[ScalingLaw] = ()
) -> ParametricFit:
    """Approach 3: Huber loss of the logarithm of a `ScalingLaw`, L-BFGS from a grid of starts.

    Args:
      delta: of the Huber loss, in nats of log loss; 1e-3 in the paper.
      starts: laws to start from instead of the grid, such as the fit of similar data.

    Raises:
      ValueError: fewer than six runs, or one number of tokens.
    """
    if len(points.loss) < 6 or len(np.unique(points.tokens)) < LEAST_SIZES:
        raise ValueError(
            f"{len(points.loss)} runs with {len(np.unique(points.tokens))} numbers of tokens do "
            f"not determine the five constants of a law; train at least 6, with {LEAST_SIZES} "
            "numbers of tokens"
        )
    log_params, log_tokens = np.log(points.params), np.log(points.tokens)
    # Centred, so that a coefficient and its exponent are nearly independent.
    x, y = log_params - log_params.mean(), log_tokens - log_tokens.mean()
    one, zero = np.ones_like(x), np.zeros_like(x)
    terms = np.stack(
        [
            np.stack([one, zero, zero, -x, zero], axis=1),
            np.stack([zero, one, zero, zero, -y], axis=1),
            np.stack([zero, zero, one, zero, zero], axis=1),
        ]
    )
    low = np.log(points.loss.min())
    least = low + np.log(LEAST_SHARE)
    bounds = [(least - 10, low + 10), (least - 10, low + 10), (least, low + 1), (0, 3), (0, 3)]
    grid = np.array([_to_logs(law) for law in starts]) if starts else _grid()
    grid[:, 0] -= grid[:, 3] * log_params.mean()
    grid[:, 1] -= grid[:, 4] * log_tokens.mean()
    if not starts:
        grid = _best_of_exponents(grid, terms, np.log(points.loss))
    solutions = fit_log_sum(
        terms, np.log(points.loss), grid, bounds, delta=delta, num_starts=len(grid)
    )

    def law_of(solution: Minimum) -> ScalingLaw:
        a, b, e, alpha, beta = solution.values_V
        a, b = a + alpha * log_params.mean(), b + beta * log_tokens.mean()
        return ScalingLaw(*map(float, (np.exp(e), np.exp(a), np.exp(b), alpha, beta)))

    law = law_of(solutions[0])
    reasons = _degeneracies(law, [law_of(one) for one in as_good(solutions)], float(np.exp(least)))
    return ParametricFit(law, solutions[0].objective, reasons)


def _to_logs(law: ScalingLaw) -> list[float]:
    return [np.log(law.a), np.log(law.b), np.log(law.e), law.alpha, law.beta]


def _grid() -> np.ndarray:
    """The starts of the paper, and that of its authors' default; a, b, e are logarithms."""
    exponents, coefficients = np.arange(0, 2.1, 0.5), np.arange(0, 26, 5.0)
    constants = np.arange(-1, 1.1, 0.5)
    grid = itertools.product(coefficients, coefficients, constants, exponents, exponents)
    return np.array([(5.0, 10.0, 1.0, 0.5, 0.5), *grid])


def _best_of_exponents(grid: np.ndarray, terms: np.ndarray, log_loss: np.ndarray) -> np.ndarray:
    """Of the starts with the same two exponents the one nearest to the data; and the first."""
    exponents = np.einsum("tpv,sv->stp", terms, grid)
    errors = np.abs(np.logaddexp.reduce(exponents, axis=1) - log_loss).sum(axis=1)
    best: dict[tuple, int] = {}
    for index in np.argsort(errors, kind="stable"):
        best.setdefault(tuple(grid[index, 3:]), int(index))
    return grid[[0, *(index for index in best.values() if index)]]


def _degeneracies(law: ScalingLaw, others: list[ScalingLaw], least: float) -> tuple[str, ...]:
    """Reasons why the constants are not determined by the data."""
    found = []
    if law.e <= 1.01 * least:
        found.append(f"the irreducible loss is at its bound, {least:.2g}")
    for name, exponent in (("alpha", law.alpha), ("beta", law.beta)):
        if exponent <= 1e-6 or exponent >= 3 - 1e-6:
            found.append(f"{name} is at its bound, {exponent:.2g}")
    for name in ("alpha", "beta"):
        values = [getattr(one, name) for one in others]
        if max(values) - min(values) > OTHER_EXPONENT:
            found.append(
                f"{len(others)} solutions within 2 % of the objective have {name} from "
                f"{min(values):.3f} to {max(values):.3f}"
            )
    return tuple(found)


def bootstrap_interval(
    points: LossPoints,
    statistic: Callable[[LossPoints], float],
    *,
    draws: int = 200,
    share: float = 0.8,
    seed: int = 0,
) -> tuple[float, float]:
    """The interval of a statistic of runs that are drawn again with replacement in each budget.

    Args:
      statistic: such as the exponent of a fit; draws that it refuses are left out.
      share: of the draws in the interval, from the 10th to the 90th percentile by default, as in
        the paper.

    Raises:
      ValueError: the statistic refuses most draws.
    """
    random, found = np.random.default_rng(seed), []
    for _ in range(draws):
        drawn = [random.choice(some, len(some)) for some in points.by_budget()]
        try:
            found.append(statistic(points.part(np.concatenate(drawn))))
        except ValueError:
            continue
    if 2 * len(found) < draws:
        raise ValueError(
            f"{draws - len(found)} of {draws} draws of the runs do not determine the fit; train "
            "more sizes or budgets"
        )
    low, high = np.quantile(found, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)
