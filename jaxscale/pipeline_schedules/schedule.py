"""`Schedule`, the record of a pipeline schedule for the engine, the drawings, the planner and the
search."""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxscale.pipeline_schedules.operations import Rows, StageToRank, loop

NUMBERS: Sequence[str] = ("stages", "microbatches", "virtual_stages", "sequence_chunks")


class Need(NamedTuple):
    """A condition on (ranks, micro-batches, virtual stages, sequence chunks); `text` follows
    "SCHEDULE needs" in an error."""

    text: str
    holds: Callable[[int, int, int, int], bool]


SEVERAL_CHUNKS = Need("virtual_stages to be at least 2", lambda p, m, v, k: v >= 2)
ONE_CHUNK = Need("virtual_stages = 1", lambda p, m, v, k: v == 1)
TWO_CHUNKS = Need("virtual_stages = 2, a V of two chunks per rank", lambda p, m, v, k: v == 2)
WHOLE_SEQUENCES = Need("sequence_chunks = 1", lambda p, m, v, k: k == 1)
EVEN_STAGES = Need("an even number of stages", lambda p, m, v, k: p % 2 == 0)
EVEN_MICROBATCHES = Need("an even number of microbatches", lambda p, m, v, k: m % 2 == 0)
ROUNDS_OF_STAGES = Need("microbatches to be a multiple of stages", lambda p, m, v, k: m % p == 0)


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule.

    `make_rows(p, m, v, k)` is a pure function of p ranks, m micro-batches, v virtual stages
    (chunks) per rank and k sequence chunks (segments) per micro-batch. It returns the operations of
    each rank in their order, without times. Stage c * p + r is chunk c of rank r by default
    (`stage_to_rank`).
    """

    name: str
    paper: str
    make_rows: Callable[[int, int, int, int], Rows]
    needs: tuple[Need, ...]  # the first that fails is reported
    stage_to_rank: StageToRank = loop  # or `zigzag`, a V

    # True if the rows have B and W. Otherwise their backward pass is X, which is split into B and W
    # unless a layout sets ":fused".
    splits_backward: bool = False

    # Chunks per rank if layout.virtual_stages = 0, and the numbers that a search tries.
    virtual_stages: int = 1
    searched_virtual_stages: tuple[int, ...] = (1,)

    # Micro-batches per rank above which each further round adds the same number of ticks to the
    # table, counted for 2 to 8 ranks; the planner simulates no larger table. None if unknown, or if
    # the schedule has needs for micro-batches other than ROUNDS_OF_STAGES.
    steady_rounds: int | None = None

    @property
    def splits_sequences(self) -> bool:
        """Whether it is for sequences in several segments."""
        return WHOLE_SEQUENCES not in self.needs

    def serves(self, *numbers: int) -> bool:
        """Whether the schedule supports these ranks, micro-batches, virtual stages, sequence
        chunks."""
        return all(need.holds(*numbers) for need in self.needs)

    def allows(self, virtual_stages: int) -> bool:
        """Whether the schedule supports these chunks per rank with any ranks and micro-batches."""
        numbers = itertools.product(range(2, 9), range(1, 33))
        return any(self.serves(p, m, virtual_stages, 1) for p, m in numbers)

    def check(self, name: str, *numbers: int) -> None:
        """Refuses unsupported numbers.

        Args:
          name: of the schedule, for the error.
          numbers: as in `serves`.

        Raises:
          ValueError: the first need that fails, with the nearest supported numbers.
        """
        for need in self.needs:
            if not need.holds(*numbers):
                got = ", ".join(f"{key} = {number}" for key, number in zip(NUMBERS, numbers))
                nearest = _nearest(self, numbers)
                raise ValueError(f"{name} needs {need.text}; got {got}. {nearest}")

    def round(self, ranks: int) -> int:
        """The number of which micro-batches must be a multiple."""
        if EVEN_MICROBATCHES in self.needs:
            return 2
        return ranks if ROUNDS_OF_STAGES in self.needs else 1


def _nearest(schedule: Schedule, numbers: tuple[int, ...]) -> str:
    """The nearest supported numbers, with as few changes as possible."""
    p, m, v, k = numbers
    working = [
        choice
        for choice in itertools.product(
            range(max(1, p - 4), p + 5),
            range(1, m + 2 * p + 10),
            sorted({1, 2, v, schedule.virtual_stages}),
            sorted({1, 2, *range(max(1, k - 2), k + 3)}),
        )
        if schedule.serves(*choice)
    ]
    if not working:
        return "No numbers near these work"

    def changes(choice: tuple[int, ...]) -> dict[str, int]:
        return {key: c for key, c, n in zip(NUMBERS, choice, numbers) if c != n}

    def distance(choice: tuple[int, ...]) -> int:
        return sum(map(abs, map(operator.sub, choice, numbers)))

    fewest = min(len(changes(choice)) for choice in working)
    least: dict[tuple[str, ...], int] = {}
    for choice in working:
        keys = tuple(changes(choice))
        if len(keys) == fewest:
            least[keys] = min(distance(choice), least.get(keys, distance(choice)))
    ways = [
        " and ".join(f"{key} = {number}" for key, number in changes(choice).items())
        for choice in working
        if distance(choice) == least.get(tuple(changes(choice)))
    ]
    return f"Nearest that works: {', or '.join(ways)}"
