"""The scaling law of sparse training, L(S, N, D) (arXiv 2309.08520): the size of a dense model of
the same loss, the sparsity with the lowest loss, and its fit.

S is the share of zeros, N counts the weights that are not zero, D tokens or images.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.studies.laws.log_sum import fit_log_sum

GRADUAL = 0.625
"""Mean of the cubic schedule, over the final sparsity, if pruning takes the half of a run after its
first quarter."""


class SparseLaw(NamedTuple):
    """loss = (a_s (1 - S)^b_s + c_s) / N^b_n + (a_d / D)^b_d + c, for sparsity S, N weights that
    are not zero, and D examples."""

    a_s: float
    b_s: float
    c_s: float
    b_n: float
    a_d: float
    b_d: float
    c: float

    def loss(self, sparsity, weights, data):
        """The loss in nats; of arrays that broadcast."""
        capacity = self.a_s * (1 - sparsity) ** self.b_s + self.c_s
        return capacity / weights**self.b_n + (self.a_d / data) ** self.b_d + self.c

    def gain(self, sparsity):
        """The size of a dense model of the same loss, over the weights that are not zero."""
        dense = self.a_s + self.c_s
        return (dense / (self.a_s * (1 - sparsity) ** self.b_s + self.c_s)) ** (1 / self.b_n)

    def dense_flops(self, weights: float) -> float:
        """The FLOPs for which a dense model of this size has the lowest loss."""
        ratio = self.b_n * (self.a_s + self.c_s) / (self.b_d * weights**self.b_n)
        return 6 * weights * self.a_d / ratio ** (1 / self.b_d)

    def best_sparsity(self, weights: float, flops: float, *, gradual: bool = False) -> float:
        """The sparsity with the lowest loss, to 1e-4, by search.

        Args:
          weights: that are not zero at the end.
          flops: of training, at the price of the dense matmuls that compute it.
          gradual: whether a step costs what its weights that are not zero would.
        """
        grid = np.arange(0, 1, 1e-4)
        price = (1 - GRADUAL * grid * gradual) / (1 - grid)
        return float(grid[np.argmin(self.loss(grid, weights, flops / (6 * weights * price)))])


SPARSE_LAWS = {
    "T5 on C4, tokens": SparseLaw(16.8, 0.722, 45.0, 0.245, 6.90e8, 0.203, 0.651),
    "ViT on JFT-4B, images": SparseLaw(294, 0.821, 468, 0.392, 2.37e8, 0.890, 4.517),
}
"""Fitted up to S = 0.875 (T5, 1.3 to 85 million weights that are not zero) and 0.9375 (ViT)."""


class SparseFit(NamedTuple):
    """A law, and how well it fits."""

    law: SparseLaw
    objective: float  # mean Huber loss over delta^2


def fit_sparse(
    sparsity: Sequence,
    weights: Sequence,
    data: Sequence,
    loss: Sequence,
    *,
    delta: float = 1e-3,
    num_starts: int = 25,
    seed: int = 0,
) -> SparseFit:
    """Fits the law by the Huber loss of the log loss and L-BFGS from random starts.

    The constants of the paper's own data are not unique: compare losses, not constants.

    Args:
      weights: that are not zero.
      delta: of the Huber loss; 1e-3 of the paper for T5.

    Raises:
      ValueError: fewer than eight runs, three sparsities or three sizes.
    """
    S, N, D, L = (np.asarray(one, np.float64) for one in (sparsity, weights, data, loss))
    distinct = {
        "sparsities": (len(np.unique(S)), 3),
        "sizes": (len(np.unique(N)), 3),
        "numbers of examples": (len(np.unique(D)), 3),
        "runs": (len(L), 8),
    }
    for name, (count, least) in distinct.items():
        if count < least:
            raise ValueError(
                f"{count} {name} do not determine a law of sparsity, size and data, which needs "
                f"{least}; train more"
            )
    x, y, z = np.log(N), np.log(D), np.log1p(-S)
    mean_x, mean_y = x.mean(), y.mean()
    x, y = x - mean_x, y - mean_y
    one, zero = np.ones_like(x), np.zeros_like(x)
    # Logarithm of a_s at the mean size, b_s, that of c_s, b_n, that of the data's term, b_d, c.
    terms = np.stack(
        [
            np.stack([one, z, zero, -x, zero, zero, zero], axis=1),
            np.stack([zero, zero, one, -x, zero, zero, zero], axis=1),
            np.stack([zero, zero, zero, zero, one, -y, zero], axis=1),
            np.stack([zero, zero, zero, zero, zero, zero, one], axis=1),
        ]
    )
    low = np.log(L.min())
    bounds = [(low - 12, low + 3), (0, 5), (low - 12, low + 3), (0, 3)]
    bounds += [(low - 12, low + 3), (0, 3), (low - 7, low + 1)]
    coefficient, exponent = (low - 4, low), (0.05, 1.0)
    spans = [coefficient, (0.2, 2.0), coefficient, exponent, coefficient, exponent, (low - 2, low)]
    lowest, highest = np.array(spans).T
    random = np.random.default_rng(seed)
    starts = random.uniform(lowest, highest, (20 * num_starts, 7))
    (best, *_) = fit_log_sum(terms, np.log(L), starts, bounds, delta=delta, num_starts=num_starts)
    a_s, b_s, c_s, b_n, a_d, b_d, c = best.values_V
    law = SparseLaw(
        float(np.exp(a_s + b_n * mean_x)),
        float(b_s),
        float(np.exp(c_s + b_n * mean_x)),
        float(b_n),
        float(np.exp(a_d / b_d + mean_y)) if b_d else 0.0,
        float(b_d),
        float(np.exp(c)),
    )
    return SparseFit(law, best.objective)
