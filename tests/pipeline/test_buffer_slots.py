"""The executor's columns, proved by executing them with names in place of arrays."""

import itertools

import pytest

from jaxscale.pipeline.buffer_slots import count_slots, make_program, of_part
from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.simulator import peak_stash
from jaxscale.pipeline.table import compile_order
from jaxscale.pipeline_schedules.operations import NOP, B, F, R, W, X
from jaxscale.pipeline_schedules.shipped import find_schedule

CASES = [
    ("gpipe", 3, 5, 1, 1),
    ("1f1b", 4, 8, 1, 1),
    ("1f1b", 4, 2, 1, 1),
    ("interleaved", 2, 4, 3, 1),
    ("interleaved", 4, 8, 2, 1),
    ("breadth_first", 3, 2, 3, 1),
    ("breadth_first", 1, 3, 2, 1),
    ("seq1f1b", 3, 4, 1, 3),
    ("seq1f1b_interleaved", 2, 4, 2, 3),
    ("chimera", 4, 8, 1, 1),
    ("bitpipe", 4, 8, 2, 1),
    ("zb_h1", 4, 8, 1, 1),
    ("zb_h2", 3, 7, 1, 1),
    ("zb_v", 2, 5, 2, 1),
    ("zb_v", 4, 8, 2, 1),
    ("dualpipe", 6, 14, 1, 1),
    ("dualpipe_v", 3, 7, 2, 1),
]


OWN_SLOTS = ("inbox", "input", "residual_b", "residual_w", "cotangent")
"""Of each part of a segment."""


def program_of(name, *numbers, **options):
    order = make_order(name, *numbers, **options)
    return order, make_program(compile_order(order))


def execute(order, program, most_parts=1):
    """Runs the columns as an executor would and returns the operations done, by parts.

    Every buffer holds names: what was put there, by kind and unit.
    """
    columns, slots = program.columns, program.slots
    ticks, ranks, lanes = columns["kind"].shape
    buffers = [
        {name: [None] * (size + (name == "inbox")) for name, size in slots.items()}
        for _ in range(ranks)
    ]
    recompute = (columns["kind"] == R).any()
    done = []
    for t in range(ticks):
        made = {}
        for r, lane in itertools.product(range(ranks), range(lanes)):
            row = {name: int(column[t, r, lane]) for name, column in columns.items()}
            if row["kind"] == NOP:
                continue
            keeps = row["kind"] == R and row["input"] < 0  # an F that keeps its residuals
            kind = F if keeps else row["kind"]
            row["kind"] = kind
            recomputed = recompute and not keeps
            parts = range(row["parts"])
            for part in reversed(parts) if kind in (B, X) else parts:
                slots = {name: row[of_part(name, part)] for name in OWN_SLOTS}
                mine = {**row, **slots, "segment": row["segment"] + part}
                unit = mine["microbatch"], mine["segment"], mine["direction"]
                made[r, lane, part] = operate(mine, unit, buffers[r], order.stages, recomputed)
                done.append((kind, mine["microbatch"], mine["stage"], mine["segment"]))
        for r, lane, part in itertools.product(range(ranks), range(lanes), range(most_parts)):
            for channel, hop in (("from_left", -1), ("from_right", 1), ("from_self", 0)):
                slot = columns[of_part(channel, part)][t, r, lane]
                message = made.get(((r + hop) % ranks, lane, part), "garbage")
                buffers[r]["inbox"][slot] = message
    return done


def operate(row, unit, buffers, stages, recompute):
    """Reads and writes one rank's buffers for one operation; returns what it sends."""
    kind, stage = row["kind"], row["stage"]

    def read(name):
        return buffers[name][row[name]]

    def write(name, value):
        buffers[name][row[name]] = value

    if kind == F:
        if stage > 0:
            assert read("inbox") == ("activation", stage, *unit)
        if recompute:
            write("input", ("input", stage, *unit))
    if kind == R:
        assert read("input") == ("input", stage, *unit)
    if kind == R or (kind == F and not recompute):
        write("residual_b", ("residual", stage, *unit))
        write("residual_w", ("residual", stage, *unit))
    if kind in (B, X):
        came = ("activation", stage + 1) if stage == stages - 1 else ("gradient", stage)
        assert read("inbox") == (*came, *unit)
        assert read("residual_b") == ("residual", stage, *unit)
        assert read("residual_w") == ("residual", stage, *unit)
    if kind == B:
        write("cotangent", ("cotangent", stage, *unit))
    if kind == W:
        assert read("residual_w") == ("residual", stage, *unit)
        assert read("cotangent") == ("cotangent", stage, *unit)
    if "memory" in row:
        use_memory(row, buffers, again=recompute and kind == R)
    return {F: ("activation", stage + 1, *unit)}.get(kind, ("gradient", stage - 1, *unit))


