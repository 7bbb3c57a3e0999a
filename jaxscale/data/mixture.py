"""Mixtures of datasets: maps example i to an entry of the source and an example of it.

After any number of examples of a stage, every entry has had its share, rounded up or down
(Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980). Shares are fractions
with one denominator, so that the order of entries repeats and a table of one cycle gives any index.
"""

import bisect
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxscale.batch import Batch
from jaxscale.config import DataConfig
from jaxscale.config.data_source import Weight
from jaxscale.data.dataset import (
    Dataset,
    Examples,
    SourceProgress,
    Split,
    digest,
    entry_name,
    open_dataset,
)
from jaxscale.data.tokens.corpus import Corpus
from jaxscale.data.tokens.tokenizer import Tokenizer

LONGEST_CYCLE = 2**16
"""The longest cycle, in examples, after which the order of entries in a stage repeats."""

_EXACT = 1e-12  # relative: weights are floats, and 0.1 is not a tenth


@dataclass(frozen=True, eq=False)
class Stage:
    """Examples from `begin`, in constant shares."""

    begin: int
    before: tuple[int, ...]  # examples of each member in earlier stages
    shares: tuple[int, ...]  # examples of each in one cycle
    order: np.ndarray  # [cycle], the member of each example
    earlier: np.ndarray  # [cycle], earlier examples of that member in this cycle


