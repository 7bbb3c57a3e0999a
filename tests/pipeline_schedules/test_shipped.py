"""Every schedule against its closed forms: time, stash and messages, and its drawn timeline."""

import collections
import functools
import itertools
import math
import pathlib
import random

import pytest

from jaxscale.pipeline import draw
from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.simulator import Costs, simulate
from jaxscale.pipeline.table import compile_order
from jaxscale.pipeline_schedules.operations import zigzag
from jaxscale.pipeline_schedules.shipped import NAMES, SHIPPED, find_schedule

FUSED = [schedule.name for schedule in SHIPPED if not schedule.splits_backward]


@functools.cache
def grid(name):
    """All the numbers that a schedule can serve."""
    sizes = itertools.product(range(1, 17), range(1, 65), range(1, 9), range(1, 9))
    return [n for n in sizes if find_schedule(name).serves(*n)]


def sample(name):
    """Numbers all over the grid, most of them small."""
    weights = [1 / math.prod(numbers) for numbers in grid(name)]
    some = random.Random(name).choices(grid(name), weights, k=30)
    large = [numbers for numbers in grid(name) if 1000 < math.prod(numbers) < 4000]
    return sorted({*some, *random.Random(name).sample(large, min(len(large), 4))})


def large_grid(name, ranks):
    """The grid of so many ranks. That of seq1f1b_interleaved has four fifths of all operations, and
    little is new in them: a chunk runs lcm(ranks, segments) segments at a time, and a rank warms up
    with fewer than three such groups for each chunk, so that after those each group is like the one
    before. It has from one to five groups and the most there are, of all chunks and segments."""
    by_groups = collections.defaultdict(list)
    for numbers in grid(name):
        if numbers[0] == ranks:
            by_groups[numbers[2:]].append(numbers)
    end = 5 if name == "seq1f1b_interleaved" else None
    return [numbers for some in by_groups.values() for numbers in {*some[:end], some[-1]}]


def run(name, numbers, costs=Costs(), **options):  # noqa: B008
    return simulate(compile_order(make_order(name, *numbers, **options)), costs)


def fused_idle(name, p, m, v, k, f, x):
    """Idle time of a rank when the backward is one operation."""
    if name in ("chimera", "bitpipe"):
        return (p - 2) * max(f, x) / v
    waits_between_chunks = (v - 1) * max(0, p - m) if name == "breadth_first" else 0
    return (p - 1 + waits_between_chunks) * (f + x) / (v * k)


def split_idle(name, p, m, v, k, f, b, w):
    """Idle time of a rank when the gradient is sent on before W."""
    if name in ("chimera", "bitpipe"):
        return (p - 2) * max(b, (f + b) / 2, f - w) / v
    if name == "breadth_first":
        waits = max(0, p - m) * f + max(0, p * b - m * (b + w))
        return ((p - 1) * (f + b) + (v - 1) * waits) / v
    return (p - 1) * (f + b) / (v * k)


def given_idle(name, p, m):
    """Idle time of a rank, or the ramps around it, at equal costs."""
    if name in ("zb_h1", "zb_h2"):
        return p - 1 + max(0, p - m)
    return {"zb_v": (p - 1) / 2, "dualpipe": p - 2, "dualpipe_v": p - 1}[name]


def peak_stash(name, p, m, v, k):
    """By rank."""
    group = math.lcm(p, k)
    return {
        "gpipe": lambda r: m,
        "1f1b": lambda r: min(m, p - r),
        "interleaved": lambda r: min(m, ((v - 1) * p + 2 * (p - 1 - r) + 1) / v),
        "breadth_first": lambda r: m,
        "seq1f1b": lambda r: min(m, (p - r + k - 1) / k),
        "seq1f1b_interleaved": lambda r: min(m, ((v - 1) * group + 2 * (p - 1 - r) + k) / (v * k)),
        "zb_h1": lambda r: min(m, p),
        "zb_h2": lambda r: min(m, 2 * p - 1),
        "zb_v": lambda r: p,
        "dualpipe": lambda r: p + 1,
        "dualpipe_v": lambda r: p + 1 / 2,
        # A single block of micro-batches fills them only in part.
        "chimera": lambda r: p if m > p else p / 2 + 1 + min(r, p - 1 - r),
        "bitpipe": lambda r: p if m > p else 3 * p / 4 + 1 / 2 + min(r, p - 1 - r) / 2,
    }[name]


