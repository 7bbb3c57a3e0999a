"""Examples without some that a run passed over, since they did it harm.

Example i is still a function of the seed, i and the list of what was passed over.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxscale.batch import Batch
from jaxscale.data.dataset import Examples, SourceProgress, Split

Ranges = tuple[tuple[int, int], ...]
"""First example and the first after it, in order and apart from each other."""


@dataclass(frozen=True, eq=False)
class PassedOver:
    """Training examples without those in `ranges`, which count as in `examples`."""

    examples: Examples
    ranges: Ranges

    @property
    def split(self) -> Split:
        """Always that of training."""
        return self.examples.split

    @property
    def seq_len(self) -> int:
        """Tokens of an example, padding included."""
        return self.examples.seq_len

    @property
    def fingerprint(self) -> str:
        """Of all examples; the ranges are kept beside it."""
        return self.examples.fingerprint

    @property
    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each id stands for."""
        return self.examples.token_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples."""
        return self.examples.num_tokens

    def __len__(self) -> int:
        """Windows of all examples."""
        return len(self.examples)

    def __getitem__(self, index: int, /) -> Batch:
        """Example `index` of those that are left."""
        return self.examples[self.place(index)]

    def place(self, index: int) -> int:
        """The number among all examples of one of those that are left."""
        for first, last in self.ranges:
            if index >= first:
                index += last - first
        return index

    def example_digest(self, indices: Sequence[int]) -> str:
        """A short name for these examples in this order: equal where two runs see the same."""
        return self.examples.example_digest([self.place(index) for index in indices])

    def progress(self, num_examples: int) -> list[SourceProgress]:
        """How far the first `num_examples` of those that are left go through the text."""
        return self.examples.progress(self.place(num_examples - 1) + 1 if num_examples else 0)


def pass_over(examples: Examples, first: int, last: int) -> PassedOver:
    """The examples without those from `first` to before `last`."""
    ranges = [(first, last)]
    if isinstance(examples, PassedOver):
        ranges = [*examples.ranges, (examples.place(first), examples.place(last - 1) + 1)]
        examples = examples.examples
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return PassedOver(examples, tuple(joined))


def ranges_of(examples: Examples) -> Ranges:
    """What is passed over, for a checkpoint; nothing of other examples."""
    return examples.ranges if isinstance(examples, PassedOver) else ()


def with_ranges(examples: Examples, ranges: Sequence[Sequence[int]]) -> Examples:
    """The examples without those that a checkpoint says were passed over."""
    whole = examples.examples if isinstance(examples, PassedOver) else examples
    return PassedOver(whole, tuple((a, b) for a, b in ranges)) if ranges else whole
