"""Orders by a solver: as fast as the fastest of all orders, within the limit, never slower."""

import contextlib
import itertools
import math
import sys

import pytest

from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.simulator import Costs, simulate
from jaxscale.pipeline.solve_order import comparable, solve_order
from jaxscale.pipeline.table import compile_order
from jaxscale.pipeline_schedules.operations import B, F, Op, Order, W, X, loop

UNEVEN = Costs(f=(1.0, 1.5), b=(1.2, 2.5), w=(0.8, 0.6))


def solve(numbers, costs, limit, seconds=600.0, named=None):
    names = comparable(*numbers) if named is None else named
    orders = [make_order(name, *numbers) for name in names]
    return solve_order(orders, numbers, costs, limit, seconds=seconds, threads=1)


def rows(microbatches, stage):
    """All orders of a stage's operations, with micro-batches in sequence."""

    def extend(row, counts):
        if len(row) == 3 * microbatches:
            yield tuple(row)
        for n, kind in enumerate((F, B, W)):
            if counts[n] < (counts[n - 1] if n else microbatches):
                more = [*counts[:n], counts[n] + 1, *counts[n + 1 :]]
                yield from extend([*row, Op(kind, counts[n], stage)], more)

    return list(extend([], [0, 0, 0]))


def every_table(microbatches):
    """Of two ranks, without those that deadlock."""
    for pair in itertools.product(rows(microbatches, 0), rows(microbatches, 1)):
        with contextlib.suppress(ValueError):  # a deadlock
            yield compile_order(Order("any", pair, microbatches, 1, 1, loop), complete=True)


@pytest.mark.proof
def test_no_order_of_two_ranks_is_faster():
    tables = list(every_table(3))
    for costs, limit in ((UNEVEN, 2), (UNEVEN, 1), (Costs(2.0, 1.0, 3.0), 3)):
        runs = [simulate(table, costs) for table in tables]
        fastest = min(one.lockstep_makespan for one in runs if max(one.peak_stash) <= limit)
        found = solve((2, 3, 1), costs, limit)
        assert found.run.lockstep_makespan == pytest.approx(fastest, rel=1e-12)
        assert found.bound == pytest.approx(fastest, rel=1e-12)
        assert max(found.run.peak_stash) <= limit
        assert found.gap == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("limit", [1, 1.5])
def test_several_chunks_keep_the_limit(limit):
    found = solve((2, 2, 2), Costs(f=(1.0, 1.0, 1.0, 2.0)), limit)
    assert max(found.run.peak_stash) <= limit
    assert found.gap == pytest.approx(0, abs=1e-12)
    assert found.table.order.virtual_stages == 2


def test_a_solver_without_time_has_the_fastest_schedule():
    costs = Costs(f=1.0, b=(1.1, 1.1, 2.1), w=0.9)
    found = solve((3, 6, 1), costs, 5, seconds=1e-3)
    named = {
        name: simulate(compile_order(make_order(name, 3, 6)), costs)
        for name in ("gpipe", "1f1b", "zb_h1", "zb_h2")
    }
    within = {name: one for name, one in named.items() if max(one.peak_stash) <= 5}
    fastest = min(one.lockstep_makespan for one in within.values())
    assert found.run.lockstep_makespan <= fastest == found.named_time
    assert within[found.named].lockstep_makespan == fastest
    assert 0 < found.bound <= fastest


def test_a_limit_below_every_schedule_has_an_order():
    found = solve((3, 4, 1), Costs(), 1, seconds=1e-3)
    assert max(found.run.peak_stash) == 1
    assert (found.named, found.named_time) == ("", math.inf)


def test_comparable_schedules_have_one_direction_and_no_pairs():
    assert comparable(4, 8, 1) == ["gpipe", "1f1b", "breadth_first", "zb_h1", "zb_h2"]
    assert comparable(4, 8, 2) == ["interleaved", "breadth_first", "zb_v"]


@pytest.mark.parametrize(
    ("numbers", "costs", "limit", "named", "message"),
    [
        ((2, 2, 1), Costs(), 0.5, (), "saved_passes = 0.5; a rank saves at least 1 pass"),
        ((2, 2, 1), Costs(r=1.0), 2, (), "no recompute, and r > 0; set --costs r=0"),
        ((2, 2, 1), Costs(w=0.0), 2, (), "--costs above 0 for f, b and w"),
        ((2, 2, 1), Costs(w=math.pi), 2, (), "--costs 3.14.*at most six decimals"),
        ((2, 2, 1), Costs(w=1e-6, f=1e5), 2, (), "round them to fewer decimals"),
        ((2, 2, 1), Costs(f=(1.0, 1.0, 1.0)), 2, (), "costs.f has 3 numbers"),
        ((2, 2, 1), Costs(), 2, ("chimera",), "chimera has other operations than F, B and W"),
        ((64, 512, 1), Costs(), 64, (), "too many for a solver.*lower --stages"),
    ],
)
def test_refusals(numbers, costs, limit, named, message):
    with pytest.raises(ValueError, match=message):
        solve(numbers, costs, limit, named=named)


def test_fused_orders_are_refused():
    order = make_order("1f1b", 2, 2, fused=True)
    assert any(op.kind == X for row in order.rows for op in row)
    with pytest.raises(ValueError, match="1f1b has other operations"):
        solve_order([order], (2, 2, 1), Costs(), 2, seconds=1)


def test_a_missing_solver_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ModuleNotFoundError, match="uv sync --inexact --extra solver"):
        solve((2, 2, 1), Costs(), 2)
