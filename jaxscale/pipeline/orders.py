"""Pipeline orders: the operations of each rank, with a fused or split backward pass and selective
recomputation."""

import bisect
import pathlib
from collections.abc import Mapping

from jaxscale.pipeline.schedule_csv import read_csv
from jaxscale.pipeline_schedules.operations import B, F, Op, Order, R, Rows, W, X
from jaxscale.pipeline_schedules.schedule import NUMBERS, Schedule
from jaxscale.pipeline_schedules.shipped import find_schedule


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
    """The order of a shipped or custom schedule, or from a .csv file.

    >>> [str(op) for op in make_order("1f1b", 2, 2).rows[1]]
    ['1F0', '1B0', '1W0', '1F1', '1B1', '1W1']

    Args:
      name: as in `find_schedule`, or a path.
      stages: ranks on the pipeline axis; None only for a file, which contains them.
      microbatches: per step; None only for a file.
      virtual_stages: chunks per rank; None is the schedule's default.
      sequence_chunks: segments of a micro-batch; None is whole sequences.
      fused: whether the backward pass is one operation X in place of B and W.
      keep: passes whose residuals a rank saves at a time (see `keep_passes`); all others have an R
        before their backward. None is no R, or those of a file.

    Raises:
      ValueError: an unknown name, or numbers that the schedule does not support; names the nearest
        supported ones.
    """
    numbers = dict(zip(NUMBERS, (stages, microbatches, virtual_stages, sequence_chunks)))
    for key, number in {**numbers, "keep": keep}.items():
        least = 0 if key == "keep" else 1
        if number is not None and number < least:
            raise ValueError(f"{key} = {number}; at least {least}")
    if pathlib.PurePath(name).suffix == ".csv":
        return _order_from_file(name, numbers, fused, keep)
    schedule = find_schedule(name)
    if stages is None or microbatches is None:
        raise ValueError(
            f"{name} needs stages (ranks) and microbatches; got stages = {stages}, "
            f"microbatches = {microbatches}"
        )
    v, k = virtual_stages or schedule.virtual_stages, sequence_chunks or 1
    rows = _make_rows(name, schedule, (stages, microbatches, v, k), fused)
    if keep is not None:
        rows = keep_passes(add_recompute(rows), keep)
    return Order(name, tuple(map(tuple, rows)), microbatches, v, k, schedule.stage_to_rank)


def _make_rows(name: str, schedule: Schedule, numbers: tuple[int, ...], fused: bool) -> Rows:
    """The rows of ranks, with separate B and W unless `fused`."""
    schedule.check(name, *numbers)
    if fused and schedule.splits_backward:
        raise ValueError(
            f"fused = True, but {name} has separate input and weight gradients; leave fused out, "
            "or use another schedule such as 1f1b"
        )
    rows = schedule.make_rows(*numbers)
    if len(rows) != numbers[0]:
        raise ValueError(f"{name} makes the rows of {len(rows)} ranks for stages = {numbers[0]}")
    return rows if fused or schedule.splits_backward else split_backward(rows)


def split_backward(rows: Rows) -> Rows:
    """Replaces every X by B and W, so that the input's gradient is sent while W runs."""
    return [
        [
            part
            for op in row
            for part in ((op._replace(kind=B), op._replace(kind=W)) if op.kind == X else (op,))
        ]
        for row in rows
    ]


def add_recompute(rows: Rows) -> Rows:
    """Inserts an R before every backward; R can run before the gradient arrives."""
    result: Rows = []
    for row in rows:
        result.append([])
        for op in row:
            if op.kind in (B, X):
                # Before the pair if the backward is paired with the forward before it.
                result[-1].insert(len(result[-1]) - op.paired, op._replace(kind=R, paired=0))
            result[-1].append(op)
    return result


def keep_passes(rows: Rows, keep: int) -> Rows:
    """Selective recomputation by micro-batch: drops as many R as possible if a rank saves up to
    `keep` passes at a time (Korthikanti et al., arXiv 2205.05198, appendix C).

    A rank near the end of the pipeline has fewer passes in flight and recomputes fewer. The choice
    is interval colouring: in the order of their ends, each pass takes the slot freed last before
    it begins.

    Raises:
      ValueError: no pass would be recomputed.
    """
    result = [_keep(row, keep) for row in rows]
    if not any(op.kind == R for row in result for op in row):
        raise ValueError(
            f"keep = {keep}, and no rank has more passes in flight, so nothing would be "
            "recomputed; keep fewer, or recompute nothing"
        )
    return result


def _keep(row: list[Op], keep: int) -> list[Op]:
    begins = {op[1:4]: n for n, op in enumerate(row) if op.kind == F}
    ends = {op[1:4]: n for n, op in enumerate(row) if op.kind in (W, X)}
    kept, free = set(), [-1] * keep  # the ends after which each slot is free, sorted
    for unit, end in ends.items():
        slot = bisect.bisect_left(free, begins[unit]) - 1
        if slot >= 0:
            kept.add(unit)
            free.pop(slot)
            free.append(end)
    return [op for op in row if op.kind != R or op[1:4] not in kept]


def _order_from_file(
    path: str, numbers: Mapping[str, int | None], fused: bool, keep: int | None
) -> Order:
    order = read_csv(path)
    actual = (order.ranks, order.microbatches, order.virtual_stages, order.sequence_chunks)
    for (key, number), found in zip(numbers.items(), actual):
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
            f"keep = {keep}, but the R operations in {path} decide what is recomputed; leave keep "
            "out"
        )
    return order