def use_memory(row, buffers, again):
    """What a segment reads of others, and leaves to them."""
    chunk, segment = (row["microbatch"], row["stage"]), row["segment"]
    if row["kind"] == W:
        return
    memory, gradient = (buffers[name][row[name]] for name in ("memory", "memory_gradient"))
    if row["kind"] in (F, R):
        earlier = memory if segment or again else (chunk, set())
        assert earlier[0] == chunk
        assert earlier[1] >= set(range(segment))
        buffers["memory"][row["memory"]] = chunk, earlier[1] | {segment}
    if row["kind"] in (B, X):
        assert memory[0] == chunk
        later = gradient if segment + 1 < len(memory[1]) else (chunk, set())
        assert later == (chunk, set(range(segment + 1, len(memory[1]))))
        buffers["memory_gradient"][row["memory_gradient"]] = chunk, later[1] | {segment}


@pytest.mark.parametrize("options", [{}, {"keep": 0}, {"keep": 1}, {"fused": True}], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_operation_reads_what_was_made_for_it(case, options):
    if options.get("fused") and find_schedule(case[0]).splits_backward:
        options = {"keep": 0}
    order, program = program_of(*case, **options)
    done = execute(order, program)
    assert sorted(done) == sorted(op[:4] for row in order.rows for op in row)


@pytest.mark.parametrize("options", [{}, {"keep": 0}, {"keep": 2}, {"fused": True}], ids=str)
@pytest.mark.parametrize(
    ("case", "parts"),
    [(("seq1f1b", 3, 4, 1, 3), (3, 2, 1)), (("seq1f1b_interleaved", 2, 4, 2, 2), (1, 4))],
    ids=str,
)
def test_each_part_of_a_segment_has_slots_of_its_own(case, parts, options):
    order = make_order(*case, **options)
    table = compile_order(order)
    program = make_program(table, parts)
    done = execute(order, program, max(parts))
    wanted = [
        (*op[:3], sum(parts[: op.segment]) + part)
        for row in order.rows
        for op in row
        for part in range(parts[op.segment])
    ]
    assert sorted(done) == sorted(wanted)
    most = {name: counts.max(initial=0) for name, counts in count_slots(table, parts).items()}
    assert most == program.slots


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_residual_slots_are_the_peak_stash(case):
    table = compile_order(make_order(*case))
    assert make_program(table).slots["residual_w"] == peak_stash(table).max()


@pytest.mark.parametrize(
    ("name", "v", "residual_b", "cotangent", "inbox", "gathers", "reduces"),
    [
        ("gpipe", 1, 8, 1, 8, 1, 1),
        ("zb_h1", 1, 4, 4, 2, 1, 1),
        ("interleaved", 2, 11, 1, 4, 19, 4),
        ("breadth_first", 2, 16, 1, 8, 3, 2),
        ("zb_v", 2, 8, 8, 3, 23, 16),
    ],
)
def test_slots_and_weight_traffic(name, v, residual_b, cotangent, inbox, gathers, reduces):
    """At 4 ranks and 8 micro-batches; gathers and reductions of the busiest rank."""
    _, program = program_of(name, 4, 8, v)
    assert program.slots == {
        "inbox": inbox,
        "input": 0,
        "residual_b": residual_b,
        "residual_w": residual_b,
        "cotangent": cotangent,
    }
    assert (program.columns["gather"] == 1).sum(axis=(0, 2)).max() == gathers
    assert (program.columns["reduce"] == 1).sum(axis=(0, 2)).max() == reduces


def test_slots_do_not_grow_with_the_micro_batches_of_1f1b():
    few, many = (program_of("1f1b", 4, m)[1].slots for m in (16, 32))
    assert few == many
    assert program_of("gpipe", 4, 32)[1].slots["residual_b"] == 32


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_recompute_keeps_inputs_in_place_of_residuals(keep):
    _, program = program_of("1f1b", 4, 8, keep=keep)
    residuals = {"residual_b": keep + 1, "residual_w": keep + 1}
    assert program.slots == {"inbox": 2, "input": 4 - keep, **residuals, "cotangent": 1}