def num_messages(name, p, m, v, k):
    bends = v - 1 if find_schedule(name).stage_to_rank is zigzag else 0
    return 2 * (p * v - 1 - bends) * m * k if p > 1 else 0


def check_fused(name, numbers):
    m = numbers[1]
    for f, b, w in ((1, 1, 1), (5, 2, 1)):
        got = run(name, numbers, Costs(f, b, w), fused=True)
        idle = fused_idle(name, *numbers, f, b + w)
        assert got.makespan == pytest.approx(m * (f + b + w) + idle, rel=1e-12)
        assert got.idle_fraction == pytest.approx(idle / got.makespan, rel=1e-12, abs=1e-12)
        if name in ("gpipe", "breadth_first"):
            assert got.lockstep_makespan == pytest.approx(got.makespan, rel=1e-12)
    check_memory_and_messages(name, numbers, got)


def check_split(name, numbers):
    got = run(name, numbers)
    idle = split_idle(name, *numbers, 1, 1, 1)
    assert got.makespan == pytest.approx(3 * numbers[1] + idle, rel=1e-12)
    assert got.lockstep_makespan == got.makespan
    check_memory_and_messages(name, numbers, got)


def check_recompute(name, numbers):
    p, m, v, k = numbers
    again = run(name, numbers, Costs(r=1), keep=0)
    # Groups of p through several chunks: the ranks that recompute hold up a few others.
    late = name in ("interleaved", "seq1f1b_interleaved") and p % k == 0 and v > 1 and m * k > p
    extra = max(0, p - 4) / (v * k) if late else 0
    # R fills the gaps of a breadth-first order as W does.
    idle = split_idle(name, *numbers, 1, 1, 2 if name == "breadth_first" else 1)
    assert again.makespan == pytest.approx(4 * m + idle + extra, rel=1e-12)
    assert again.lockstep_makespan == again.makespan


def check_given(name, numbers):
    p, m, *_ = numbers
    got = run(name, numbers)
    assert got.makespan == pytest.approx(3 * m + given_idle(name, p, m), rel=1e-12)
    if not name.startswith("dualpipe"):  # whose overlapped pairs are longer than other ticks
        assert got.lockstep_makespan == got.makespan
    check_memory_and_messages(name, numbers, got)


def check_memory_and_messages(name, numbers, got):
    stash = peak_stash(name, *numbers)
    assert got.peak_stash == pytest.approx([stash(r) for r in range(numbers[0])], rel=1e-12)
    assert got.messages == num_messages(name, *numbers)


@pytest.mark.proof(
    but=(
        "zb_h2",
        "dualpipe",
        "dualpipe_v",
        "zb_h1",
        "zb_v",
        "chimera",
        "1f1b",
        "gpipe",
        "interleaved",
    )
)
@pytest.mark.parametrize("name", NAMES)
def test_closed_forms(name):
    for numbers in sample(name):
        if name in FUSED:
            check_fused(name, numbers)
            check_split(name, numbers)
            check_recompute(name, numbers)
        else:
            check_given(name, numbers)


@pytest.mark.proof(but=("8",))
@pytest.mark.parametrize("p", [8, 16, 32])
def test_closed_forms_of_many_ranks(p):
    for schedule in SHIPPED:
        k = 2 if schedule.splits_sequences else 1
        numbers = p, 2 * p, schedule.virtual_stages, k
        assert schedule.serves(*numbers)
        if schedule.name in FUSED:
            check_fused(schedule.name, numbers)
            check_split(schedule.name, numbers)
            check_recompute(schedule.name, numbers)
        else:
            check_given(schedule.name, numbers)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 17))
