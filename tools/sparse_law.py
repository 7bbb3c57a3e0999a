"""Prints the scaling laws of sparse training (arXiv 2309.08520): the size of a dense model of the
same loss, and the sparsity with the lowest loss for a number of remaining weights and FLOPs.

Command: python tools/sparse_law.py
"""

from typing import NamedTuple

import numpy as np

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


LAWS = {
    "T5 on C4, tokens": SparseLaw(16.8, 0.722, 45.0, 0.245, 6.90e8, 0.203, 0.651),
    "ViT on JFT-4B, images": SparseLaw(294, 0.821, 468, 0.392, 2.37e8, 0.890, 4.517),
}
"""Fitted up to S = 0.875 (T5, 1.3 to 85 million weights that are not zero) and 0.9375 (ViT)."""


def main() -> None:
    """Prints both tables of each law."""
    for name, law in LAWS.items():
        print(name)
        for sparsity in (0.5, 0.75, 0.875, 0.9375):
            print(f"  sparsity {sparsity}: as good as a dense model of {law.gain(sparsity):.2f} N")
        weights = 1e8
        for times in (1, 4, 16, 64):
            flops = times * law.dense_flops(weights)
            best = [law.best_sparsity(weights, flops, gradual=each) for each in (False, True)]
            print(f"  FLOPs {times:2} x: best sparsity {best[0]:.2f}, gradual {best[1]:.2f}")


if __name__ == "__main__":
    main()
