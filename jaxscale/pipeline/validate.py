"""Validation of pipeline orders; errors draw the order with the offending cell marked."""

import itertools
from collections.abc import Collection, Sequence
from typing import NoReturn

from jaxscale.pipeline_schedules.operations import B, F, Op, Order, W, X

AROUND = 6  # cells drawn on each side of the marked ones

Cell = tuple[int, int]  # rank, column
Unit = tuple[int, int, int]  # micro-batch, stage, segment


def check_order(order: Order) -> None:
    """Checks that every operation exists once, on the rank of its stage.

    Each micro-batch needs, at every stage and for every sequence chunk, F and either X or both B
    and W; R is optional.

    Raises:
      ValueError: an operation is misplaced, repeated or missing.
    """
    cells = _find_cells(order)
    units = itertools.product(
        range(order.microbatches), range(order.stages), range(order.sequence_chunks)
    )
    for unit in units:
        fused = (X, *unit) in cells
        for kind in (F, *((X,) if fused else (B, W))):
            if (kind, *unit) not in cells:
                _raise_missing(order, kind, unit)
        for kind in (B, W):
            if fused and (kind, *unit) in cells:
                cell = cells[kind, *unit]
                _raise_at(order, cell, "is already part of X, which is B and W in one")


def _find_cells(order: Order) -> dict[tuple[int, ...], Cell]:
    """The cell of each (kind, micro-batch, stage, segment), checked to be unique and on its
    rank."""
    home = [[order.rank_of(s, d) for s in range(order.stages)] for d in (0, 1)]
    cells: dict[tuple[int, ...], Cell] = {}
    entered: dict[int, int] = {}
    for rank, row in enumerate(order.rows):
        for column, op in enumerate(row):
            wanted = home[op.direction][op.stage]
            if wanted != rank:
                problem = f"is on rank {rank}, but stage {op.stage} is on rank {wanted}"
                _raise_at(order, (rank, column), problem)
            if entered.setdefault(op.microbatch, op.direction) != op.direction:
                problem = f"has another direction than the rest of micro-batch {op.microbatch}"
                _raise_at(order, (rank, column), problem)
            if cells.setdefault(op[:4], (rank, column)) != (rank, column):
                _raise_at(order, (rank, column), "is repeated")
    return cells


def _raise_at(order: Order, cell: Cell, problem: str) -> NoReturn:
    """Raises ValueError about the operation in a cell of the order."""
    rows = [[str(op) for op in row] for row in order.rows]
    op = rows[cell[0]][cell[1]]
    raise ValueError(f"{order.name}: {op} {problem}\n{draw_cells(rows, {cell})}")


def _raise_missing(order: Order, kind: int, unit: Unit) -> NoReturn:
    microbatch, stage, segment = unit
    directions = {op.microbatch: op.direction for row in order.rows for op in row}
    op = Op(kind, microbatch, stage, segment, directions.get(microbatch, 0))
    rank = order.rank_of(stage, op.direction)
    rows = [[str(op) for op in row] for row in order.rows]
    rows[rank].append(str(op))
    hint = "; X is B and W in one" if kind in (B, W) else ""
    raise ValueError(
        f"{order.name}: {op} is missing on rank {rank}; there are {order.microbatches} "
        f"micro-batches, {order.stages} stages and {order.sequence_chunks} sequence chunks{hint}\n"
        f"{draw_cells(rows, {(rank, len(rows[rank]) - 1)})}"
    )


def raise_deadlock(order: Order, ticks: dict[Op, int], waits: dict[Op, Op]) -> NoReturn:
    """Raises ValueError with a cycle of operations that wait for each other.

    Args:
      ticks: of the operations that could run.
      waits: for the next operation of each stuck rank, one that it needs.
    """
    stuck = {order.rank_of(op.stage, op.direction): op for op in waits}
    ring = [next(iter(waits))]
    while ring.count(ring[-1]) == 1:
        need = waits[ring[-1]]
        ring.append(stuck[order.rank_of(need.stage, need.direction)])
    ring = ring[ring.index(ring[-1]) : -1]
    reasons = [
        f"rank {order.rank_of(op.stage, op.direction)} is at {op}, which needs {waits[op]}"
        for op in ring
    ]
    stop = max(ticks.values(), default=-1) + 1
    rows = [["."] * (stop + 1) for _ in order.rows]
    for op, tick in ticks.items():
        rows[order.rank_of(op.stage, op.direction)][tick] = str(op)
    for rank, op in stuck.items():
        rows[rank][stop] = str(op)
    drawn = draw_cells(rows, {(order.rank_of(op.stage, op.direction), stop) for op in ring})
    raise ValueError(
        f"{order.name}: the order deadlocks: {'; '.join(reasons)} (drawn in ticks, as far as it "
        f"runs)\n{drawn}"
    )


def draw_cells(rows: Sequence[Sequence[str]], marked: Collection[Cell]) -> str:
    """A line per rank: the marked cells between > and <, and nearby cells."""
    low = max(0, min(column for _, column in marked) - AROUND)
    high = max(column for _, column in marked) + AROUND + 1
    width = max(len(cell) for row in rows for cell in row[low:high])
    lines = []
    for rank, row in enumerate(rows):
        cells = [
            f">{cell:^{width}}<" if (rank, column) in marked else f" {cell:^{width}} "
            for column, cell in enumerate(row[low:high], low)
        ]
        before, after = " ..." * (low > 0), " ..." * (high < len(row))
        lines.append(f"  rank {rank:<3}|{before}{''.join(cells)}{after}".rstrip())
    return "\n".join(lines)
