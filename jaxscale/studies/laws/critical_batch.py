"""Laws of the batch size (arXiv 1812.06162): steps and data to a loss, and the ramp that follows.

With S steps and E examples to a loss, (S / S_min - 1) (E / E_min - 1) = 1; E_min / S_min is the
critical batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class CriticalBatch(NamedTuple):
    """A fit of the steps to a loss over batches; sizes are in the unit of the batches."""

    least_steps: float  # with any larger batch
    batch: float  # the critical batch
    error: float  # root mean square of the logarithm of fitted over given steps

    @property
    def least_data(self) -> float:
        """With any smaller batch."""
        return self.least_steps * self.batch


def steps_to_loss(fit: CriticalBatch, batch: float) -> float:
    """Steps with batches of a size; twice the fewest with the critical batch.

    >>> steps_to_loss(CriticalBatch(100, 32, 0), 32)
    200.0
    """
    return fit.least_steps * (1 + fit.batch / batch)


def data_to_loss(fit: CriticalBatch, batch: float) -> float:
    """Data with batches of a size: steps times the batch."""
    return fit.least_data * (1 + batch / fit.batch)


def fit_critical_batch(batches: Sequence[float], steps: Sequence[float]) -> CriticalBatch:
    """Least squares of the logarithm of the steps; the critical batch to 1 part in 1,000, from a
    hundredth of the smallest batch to a hundred times the largest.

    Raises:
      ValueError: fewer than two batches.
    """
    if len(set(batches)) < 2:
        raise ValueError(f"steps with the batches {sorted(set(batches))}; a fit needs two or more")
    sizes, logs = np.asarray(batches, float), np.log(np.asarray(steps, float))
    low, high = sizes.min() / 100, sizes.max() * 100
    tried = np.geomspace(low, high, round(1000 * np.log(high / low)))
    above = logs - np.log1p(tried[:, None] / sizes)
    least = above.mean(axis=1)
    errors = np.sqrt(np.square(above - least[:, None]).mean(axis=1))
    best = int(errors.argmin())
    return CriticalBatch(float(np.exp(least[best])), float(tried[best]), float(errors[best]))


def batch_ramp(
    noise: Sequence[tuple[float, float]], sizes: Sequence[int], examples: float
) -> dict[int, int]:
    """`data.batch_schedule` with the largest size that the noise scale reached: step -> size.

    Args:
      noise: (examples read, noise scale in examples), in order; a later lower value changes
        nothing, since batches only grow.
      sizes: batches that a step can have, ascending.
      examples: of the whole run.

    >>> batch_ramp([(0, 3), (40, 9), (100, 20)], [4, 8, 16], 200)
    {0: 4, 10: 8, 18: 16}
    """
    found, read, step, size = {}, 0.0, 0, 0
    while read < examples:
        reached = max([scale for at, scale in noise if at <= read], default=0.0)
        wanted = max([one for one in sizes if one <= reached], default=sizes[0])
        if wanted > size:
            found[step] = size = wanted
        step, read = step + 1, read + size
    return found


def critical_tokens(loss: float, scale: float = 2e8, exponent: float = 0.21) -> float:
    """The critical batch of language models at a loss, tokens (arXiv 2001.08361): recalled
    constants, uncertain.

    >>> [round(critical_tokens(loss) / 1e6, 2) for loss in (4.0, 3.0, 2.5)]
    [0.27, 1.07, 2.55]
    """
    return scale / loss ** (1 / exponent)
