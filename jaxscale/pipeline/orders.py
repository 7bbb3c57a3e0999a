"""The order that a schedule gives each rank, with the backward pass fused or split and with as
many passes recomputed as is asked for.
"""

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
    """The order of a schedule by name, shipped or foreign, or from a file that ends in .csv.

    >>> [str(op) for op in make_order("1f1b", 2, 2).rows[1]]
    ['1F0', '1B0', '1W0', '1F1', '1B1', '1W1']

    Args:
      name: as with `find_schedule`, or a path.
      stages: ranks on the pipeline axis; None only for a file, which has its own.
      microbatches: per step; likewise.
      virtual_stages: chunks per rank; None for those of the schedule.
      sequence_chunks: segments of a micro-batch; None for whole sequences.
      fused: one operation for the whole backward pass, not B and then W.
      keep: passes whose residuals a rank saves at a time (see `keep_passes`): all others have an R
        before their backward; with 0 every pass has. None for no R, or for those of a file.

    Raises:
      ValueError: an unknown name, or numbers that the schedule does not support, with the nearest
        that it does.
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
    """The rows of ranks, with B and W apart unless they are `fused`."""
    schedule.check(name, *numbers)
    if fused and schedule.splits_backward:
        raise ValueError(
            f"fused = True, but {name} is made of separate input and weight gradients; "
            "leave fused out, or take another schedule such as 1f1b"
        )
    rows = schedule.make_rows(*numbers)
    if len(rows) != numbers[0]:
        raise ValueError(f"{name} makes the rows of {len(rows)} ranks for stages = {numbers[0]}")
    return rows if fused or schedule.splits_backward else split_backward(rows)


def split_backward(rows: Rows) -> Rows:
    """Every X as B and then W: the gradient is sent to the rank before while W runs."""
    return [
        [
            part
            for op in row
            for part in ((op._replace(kind=B), op._replace(kind=W)) if op.kind == X else (op,))
        ]
        for row in rows
    ]


def add_recompute(rows: Rows) -> Rows:
    """An R before every backward: it needs no gradient, so it can run before that arrives."""
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
    """Drops the R of as many passes as possible, where a rank saves up to `keep` of them at a time.

    Micro-batch by micro-batch, as in Korthikanti et al. (arXiv 2205.05198, appendix C): a rank near
    the end of the pipeline has fewer in flight, and so recomputes fewer. Which passes to keep is
    interval colouring: in the order of their ends, each takes the place freed last before it.

    Raises:
      ValueError: that would be the R of all passes.
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
            f"keep = {keep}, but {path} decides what is recomputed: the passes that have an R; "
            "leave keep out"
        )
    return order
