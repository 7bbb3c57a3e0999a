"""Orders from files, errors in them, and the ticks of valid ones."""

import numpy as np
import pytest

from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.schedule_csv import read_csv, write_csv
from jaxscale.pipeline.table import compile_order
from jaxscale.pipeline_schedules.operations import Op, Order, loop, zigzag

CASES = [
    ("1f1b", 4, 8, 1, 1),
    ("interleaved", 3, 6, 2, 1),
    ("seq1f1b_interleaved", 2, 4, 2, 3),
    ("chimera", 4, 8, 1, 1),
    ("bitpipe", 4, 4, 2, 1),
    ("zb_v", 3, 6, 2, 1),
    ("dualpipe", 4, 8, 1, 1),
    ("dualpipe_v", 2, 5, 2, 1),
]


def compile_text(tmp_path, text):
    path = tmp_path / "order.csv"
    path.write_text(text)
    return compile_order(read_csv(str(path)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_text_round_trip(tmp_path, case):
    order = make_order(*case, keep=0 if case[0] == "1f1b" else None)
    path = tmp_path / "order.csv"
    path.write_text(write_csv(order))
    read = read_csv(str(path))
    assert read.rows == order.rows
    assert (read.microbatches, read.virtual_stages, read.sequence_chunks) == case[2:]
    # With one chunk a rank every placement is the same.
    assert read.stage_to_rank is order.stage_to_rank or case[3] == 1
    assert (compile_order(read).tick == compile_order(order).tick).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_ticks(case):
    """Every need ends before; a rank has one step a tick; no step could be earlier."""
    table = compile_order(make_order(*case))
    ops, tick = table.ops, table.tick
    needed = np.where(table.needs >= 0, tick[table.needs], -1)
    assert (needed < tick[:, None]).all()
    assert ((np.diff(tick) > 0) | (np.diff(ops.rank) > 0) | (ops.paired[1:] == 1)).all()
    for step in range(table.step.max() + 1):
        members = np.flatnonzero(table.step == step)
        first = members[0]
        before = tick[first - 1] if first and ops.rank[first - 1] == ops.rank[first] else -1
        assert (tick[members] == 1 + max(before, needed[members].max())).all()


def test_needs_of_segments():
    """Keys and values go to later segments, their gradients to earlier ones, chunk by chunk."""
    order = make_order("seq1f1b", 2, 1, 1, 2)
    table = compile_order(order)
    every = [op for row in order.rows for op in row]
    needs = {str(op): {str(every[n]) for n in row if n >= 0} for op, row in zip(every, table.needs)}
    assert needs["0F0"] == set()
    assert needs["1F0.1"] == {"0F0.1", "1F0"}
    assert needs["1B0.1"] == {"1F0.1"}
    assert needs["0B0"] == {"0F0", "1B0", "0B0.1"}
    assert needs["0W0"] == {"0B0"}


BROKEN = {
    "repeated": (
        "0F0,0F0,0B0,0W0\n1F0,1B0,1W0\n",
        "0F0 is repeated",
        "rank 0  | 0F0 >0F0< 0B0  0W0\n  rank 1  | 1F0  1B0  1W0",
    ),
    "missing": (
        "0F0,0B0,0W0\n1F0,1B0\n",
        "1W0 is missing on rank 1; there are 1 micro-batches, 2 stages",
        "rank 0  | 0F0  0B0  0W0\n  rank 1  | 1F0  1B0 >1W0<",
    ),
    "misplaced": (
        "0F0,1F0,0X0\n1X0\n",
        "1F0 is on rank 0, but stage 1 is on rank 1",
        "rank 0  | 0F0 >1F0< 0X0\n  rank 1  | 1X0",
    ),
    "both": (
        "0F0,0X0,0W0\n1F0,1X0\n",
        "0W0 is already part of X, which is B and W in one",
        "rank 0  | 0F0  0X0 >0W0<\n  rank 1  | 1F0  1X0",
    ),
    "backward before forward": (
        "0F0,0X0,0F1,0X1\n1X0,1F0,1F1,1X1\n",
        "rank 1 is at 1X0, which needs 1F0",
        "rank 0  | 0F0  0X0\n  rank 1  |  .  >1X0<",
    ),
    "deadlock": (
        "0F0,0X0,0F1,0X1\n1F1,1X1,1F0,1X0\n",
        "rank 0 is at 0X0, which needs 1X0; rank 1 is at 1F1, which needs 0F1",
        "rank 0  | 0F0 >0X0<\n  rank 1  |  .  >1F1<",
    ),
    "two directions": (
        "0F0,1F0^,1X0^,0X0\n1F0,0F0^\n",
        "1F0^ has another direction than the rest of micro-batch 0",
        "rank 0  | 0F0  >1F0^< 1X0^  0X0",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_order_is_drawn_with_the_offending_cell(tmp_path, case):
    text, problem, drawn = BROKEN[case]
    with pytest.raises(ValueError, match=r"order\.csv") as raised:
        compile_text(tmp_path, text)
    assert problem in str(raised.value)
    assert drawn in str(raised.value)


def test_only_what_is_near_the_offending_cell_is_drawn():
    rows = make_order("1f1b", 4, 64).rows
    rows = (rows[0], rows[1][:60] + rows[1][59:], *rows[2:])
    with pytest.raises(ValueError, match="is repeated") as raised:
        compile_order(Order("order", rows, 64, 1, 1, loop))
    head, *lines = str(raised.value).splitlines()
    assert len(lines) == 4
    assert all(line.count("...") == 2 and len(line) < 120 for line in lines)
    op = head.split()[1]
    assert f">{op}<" in lines[1].replace(" ", "")


def test_a_pair_may_be_what_deadlocks():
    """The backward half of an overlapped pair waits, for its own forward half."""
    rows = ((Op(1, 0, 0), Op(5, 0, 0, paired=1)),)
    with pytest.raises(ValueError, match="rank 0 is at 0X0, which needs 0F0"):
        compile_order(Order("pair", rows, 1, 1, 1, loop))


UNREADABLE = {
    "0F0,0G0\n": "row 1, cell 2: '0G0' is not an operation; write stage, kind, micro-batch",
    "0F0,F0\n": "'F0' is not an operation",
    "0F0,-1X0\n": "'-1X0' is not an operation",
    "\n\n0F0,0X0,0x1\n": "row 3, cell 3: '0x1'",
    "": "has no operations",
    ",,\n,\n": "has no operations",
    "0F0,0X99999999999999\n": "0X99999999999999 is beyond a file of 2 operations",
    "0F0,1F0,2F0,2X0,1X0\n0X0\n": "has 3 stages on 2 ranks",
    "0F0+0F1,0X0\n": "is not an overlapped pair; write a forward and a backward",
    "0F0,0X0+0W0+0B0\n": "is not an overlapped pair; write a forward and a backward",
    "\x000F0\n": "",
}


@pytest.mark.parametrize("text", UNREADABLE, ids=repr)
def test_unreadable_files_are_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"order\.csv") as raised:
        compile_text(tmp_path, text)
    assert UNREADABLE[text] in str(raised.value)


def test_binary_files_are_refused(tmp_path):
    path = tmp_path / "order.csv"
    path.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ValueError, match="is not CSV text"):
        read_csv(str(path))


def test_spaces_blank_cells_and_a_byte_order_mark_are_read(tmp_path):
    table = compile_text(tmp_path, "\ufeff0F0, ,,0X0\n\n, 1F0 ,1X0,\n")
    assert table.ticks == 4
    assert [str(op) for op in table.order.rows[1]] == ["1F0", "1X0"]


def test_the_placement_is_found_from_the_stages(tmp_path):
    looped = "0F0,2F0,2X0,0X0\n1F0,3F0,3X0,1X0\n"
    folded = "0F0,3F0,3X0,0X0\n1F0,2F0,2X0,1X0\n"
    assert compile_text(tmp_path, looped).order.stage_to_rank is loop
    assert compile_text(tmp_path, folded).order.stage_to_rank is zigzag
