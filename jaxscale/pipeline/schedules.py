"""The schedules by name: the numbers that each can serve, and its order, with the backward pass
fused or split and with as much made again as is asked for.
"""

import bisect
import itertools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxscale.choices import did_you_mean
from jaxscale.pipeline.operations import B, F, Op, Order, Placement, R, Rows, W, X, loop, zigzag
from jaxscale.pipeline.schedule_csv import read_csv
from jaxscale.pipeline.schedules_1f1b import (
    bidirectional,
    breadth_first,
    gpipe,
    interleaved,
    one_f_one_b,
    seq1f1b,
    seq1f1b_interleaved,
)
from jaxscale.pipeline.schedules_zero_bubble import dualpipe, dualpipe_v, zb_h1, zb_h2, zb_v

NUMBERS: Sequence[str] = ("stages", "microbatches", "virtual_stages", "sequence_chunks")


class Need(NamedTuple):
    """What must hold of (ranks, micro-batches, virtual stages, sequence chunks)."""

    text: str
    holds: Callable[[int, int, int, int], bool]


ONE_CHUNK = Need("virtual_stages = 1", lambda p, m, v, k: v == 1)
TWO_CHUNKS = Need("virtual_stages = 2, a V of two chunks per rank", lambda p, m, v, k: v == 2)
WHOLE = Need("sequence_chunks = 1", lambda p, m, v, k: k == 1)
EVEN = Need("an even number of stages", lambda p, m, v, k: p % 2 == 0)
BLOCKS = Need("microbatches to be a multiple of stages", lambda p, m, v, k: m % p == 0)


@dataclass(frozen=True)
class Schedule:
    """A way of making orders, and the numbers that it can serve."""

    rows: Callable[[int, int, int, int], Rows]
    needs: tuple[Need, ...]
    placement: Placement = loop
    # Whether the backward pass may be fused or split, as one likes, or is given by the rows.
    given_backward: bool = False


SCHEDULES = {
    "gpipe": Schedule(gpipe, (ONE_CHUNK, WHOLE)),
    "1f1b": Schedule(one_f_one_b, (ONE_CHUNK, WHOLE)),
    "interleaved": Schedule(interleaved, (WHOLE, BLOCKS)),
    "breadth_first": Schedule(breadth_first, (WHOLE,)),
    "seq1f1b": Schedule(seq1f1b, (ONE_CHUNK,)),
    "seq1f1b_interleaved": Schedule(
        seq1f1b_interleaved,
        (
            Need(
                "microbatches * sequence_chunks to be a multiple of the least common multiple of "
                "stages and sequence_chunks",
                lambda p, m, v, k: m * k % math.lcm(p, k) == 0,
            ),
        ),
    ),
    "chimera": Schedule(bidirectional, (ONE_CHUNK, WHOLE, EVEN, BLOCKS)),
    "bitpipe": Schedule(
        bidirectional,
        (
            TWO_CHUNKS,
            WHOLE,
            Need("an even number of stages, at least 4", lambda p, m, v, k: p % 2 == 0 and p >= 4),
            BLOCKS,
        ),
        placement=zigzag,
    ),
    "zb_h1": Schedule(zb_h1, (ONE_CHUNK, WHOLE), given_backward=True),
    "zb_h2": Schedule(zb_h2, (ONE_CHUNK, WHOLE), given_backward=True),
    "zb_v": Schedule(
        zb_v,
        (
            TWO_CHUNKS,
            WHOLE,
            Need("microbatches >= 2 * stages - 1", lambda p, m, v, k: m >= 2 * p - 1),
        ),
        placement=zigzag,
        given_backward=True,
    ),
    "dualpipe": Schedule(
        dualpipe,
        (
            ONE_CHUNK,
            WHOLE,
            EVEN,
            Need("an even number of microbatches", lambda p, m, v, k: m % 2 == 0),
            Need("microbatches >= 2 * stages", lambda p, m, v, k: m >= 2 * p),
        ),
        given_backward=True,
    ),
    "dualpipe_v": Schedule(
        dualpipe_v,
        (
            TWO_CHUNKS,
            WHOLE,
            Need("microbatches >= 2 * stages", lambda p, m, v, k: m >= 2 * p),
        ),
        placement=zigzag,
        given_backward=True,
    ),
}