@pytest.mark.parametrize("name", NAMES)
def test_closed_forms_on_a_large_grid(name, ranks):
    for numbers in large_grid(name, ranks):
        (check_split if name in FUSED else check_given)(name, numbers)


@pytest.mark.parametrize("p", range(2, 17))
def test_fused_1f1b_in_lockstep_pays_for_uneven_ticks(p):
    for m in (p, p + 1, 2 * p + 3, 64):
        assert run("1f1b", (p, m), fused=True).lockstep_makespan == 4 * m + 3 * p - 4


def test_fused_schedules_in_lockstep():
    """At 4 ranks and 8 or 32 micro-batches, in chunks or segments."""
    for name, v, k, short, long in (
        ("interleaved", 2, 1, 68, 260),
        ("interleaved", 4, 1, 124, 508),
        ("seq1f1b", 1, 2, 71, 263),
        ("seq1f1b", 1, 4, 133, 517),
        ("seq1f1b_interleaved", 2, 2, 131, 515),
        ("seq1f1b_interleaved", 2, 4, 257, 1025),
        ("chimera", 1, 1, 29, 101),
    ):
        for m, ticks in ((8, short), (32, long)):
            assert run(name, (4, m, v, k), fused=True).lockstep_makespan * v * k == ticks
    assert run("bitpipe", (4, 4), fused=True).lockstep_makespan * 2 == 28
    assert run("bitpipe", (4, 32), fused=True).lockstep_makespan * 2 == 197


@pytest.mark.proof(but=("1-zb_h2", "3-zb_h2", "4-zb_h2"))
@pytest.mark.parametrize("name", ["zb_h2", "zb_v"])
@pytest.mark.parametrize("p", range(1, 17))
def test_zero_bubble_ranks_never_idle_between_their_first_and_last_operation(name, p):
    for m in (2 * p - 1, 3 * p, 64):
        table = compile_order(make_order(name, p, m))
        got = simulate(table)
        for r in range(p):
            mine = table.ops.rank == r
            busy = (got.start + got.duration)[mine].max() - got.start[mine].min()
            assert busy == 3 * m


def test_zb_h1_idles_by_what_the_weight_gradient_does_not_fill():
    for p, m, (f, b, w) in itertools.product((2, 5, 8), (8, 20), ((1, 1, 1), (2, 3, 2), (2, 1, 1))):
        got = run("zb_h1", (p, m), Costs(f, b, w))
        assert got.makespan == m * (f + b + w) + (p - 1) * (f + b - w)


def test_bidirectional_schedules_with_any_costs():
    for name, p, (f, b, w) in itertools.product(
        ("chimera", "bitpipe"), (4, 6, 8), ((2, 3, 2), (3, 2, 5), (5, 1, 1), (1, 4, 1))
    ):
        got = run(name, (p, 3 * p), Costs(f, b, w))
        v = 2 if name == "bitpipe" else 1
        assert got.makespan == 3 * p * (f + b + w) + split_idle(name, p, 3 * p, v, 1, f, b, w)


def timelines():
    """Schedules at 4 ranks as the papers draw them, from a file: a line of numbers, then rows."""
    text = pathlib.Path(__file__).with_name("timelines.txt").read_text()
    for block in text.split("\n\n"):
        head, _, rows = block.strip().partition("\n")
        name, *numbers = head.removesuffix(" fused").split()
        yield pytest.param(name, numbers, head.endswith(" fused"), rows, id=name)


@pytest.mark.parametrize(("name", "numbers", "fused", "rows"), list(timelines()))
def test_timeline(name, numbers, fused, rows):
    table = compile_order(make_order(name, 4, *map(int, numbers), fused=fused))
    got = simulate(table)
    assert draw.timeline_text(table, got.start, got.duration) == rows
