"""CSV files of pipeline orders: a row per rank, an operation per cell, empty cells anywhere."""

import csv
import io
import pathlib
import re

from jaxscale.pipeline_schedules.operations import LETTERS, F, Op, Order, X, loop, zigzag


def write_csv(order: Order) -> str:
    """An order as CSV text, with an overlapped pair as "0F3+3X5"."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in order.rows:
        cells: list[str] = []
        for op in row:
            if op.paired:
                cells[-1] += f"+{op}"
            else:
                cells.append(str(op))
        writer.writerow(cells)
    return text.getvalue()


def read_csv(path: str) -> Order:
    """Reads an order; its largest indices determine stages and micro-batches.

    `compile_order` checks that it is complete and can run.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: a cell that is not an operation, or stages that do not divide over the rows.
    """
    rows = _read_rows(path)
    ops = [op for row in rows for op in row]
    if not ops:
        raise ValueError(
            f"{path} has no operations; write a row of cells such as 0F0 for each rank"
        )
    for op in ops:
        if max(op.stage, op.microbatch, op.segment) >= len(ops):
            raise ValueError(f"{path}: {op} is beyond a file of {len(ops)} operations")
    stages = 1 + max(op.stage for op in ops)
    if stages % len(rows):
        raise ValueError(
            f"{path} has {stages} stages on {len(rows)} ranks (a row each); the stages must be a "
            f"multiple of the ranks, such as {-(-stages // len(rows)) * len(rows)}"
        )
    orders = [
        Order(
            name=path,
            rows=rows,
            microbatches=1 + max(op.microbatch for op in ops),
            virtual_stages=stages // len(rows),
            sequence_chunks=1 + max(op.segment for op in ops),
            stage_to_rank=stage_to_rank,
        )
        for stage_to_rank in (loop, zigzag)
    ]
    return min(orders, key=_misplaced)


def _read_rows(path: str) -> tuple[tuple[Op, ...], ...]:
    try:
        with pathlib.Path(path).open(encoding="utf-8-sig", newline="") as file:
            lines = list(enumerate(csv.reader(file), 1))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not CSV text: {error}") from None
    return tuple(
        tuple(
            op
            for column, cell in enumerate(cells, 1)
            for op in _parse_cell(cell, f"{path}, row {number}, cell {column}")
        )
        for number, cells in lines
        if any(cell.strip() for cell in cells)
    )


def _misplaced(order: Order) -> int:
    return sum(
        order.rank_of(op.stage, op.direction) != rank
        for rank, row in enumerate(order.rows)
        for op in row
    )


def _parse_cell(cell: str, where: str) -> list[Op]:
    texts = [text.strip() for text in cell.split("+")] if cell.strip() else []
    ops = []
    for text in texts:
        match = re.fullmatch(r"(\d+)([FRBWX])(\d+)(?:\.(\d+))?(\^?)", text, re.ASCII)
        if not match:
            raise ValueError(
                f"{where}: {text!r} is not an operation; write stage, kind, micro-batch, as in 2F0 "
                "(kinds: F forward, R recompute, B input gradient, W weight gradient, X both "
                "gradients), then .1 for sequence chunk 1, then ^ for the direction that enters "
                "at the last rank"
            )
        stage, kind, microbatch, segment, up = match.groups()
        op = Op(LETTERS.index(kind), int(microbatch), int(stage), int(segment or 0), int(up == "^"))
        ops.append(op._replace(paired=int(bool(ops))))
    if len(ops) > 1 and [op.kind for op in ops] != [F, X]:
        raise ValueError(
            f"{where}: {cell!r} is not an overlapped pair; write a forward and a backward, as "
            "0F3+3X5"
        )
    return ops
