"""Costs, and the two ways to play a table."""

import numpy as np
import pytest

from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.simulator import Costs, simulate
from jaxscale.pipeline.table import compile_order


def test_a_segment_of_a_chunk_costs_its_share():
    table = compile_order(make_order("seq1f1b_interleaved", 2, 4, 2, 2))
    assert set(simulate(table, Costs(f=4, b=8, w=2)).duration) == {1.0, 2.0, 0.5}


def test_costs_scale_the_makespan():
    table = compile_order(make_order("zb_v", 3, 7))
    once, thrice = simulate(table, Costs(2, 3, 1)), simulate(table, Costs(6, 9, 3))
    assert thrice.makespan == 3 * once.makespan
    assert thrice.lockstep_makespan == 3 * once.lockstep_makespan
    assert thrice.idle_fraction == once.idle_fraction


def test_a_heavy_last_stage_is_what_the_others_wait_for():
    """It is busy from its first forward on; its last gradient then goes back to the start."""
    table = compile_order(make_order("gpipe", 4, 16))
    run = simulate(table, Costs(f=(1, 1, 1, 2), b=(1, 1, 1, 2), w=(1, 1, 1, 2)))
    assert run.makespan == 3 + 16 * 2 + (15 * (2 + 2) + 2) + 3 + 1
    assert run.makespan <= run.lockstep_makespan


def test_lockstep_ticks_last_as_long_as_their_slowest_operation():
    table = compile_order(make_order("1f1b", 4, 8, fused=True))
    run = simulate(table, Costs(f=1, b=2, w=2))
    for tick in range(table.ticks):
        now = table.tick == tick
        begins = set(run.lockstep_start[now])
        assert len(begins) == 1
        later = run.lockstep_start[table.tick == tick + 1]
        if later.size:
            assert later[0] - begins.pop() == run.duration[now].max()


@pytest.mark.parametrize(
    ("keep", "ticks", "stash"),
    [
        (None, 206, [8, 7, 6, 5, 4, 3, 2, 1]),
        (4, 237, [5, 5, 5, 5, 4, 3, 2, 1]),
        (0, 270, [1] * 8),
    ],
)
def test_a_pass_with_recompute_keeps_its_activations_from_there_on(keep, ticks, stash):
    """The ticks and passes of docs/pipelines.md."""
    table = compile_order(make_order("1f1b", 8, 64, keep=keep))
    assert table.ticks == ticks
    run = simulate(table)
    assert run.peak_stash == tuple(stash)
    assert run.lockstep_makespan == ticks  # by default each operation, R too, costs 1


def test_nothing_starts_before_what_it_needs():
    for name in ("interleaved", "dualpipe", "bitpipe"):
        table = compile_order(make_order(name, 4, 8))
        run = simulate(table, Costs(f=1, b=1.5, w=0.7))
        ends = run.start + run.duration
        needed = np.where(table.needs >= 0, ends[table.needs], 0).max(axis=1)
        assert (run.start - needed > -1e-9).all()
        assert run.makespan == pytest.approx(ends.max())


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(f=-1), r"costs\.f = -1; costs are at least 0"),
        (Costs(b=float("nan")), r"costs\.b = nan"),
        (Costs(w=float("inf")), r"costs\.w = inf"),
        (Costs(0, 0, 0, 0), "every operation costs 0"),
        (Costs(f=(1, 2, 3)), r"costs\.f has 3 numbers; .* each of the 4 virtual stages"),
    ],
)
def test_costs_that_are_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        simulate(compile_order(make_order("1f1b", 4, 4)), costs)
