"""Makespans of many costs, and of many micro-batches, are those of the simulator."""

import itertools
import time

import numpy as np
import pytest

from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.simulator import Costs, simulate
from jaxscale.pipeline.table import compile_order
from jaxscale.pipeline_schedules.operations import X
from jaxscale.pipeline_schedules.shipped import SHIPPED, find_schedule
from jaxscale.planner.tables import table_makespan
from jaxscale.planner.tables.table_makespan import TableSpec, makespan

SHAPES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("breadth_first", 2),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("zb_v", 2),
    ("chimera", 1),
    ("bitpipe", 2),
    ("dualpipe", 1),
    ("dualpipe_v", 2),
]
SEGMENTS = {"seq1f1b": 1, "seq1f1b_interleaved": 2}
CASES = [
    (name, chunks, fused, recompute)
    for (name, chunks), fused, recompute in itertools.product(SHAPES, (False, True), (False, True))
    if not (fused and find_schedule(name).splits_backward)
]


def random_costs(
    stages: int, recompute: bool, uneven: bool, rows: int = 3
) -> table_makespan.OperationSeconds:
    draw = np.random.default_rng(stages + recompute)
    shape = rows, stages if uneven else 1
    f, b, w, r = draw.uniform(0.5, 2, (4, *shape))
    return table_makespan.OperationSeconds(f, b, w, r if recompute else 0.0)


def simulated(spec: TableSpec, costs: table_makespan.OperationSeconds) -> np.ndarray:
    """[rows]."""
    name, *numbers, fused, keep, segments, _ = spec
    order = make_order(name, *numbers, segments, fused=fused, keep=keep)
    table, found = compile_order(order), []
    wide = [np.broadcast_to(cost, (3, spec.stages)) for cost in map(np.asarray, costs)]
    for row in range(3):
        run = simulate(table, Costs(*(tuple(cost[row]) for cost in wide)))
        found.append(run.lockstep_makespan)
    return np.array(found)


def test_the_cases_are_what_the_executor_runs():
    named = {name for name, _ in SHAPES}
    assert named | {*SEGMENTS} == {schedule.name for schedule in SHIPPED}
    assert named == {schedule.name for schedule in SHIPPED if schedule.steady_rounds}


@pytest.mark.parametrize(("name", "chunks"), SEGMENTS.items())
def test_makespans_of_segments_are_the_simulators(name, chunks):
    costs = random_costs(4 * chunks, False, True)
    spec = TableSpec(name, 4, 8, chunks, segments=2)
    np.testing.assert_allclose(makespan(spec, costs), simulated(spec, costs), rtol=1e-12)
    # One rank does one segment after the other: what the last takes longer, the first is shorter.
    alone, attention = TableSpec(name, 1, 2, chunks, segments=4), random_costs(chunks, False, True)
    own = table_makespan.OperationSeconds(*(np.ones((3, chunks)) * 4 + i for i in range(3)))
    np.testing.assert_allclose(makespan(alone, own, attention), makespan(alone, own), rtol=1e-12)
    assert np.all(makespan(spec, costs, costs) > makespan(spec, costs))
    # Nor do lengths change the work of one rank; with several, later ones should be shorter.
    uneven = alone._replace(parts=(4, 2, 1, 1))
    np.testing.assert_allclose(makespan(uneven, own, attention), makespan(alone, own), rtol=1e-12)
    shorter, longer = (spec._replace(parts=parts) for parts in ((5, 3), (3, 5)))
    even = table_makespan.OperationSeconds(4.0, 5.0, 6.0)
    found = [makespan(one, even, even).item() for one in (shorter, spec, longer)]
    assert found == sorted(found)


@pytest.mark.proof(but=("1f1b-1-True-False", "gpipe-1-True-False", "gpipe-1-True-True"))
@pytest.mark.parametrize(("name", "chunks", "fused", "recompute"), CASES)
def test_makespans_are_the_simulators(name, chunks, fused, recompute):
    schedule = find_schedule(name)
    for ranks, rounds, uneven in ((3, 2, True), (2, 9, False), (4, 6, True), (5, 5, False)):
        # One more than a multiple of the ranks, where the schedule can have it.
        microbatches = ranks * rounds + (schedule.round(ranks) == 1)
        if not schedule.serves(ranks, microbatches, chunks, 1):
            continue
        costs = random_costs(ranks * chunks, recompute, uneven)
        spec = TableSpec(name, ranks, microbatches, chunks, fused, 0 if recompute else None)
        expected = simulated(spec, costs)
        np.testing.assert_allclose(makespan(spec, costs), expected, rtol=1e-12)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb_v", 2)])
def test_makespans_with_passes_that_are_kept(name, chunks):
    spec = TableSpec(name, 4, 24, chunks, keep=2)
    costs = random_costs(spec.stages, recompute=True, uneven=True)
    expected = simulated(spec, costs)
    np.testing.assert_allclose(makespan(spec, costs), expected, rtol=1e-12)


@pytest.mark.parametrize(("name", "chunks", "fused", "recompute"), CASES)
def test_tables_repeat_themselves_from_where_it_is_said(name, chunks, fused, recompute):
    """In lockstep ticks, whatever the costs: the same patterns, one round after the other."""
    step = find_schedule(name).round(6)
    first = 6 * find_schedule(name).steady_rounds
    every_stage = tuple(range(6 * chunks))

    def patterns(microbatches: int) -> dict[frozenset, int]:
        spec = TableSpec(name, 6, microbatches, chunks, fused, 0 if recompute else None)
        found, counts = table_makespan._patterns(spec, every_stage)
        pairs = table_makespan._pairs(spec, every_stage)
        members = [(n,) for n in range((X + 1) * len(every_stage))] + [*map(tuple, pairs.tolist())]
        return {
            frozenset(members[n] for n in one.tolist()): int(count)
            for one, count in zip(found, counts)
        }

    rounds = [patterns(first + n * step) for n in (0, 1, 2, 5)]

    def grows(low: int, high: int) -> dict[frozenset, int]:
        change = {
            one: rounds[high].get(one, 0) - rounds[low].get(one, 0)
            for one in {*rounds[low], *rounds[high]}
        }
        return {one: count for one, count in change.items() if count}

    once = grows(0, 1)
    assert grows(1, 2) == once
    assert grows(0, 3) == {one: 5 * count for one, count in once.items()}


def test_a_hundred_thousand_microbatches_take_no_longer_than_a_few():
    begin = time.process_time()
    even = table_makespan.OperationSeconds(f=np.ones((1000, 1)))
    got = makespan(TableSpec("1f1b", 16, 10**5), even)
    assert time.process_time() - begin < 2
    np.testing.assert_allclose(got, 3 * 10**5 + 30)


def test_refusals():
    with pytest.raises(ValueError, match=r"last dimension can be 1, or the 4 virtual stages"):
        makespan(TableSpec("1f1b", 4, 8), table_makespan.OperationSeconds(f=np.ones(3)))
    with pytest.raises(ValueError, match="microbatches to be a multiple of stages"):
        makespan(TableSpec("interleaved", 4, 6, 2), table_makespan.OperationSeconds())
