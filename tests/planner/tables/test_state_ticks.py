"""Ticks with gathers and reductions are those of the program that the executor scans."""

import pytest

from jaxscale.pipeline.buffer_slots import make_program
from jaxscale.pipeline_schedules.operations import B, X
from jaxscale.planner.tables.state_ticks import TickCollectives, state_ticks
from jaxscale.planner.tables.table_makespan import TableSpec, pipeline_table

SPECS = [
    TableSpec("1f1b", 4, 17),
    TableSpec("gpipe", 3, 12),
    TableSpec("interleaved", 4, 16, 2),
    TableSpec("interleaved", 3, 36, 3, fused=True),
    TableSpec("interleaved", 4, 32, 2, keep=0),
    TableSpec("breadth_first", 4, 16, 2),
    TableSpec("interleaved", 4, 72, 2),
    TableSpec("zb_h1", 4, 41),
    TableSpec("zb_h2", 3, 46),
    TableSpec("zb_v", 4, 61, 2),
    TableSpec("zb_v", 4, 12, 2, keep=2),
    TableSpec("bitpipe", 4, 40, 2, fused=True),
    TableSpec("dualpipe", 4, 40),
    TableSpec("dualpipe_v", 4, 41, 2),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.schedule}-{spec.microbatches}")
def test_ticks_are_as_much_longer_as_what_happens_in_them(spec):
    program = make_program(pipeline_table(spec)).columns
    kind, stage = program["kind"], program["stage"]
    backward = (kind == B) | (kind == X)
    first, last = backward & (stage == 0), backward & (stage == spec.stages - 1)
    gathers, reduces = program["gather"] == 1, program["reduce"] == 1
    for each in (
        TickCollectives(2.0, 3.0, 0.5),
        TickCollectives(0.0, 1.0, 0.0),
        TickCollectives(0.0, 0.0, 0.0, embedding=0.5, head_slice=0.25),
    ):
        longer = (each.gather * gathers + each.reduce * reduces).sum(axis=2).max(axis=1)
        longer += each.outer * (first | last).any(axis=(1, 2))
        longer += each.embedding * first.any(axis=(1, 2))
        longer += each.head_slice * last.sum(axis=(1, 2))
        assert state_ticks(spec).seconds(each) == pytest.approx(longer.sum())


def test_chunks_alternate_in_most_ticks():
    """Of 398 and 391, over eight ranks; breadth first a rank has each chunk once in each pass."""
    found = {
        name: state_ticks(TableSpec(name, 8, 64, 2))
        for name in ("interleaved", "zb_v", "breadth_first")
    }
    ticks = {name: (n.gathers + n.separate, n.reduces + n.separate) for name, n in found.items()}
    assert ticks == {"interleaved": (341, 128), "zb_v": (372, 363), "breadth_first": (24, 16)}
