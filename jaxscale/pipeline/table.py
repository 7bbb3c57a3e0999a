"""Pipeline tables: an order compiled to operations with ticks and dependencies.

The simulator, the planner, the drawings and the executor all read it. NumPy only.
Array shapes: N operations, ordered by rank. A step here is a rank's work in a tick: one operation,
or an overlapped pair.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxscale.pipeline.validate import check_order, raise_deadlock
from jaxscale.pipeline_schedules.operations import B, F, Op, Order, R, W, X


class Ops(NamedTuple):
    """The fields of `Op` for all operations, int [N] each, and their ranks."""

    kind: np.ndarray
    microbatch: np.ndarray
    stage: np.ndarray
    segment: np.ndarray
    direction: np.ndarray
    paired: np.ndarray
    rank: np.ndarray


@dataclass(frozen=True, eq=False)
class Table:
    """A complete order without deadlock, and the tick of each operation."""

    order: Order
    ops: Ops
    needs: np.ndarray  # int [N, 4], operations that must have ended; -1 is none
    step: np.ndarray  # int [N], counted over all ranks
    tick: np.ndarray  # int [N]

    @property
    def ticks(self) -> int:
        return int(self.tick.max()) + 1


def compile_order(order: Order, *, complete: bool = False) -> Table:
    """Assigns every operation the earliest tick that its rank's order and its needs allow.

    A rank does one step per tick, and its result is available from the next tick.

    Args:
      complete: whether the order is known to have every operation once, as shipped schedules do;
        the check takes as long as the rest of this function.

    Raises:
      ValueError: an operation is misplaced, repeated or missing, or the order deadlocks; the
        message draws the order around the offending cell.
    """
    if not complete:
        check_order(order)
    ops = _flatten(order)
    needs = _find_needs(order, ops)
    step = np.cumsum(ops.paired == 0) - 1
    ends = replay(ops.rank, step, needs, np.ones(step[-1] + 1))
    if np.isinf(ends).any():
        _explain_deadlock(order, ops, needs, ends)
    return Table(order, ops, needs, step, ends.astype(np.int64) - 1)


def _flatten(order: Order) -> Ops:
    """All operations as arrays, ordered by rank."""
    lengths = [len(row) for row in order.rows]
    numbers = itertools.chain.from_iterable(itertools.chain.from_iterable(order.rows))
    fields = np.fromiter(numbers, np.int64).reshape(-1, len(Op._fields))
    return Ops(*fields.T, rank=np.repeat(np.arange(order.ranks), lengths))


def _find_needs(order: Order, ops: Ops) -> np.ndarray:
    """int [N, 4]: F needs F of the previous stage and of the previous segment. B and X need F and R
    of the same pass, and the backward of the next stage and of the next segment. R needs F, W needs
    B."""
    # Position of every operation, with a border of -1 around stages and segments.
    shape = X + 1, order.microbatches, order.stages + 2, order.sequence_chunks + 2
    where = np.full(shape, -1)
    where[ops.kind, ops.microbatch, ops.stage + 1, ops.segment + 1] = np.arange(len(ops.kind))
    backward = np.maximum(where[B], where[X])

    def at(grid: np.ndarray, stage: int = 0, segment: int = 0) -> np.ndarray:
        return grid[ops.microbatch, ops.stage + 1 + stage, ops.segment + 1 + segment]

    forward = at(where[F])
    # A segment attends to keys and values of earlier segments in the same stage, and gets their
    # gradients from later segments.
    needs = np.full((len(ops.kind), 4), -1)
    for kinds, columns in (
        ((F,), [at(where[F], stage=-1), at(where[F], segment=-1)]),
        ((R,), [forward]),
        ((B, X), [forward, at(where[R]), at(backward, stage=1), at(backward, segment=1)]),
        ((W,), [at(where[B])]),
    ):
        rows = np.isin(ops.kind, kinds)
        needs[rows, : len(columns)] = np.stack(columns, axis=1)[rows]
    return needs


def is_head(table: Table) -> np.ndarray:
    """bool [N], the operations that begin with the gradient of the head."""
    kind, stage = table.ops.kind, table.ops.stage
    return ((kind == B) | (kind == X)) & (stage == table.order.stages - 1)


def replay(
    rank: np.ndarray, step: np.ndarray, needs: np.ndarray, durations: np.ndarray
) -> np.ndarray:
    """Runs every rank's steps in order, each as soon as its needs have ended.

    Args:
      rank, step, needs: as in a Table.
      durations: float [steps].

    Returns:
      float [N], the end time of each operation; infinite if it never starts because of a deadlock.
    """
    opens = np.diff(step, prepend=-1) == 1
    waits = np.where(needs >= 0, step[needs], -1)
    waits_of = waits[opens].tolist()
    for n in np.flatnonzero(~opens):
        waits_of[step[n]] += waits[n].tolist()
    bounds = np.searchsorted(rank[opens], np.arange(rank[-1] + 2)).tolist()
    lasts = durations.tolist()

    # A need of -1 reads the extra last entry, which ends at 0.
    ends = [np.inf] * len(lasts) + [0.0]
    cursors, free = bounds[:-1], [0.0] * (len(bounds) - 1)
    moved = True
    while moved:
        moved = False
        for r, stop in enumerate(bounds[1:]):
            n = cursors[r]
            while n < stop:
                start = max(free[r], *[ends[need] for need in waits_of[n]])
                if start == np.inf:
                    break
                ends[n] = free[r] = start + lasts[n]
                n += 1
            moved |= n > cursors[r]
            cursors[r] = n
    return np.array(ends[:-1])[step]


def _explain_deadlock(order: Order, ops: Ops, needs: np.ndarray, ends: np.ndarray) -> None:
    every = [op for row in order.rows for op in row]
    ticks = {every[n]: int(ends[n]) - 1 for n in np.flatnonzero(np.isfinite(ends))}
    waits = {}
    for r in range(order.ranks):
        # A pair also waits for the needs of its second half.
        for n in np.flatnonzero((ops.rank == r) & np.isinf(ends))[:2]:
            blocking = [int(need) for need in needs[n] if need >= 0 and np.isinf(ends[need])]
            if blocking:
                waits[every[n]] = every[blocking[0]]
                break
    raise_deadlock(order, ticks, waits)