def make_order(
    name: str,
    stages: int | None = None,
    microbatches: int | None = None,
    virtual_stages: int | None = None,
    sequence_chunks: int | None = None,
    *,
    fused: bool = False,
    keep: int | None = None,
) -> Order:
    """The order of a schedule by name, or from a file whose name ends in .csv.

    >>> [str(op) for op in make_order("1f1b", 2, 2).rows[1]]
    ['1F0', '1B0', '1W0', '1F1', '1B1', '1W1']

    Args:
      name: a key of SCHEDULES, or a path.
      stages: ranks on the pipeline axis; only a file knows it without being told.
      microbatches: per step; likewise.
      virtual_stages: chunks per rank; None for the fewest that the schedule can have.
      sequence_chunks: segments of a micro-batch; None for whole sequences.
      fused: one operation for the whole backward pass, not B and then W.
      keep: passes whose residuals a rank keeps at a time (see `keep_passes`): all others have an R
        before their backward, with 0 every pass. None for no R at all, or for what a file says.

    Raises:
      ValueError: an unknown name, or numbers that the schedule cannot serve, with the nearest
        that it can.
    """
    numbers = dict(zip(NUMBERS, (stages, microbatches, virtual_stages, sequence_chunks)))
    for key, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{key} = {number}; at least 1")
    if keep is not None and keep < 0:
        raise ValueError(f"keep = {keep}; at least 0, to recompute every pass")
    if pathlib.PurePath(name).suffix == ".csv":
        return _order_from_file(name, numbers, fused, keep)
    if name not in SCHEDULES:
        hint = did_you_mean(name.lower(), SCHEDULES)
        raise ValueError(
            f"schedule = {name!r} is not known; it can be {', '.join(SCHEDULES)}, or a .csv file"
            f"{hint}"
        )
    if stages is None or microbatches is None:
        raise ValueError(
            f"{name} needs stages (ranks) and microbatches; got stages = {stages}, "
            f"microbatches = {microbatches}"
        )
    schedule = SCHEDULES[name]
    v = virtual_stages or (2 if TWO_CHUNKS in schedule.needs else 1)
    k = sequence_chunks or 1
    check_needs(name, schedule.needs, (stages, microbatches, v, k))
    if fused and schedule.given_backward:
        raise ValueError(
            f"fused = True, but {name} is made of separate input and weight gradients; "
            "leave fused out, or take another schedule such as 1f1b"
        )
    rows = schedule.rows(stages, microbatches, v, k)
    if not fused and not schedule.given_backward:
        rows = split_backward(rows)
    if keep is not None:
        rows = add_recompute(rows)
    if keep:
        rows = keep_passes(rows, keep)
    return Order(name, tuple(map(tuple, rows)), microbatches, v, k, schedule.placement)


def split_backward(rows: Rows) -> Rows:
    """Every X as B and then W: the gradient leaves for the rank before while W still runs."""
    return [
        [
            part
            for op in row
            for part in ((op._replace(kind=B), op._replace(kind=W)) if op.kind == X else (op,))
        ]
        for row in rows
    ]


def add_recompute(rows: Rows) -> Rows:
    """An R before every backward: it needs no gradient, so it runs while that is awaited."""
    result: Rows = []
    for row in rows:
        result.append([])
        for op in row:
            if op.kind in (B, X):
                # Before the pair, where the backward overlaps with the forward before it.
                result[-1].insert(len(result[-1]) - op.paired, op._replace(kind=R, paired=0))
            result[-1].append(op)
    return result


def keep_passes(rows: Rows, keep: int) -> Rows:
    """Without the R of as many passes as can be, where a rank keeps up to `keep` of them at a time.

    Micro-batch by micro-batch, as in Korthikanti et al. (arXiv 2205.05198, appendix C): a rank near
    the end of the pipeline has less in flight, and so makes less of it again. Which passes to keep
    is interval colouring: taken by their ends, each goes where another has ended last.

    Raises:
      ValueError: that would be all of them.
    """
    result = [_keep(row, keep) for row in rows]
    if not any(op.kind == R for row in result for op in row):
        raise ValueError(
            f"keep = {keep}, and no rank has more than that in flight, so that nothing would be "
            "recomputed; keep fewer, or recompute nothing"
        )
    return result


def _keep(row: list[Op], keep: int) -> list[Op]:
    begins = {op[1:4]: n for n, op in enumerate(row) if op.kind == F}
    ends = {op[1:4]: n for n, op in enumerate(row) if op.kind in (W, X)}
    kept, free = set(), [-1] * keep  # where each of the places became free, in order
    for unit, end in ends.items():
        place = bisect.bisect_left(free, begins[unit]) - 1
        if place >= 0:
            kept.add(unit)
            free.pop(place)
            free.append(end)
    return [op for op in row if op.kind != R or op[1:4] not in kept]


def check_needs(name: str, needs: tuple[Need, ...], numbers: tuple[int, int, int, int]) -> None:
    """Raises ValueError for the first need that fails, with the nearest numbers that work."""
    for need in needs:
        if not need.holds(*numbers):
            got = ", ".join(f"{key} = {number}" for key, number in zip(NUMBERS, numbers))
            raise ValueError(f"{name} needs {need.text}; got {got}. {_nearest(needs, numbers)}")


def _nearest(needs: tuple[Need, ...], numbers: tuple[int, int, int, int]) -> str:
    """Each way to make the numbers work that changes as few of them as can be."""
    p, m, v, k = numbers
    working = [
        choice
        for choice in itertools.product(
            range(max(1, p - 4), p + 5),
            range(1, m + 2 * p + 10),
            {1, 2, v},
            {1, 2, *range(max(1, k - 2), k + 3)},
        )
        if all(need.holds(*choice) for need in needs)
    ]

    def changes(choice: tuple[int, ...]) -> dict[str, int]:
        return {key: c for key, c, n in zip(NUMBERS, choice, numbers) if c != n}

    def distance(choice: tuple[int, ...]) -> int:
        return sum(abs(c - n) for c, n in zip(choice, numbers))

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


def _order_from_file(
    path: str, numbers: Mapping[str, int | None], fused: bool, keep: int | None
) -> Order:
    order = read_csv(path)
    there = (order.ranks, order.microbatches, order.virtual_stages, order.sequence_chunks)
    for (key, number), found in zip(numbers.items(), there):
        if number not in (None, found):
            raise ValueError(f"{key} = {number}, but {path} is an order for {key} = {found}")
    kinds = {op.kind for row in order.rows for op in row}
    if fused and kinds & {B, W}:
        raise ValueError(f"fused = True, but {path} has B and W; write X for both in one")
    if keep is not None and R not in kinds:
        raise ValueError(
            f"{path} has no R, so there is nothing to recompute; add R before each backward, or "
            "recompute nothing"
        )
    if keep:
        raise ValueError(
            f"keep = {keep}, but {path} says itself what is recomputed: where it has no R; leave "
            "keep out"
        )
    return order