@dataclass(frozen=True, eq=False)
class Mixture:
    """Several datasets in changing shares; example i is a pure function of i.

    Each member reads its examples in its own order and epochs, independently of the others; a stage
    continues where the one before ended.
    """

    members: tuple[Dataset, ...]
    stages: tuple[Stage, ...]  # in order; the first begins at 0
    fingerprint: str

    split: Split = "train"

    def __len__(self) -> int:
        """Windows of all members."""
        return sum(len(member) for member in self.members)

    @property
    def num_tokens(self) -> int:
        """Tokens of all members."""
        return sum(member.num_tokens for member in self.members)

    @property
    def seq_len(self) -> int:
        """Tokens of an example, padding included."""
        return self.members[0].seq_len

    @property
    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes of each id."""
        return self.members[0].token_bytes

    def __getitem__(self, index: int, /) -> Batch:
        """Example `index`: a Batch whose fields are [seq_len]."""
        member, own = self.locate(index)
        return self.members[member][own]

    def locate(self, index: int) -> tuple[int, int]:
        """The member of example `index`, and its index in the member."""
        if index < 0:
            raise IndexError(f"example {index}; examples are numbered from 0")
        stage = self._stage(index)
        cycle, position = divmod(index - stage.begin, len(stage.order))
        member = int(stage.order[position])
        earlier = stage.before[member] + cycle * stage.shares[member]
        return member, earlier + int(stage.earlier[position])

    def example_digest(self, indices: Sequence[int]) -> str:
        """A digest of these examples in this order, to compare two runs."""
        located = [self.locate(index) for index in indices]
        windows = [(member, self.members[member].window(own)) for member, own in located]
        return digest([self.fingerprint, windows]).hex()[:8]

    def progress(self, num_examples: int) -> list[SourceProgress]:
        """The progress through each member after `num_examples`."""
        seen = count(self._stage(max(num_examples - 1, 0)), num_examples)
        return [
            SourceProgress(member.name, number, len(member))
            for member, number in zip(self.members, seen)
        ]

    def _stage(self, index: int) -> Stage:
        return self.stages[bisect.bisect_right(self.stages, index, key=lambda s: s.begin) - 1]


def open_examples(
    config: DataConfig, tokenizer: Tokenizer, corpus: Corpus, *, split: Split, vocab_size: int
) -> Examples:
    """The training examples of a source, mixed by its weights, or the held-out ones.

    Without weights the entries are concatenated. Held-out documents are always concatenated,
    including entries of weight 0.

    Raises:
      ValueError: as `open_dataset` and `fractions`; or only some entries have a weight.
    """
    weights = [source.weight for source in config.source]
    weighted = [weight is not None for weight in weights]
    if any(weighted) and not all(weighted):
        missing = entry_name(config, weighted.index(False))
        raise ValueError(
            f"{missing} has no weight, and other entries of data.source have one; give every entry "
            "a weight, or none"
        )
    if split == "heldout" or not any(weighted):
        return open_dataset(config, tokenizer, split=split, corpus=corpus, vocab_size=vocab_size)
    members = tuple(
        open_dataset(
            config, tokenizer, split=split, corpus=corpus, vocab_size=vocab_size, entry=entry
        )
        for entry in range(len(config.source))
    )
    return mix(
        members,
        [weight for weight in weights if weight is not None],
        config.examples_of,
    )


def mix(
    members: Sequence[Dataset], weights: Sequence[Weight], examples_of: Callable[[int], int]
) -> Mixture:
    """Training datasets in the shares of their weights, which need not sum to 1.

    A weight given as (step, weight) pairs changes after these steps. A member of weight 0 is
    absent.

    Args:
      examples_of: the examples that the first steps read, from their number.

    Raises:
      ValueError: as `fractions`.
    """
    pairs = [[(0, w)] if isinstance(w, int | float) else list(w) for w in weights]
    steps = sorted({step for staged in pairs for step, _ in staged})
    stages: list[Stage] = []
    for step in steps:
        now = [staged[bisect.bisect_right(staged, (step, np.inf)) - 1][1] for staged in pairs]
        if not any(now):
            raise ValueError(
                f"from step {step} every weight of data.source is 0; give one entry a weight"
            )
        begin = examples_of(step)
        before = count(stages[-1], begin) if stages else (0,) * len(members)
        shares = fractions(now)
        order = interleave(shares)
        stages.append(Stage(begin, before, tuple(shares.tolist()), order, _rank(order)))
    settings = [[m.fingerprint for m in members], [(s.begin, s.shares) for s in stages]]
    return Mixture(tuple(members), tuple(stages), digest(settings).hex())


def count(stage: Stage, index: int) -> tuple[int, ...]:
    """The examples of each member before `index`, if this stage lasts that long.

    Args:
      index: at least `stage.begin`.
    """
    cycles, position = divmod(index - stage.begin, len(stage.order))
    partly = np.bincount(stage.order[:position], minlength=len(stage.shares)).tolist()
    return tuple(
        before + cycles * share + part
        for before, share, part in zip(stage.before, stage.shares, partly)
    )


def fractions(weights: Sequence[float]) -> np.ndarray:
    """Integers in the ratio of the weights, with a sum of at most `LONGEST_CYCLE`.

    They are the smallest exact ones, for weights such as 0.7, 0.2 and 0.1; if none are exact, the
    ones with the least maximum relative error: under 1e-8 for two weights of similar size, 1e-6 for
    three, 1e-3 for eight. A weight of 0 stays 0.

    Raises:
      ValueError: a weight is too small a share of the sum for such integers.
    """
    wanted = np.asarray(weights, np.float64)
    wanted = wanted / wanted.sum()
    present = wanted[wanted > 0]
    best, least = present, np.inf
    for first in range(len(present), LONGEST_CYCLE + 1, 1024):
        sums = np.arange(first, min(first + 1024, LONGEST_CYCLE + 1))[:, None]
        parts = np.rint(sums * present)
        error = np.abs(parts / (sums * present) - 1).max(axis=1)
        error[(parts.sum(axis=1) != sums[:, 0]) | (parts.min(axis=1) < 1)] = np.inf
        error[error < _EXACT] = 0
        if error.min() < least:
            best, least = parts[error.argmin()], error.min()
        if least == 0:
            break
    if least == np.inf:
        raise ValueError(
            f"the weights {tuple(weights)} of data.source: the smallest is {present.min():.2g} of "
            f"their sum, below the limit of about 1 / {LONGEST_CYCLE:,}; raise it, or make it 0"
        )
    shares = np.zeros(len(wanted), np.int64)
    shares[wanted > 0] = best
    return shares


def interleave(shares: np.ndarray) -> np.ndarray:
    """The member of each example in one cycle, whose length is the sum of the shares.

    After any n examples a member with share s of S has had n * s / S of them, within at most
    1 - 1 / (2 K - 2) for K members: the least bound that is always possible (Tijdeman). It gives
    the earliest and the latest position of each example of a member. Among members that are due,
    the earliest deadline comes first, which meets all bounds if any order does.
    """
    length, slack = int(shares.sum()), max(2 * np.count_nonzero(shares) - 2, 1)
    members = np.repeat(np.arange(len(shares)), shares)
    numbers = np.concatenate([np.arange(share) for share in shares])
    parts = shares[members] * slack
    # In whole numbers: (number + 1 / slack) / share and (number + 1 - 1 / slack) / share.
    earliest = -(-(numbers * slack + 1) * length // parts) - 1
    latest = ((numbers + 1) * slack - 1) * length // parts
    by_time = np.argsort(-earliest, kind="stable")
    coming = list(zip(*(field[by_time].tolist() for field in (earliest, latest, members))))
    ready: list[tuple[int, int]] = []
    order = np.empty(length, np.int32)
    for position in range(length):
        while coming and coming[-1][0] <= position:
            heapq.heappush(ready, coming.pop()[1:])
        order[position] = heapq.heappop(ready)[1]
    return order


def _rank(members: np.ndarray) -> np.ndarray:
    """For each entry of `members`, how many earlier entries are equal to it."""
    order = np.argsort(members, kind="stable")
    counts = np.bincount(members)
    rank = np.empty(len(members), np.int32)
    rank[order] = np.arange(len(members)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank
