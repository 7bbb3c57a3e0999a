"""A dataset that skips ranges of examples blamed for bad steps.

Example i remains a pure function of the seed, i and the list of skipped ranges.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxscale.batch import Batch
from jaxscale.data.dataset import Examples, SourceProgress, Split

Ranges = tuple[tuple[int, int], ...]
"""First example and the one after the last of each range, in order and without overlap."""


@dataclass(frozen=True, eq=False)
class SkippedExamples:
    """Training examples without `ranges`, which are indices in `examples`."""

    examples: Examples
    ranges: Ranges

    @property
    def split(self) -> Split:
        """The training split."""
        return self.examples.split

    @property
    def seq_len(self) -> int:
        """Tokens of an example, padding included."""
        return self.examples.seq_len

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all examples; checkpoints store the ranges separately."""
        return self.examples.fingerprint

    @property
    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes of each id."""
        return self.examples.token_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples."""
        return self.examples.num_tokens

    def __len__(self) -> int:
        """Windows of all examples."""
        return len(self.examples)

    def __getitem__(self, index: int, /) -> Batch:
        """Example `index` of the remaining ones."""
        return self.examples[self.position(index)]

    def position(self, index: int) -> int:
        """The index among all examples of a remaining one."""
        for first, last in self.ranges:
            if index >= first:
                index += last - first
        return index

    def example_digest(self, indices: Sequence[int]) -> str:
        """A digest of these examples in this order, to compare two runs."""
        return self.examples.example_digest([self.position(index) for index in indices])

    def progress(self, num_examples: int) -> list[SourceProgress]:
        """The progress through the text after `num_examples` of the remaining ones."""
        return self.examples.progress(self.position(num_examples - 1) + 1 if num_examples else 0)


def skip_examples(examples: Examples, first: int, last: int) -> SkippedExamples:
    """The examples without `first` to `last` - 1."""
    ranges = [(first, last)]
    if isinstance(examples, SkippedExamples):
        ranges = [*examples.ranges, (examples.position(first), examples.position(last - 1) + 1)]
        examples = examples.examples
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return SkippedExamples(examples, tuple(joined))


def ranges_of(examples: Examples) -> Ranges:
    """The skipped ranges, for a checkpoint; () for other examples."""
    return examples.ranges if isinstance(examples, SkippedExamples) else ()


def with_ranges(examples: Examples, ranges: Sequence[Sequence[int]]) -> Examples:
    """The examples without the ranges of a checkpoint."""
    whole = examples.examples if isinstance(examples, SkippedExamples) else examples
    return SkippedExamples(whole, tuple((a, b) for a, b in ranges)) if ranges else whole
