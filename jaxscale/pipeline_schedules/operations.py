"""Pipeline operations and orders: the records of which schedules consist.

An order gives each rank's operations in sequence, without times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

# Operations: none, forward of a chunk, recompute its residuals from its input, gradient of the
# input, gradient of the weights, both gradients at once (a fused backward).
NOP, F, R, B, W, X = range(6)
LETTERS = ".FRBWX"


class Op(NamedTuple):
    """One operation; as text its stage, kind and micro-batch.

    >>> str(Op(F, microbatch=0, stage=2)), str(Op(B, 3, 1, segment=2, direction=1))
    ('2F0', '1B3.2^')
    """

    kind: int
    microbatch: int
    stage: int  # virtual, in the order of the model
    segment: int = 0  # of the sequence
    direction: int = 0  # 1 enters at the last rank
    paired: int = 0  # 1 runs in the same tick as the operation before it, overlapped

    def __str__(self) -> str:
        segment = f".{self.segment}" if self.segment else ""
        return f"{self.stage}{LETTERS[self.kind]}{self.microbatch}{segment}{'^' * self.direction}"


def loop(stage: int, ranks: int) -> int:
    """The rank of a virtual stage when stages are assigned to ranks round-robin."""
    return stage % ranks


def zigzag(stage: int, ranks: int) -> int:
    """The rank of a virtual stage when stages descend the ranks and ascend again, in a V."""
    position = stage % (2 * ranks)
    return min(position, 2 * ranks - 1 - position)


StageToRank = Callable[[int, int], int]  # (virtual stage, ranks) -> rank
Rows = list[list[Op]]  # one for each rank


@dataclass(frozen=True)
class Order:
    """Each rank's operations, in sequence, and the ranks of the virtual stages."""

    name: str
    rows: tuple[tuple[Op, ...], ...]  # one for each rank
    microbatches: int
    virtual_stages: int  # per rank
    sequence_chunks: int  # segments of a micro-batch
    stage_to_rank: StageToRank

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Virtual stages of the whole model."""
        return self.ranks * self.virtual_stages

    @property
    def directions(self) -> int:
        """2 if some micro-batches enter at the last rank, else 1."""
        return 1 + max((op.direction for row in self.rows for op in row), default=0)

    @property
    def lanes(self) -> int:
        """2 if some operations are overlapped pairs, else 1."""
        return 1 + max((op.paired for row in self.rows for op in row), default=0)

    def rank_of(self, stage: int, direction: int) -> int:
        """The rank of a stage; direction 1 mirrors the ranks."""
        rank = self.stage_to_rank(stage, self.ranks)
        return self.ranks - 1 - rank if direction else rank
