"""Pipeline orders by a constraint solver (CP-SAT): least lockstep time within a memory limit.

The model has a Boolean for each operation and tick: whether the operation has run by then. It is
exact for the executor: an operation has the earliest tick that its rank's order and its needs
allow, and a tick lasts as long as its slowest operation. Micro-batches are equal, so each stage
runs them in one order.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.simulator import Costs, Run, costs_by_kind, simulate
from jaxscale.pipeline.table import Table, compile_order
from jaxscale.pipeline_schedules.operations import B, F, Op, Order, R, Rows, W, X, loop
from jaxscale.pipeline_schedules.shipped import SHIPPED

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar, LinearExprT

MOST_LITERALS = 2**21
"""The most pairs of an operation and a tick in a model."""


@dataclass(frozen=True, eq=False)
class Solution:
    """The fastest order found. Times are lockstep makespans, in the unit of the costs."""

    table: Table
    run: Run
    bound: float  # of every order with this placement of stages, and micro-batches in sequence
    named: str  # the fastest of the named schedules within the limit; "" if there is none
    named_time: float

    @property
    def gap(self) -> float:
        """The fraction of the makespan that a faster order could save at most."""
        return 1 - self.bound / self.run.lockstep_makespan


def comparable(ranks: int, microbatches: int, virtual_stages: int) -> list[str]:
    """The shipped schedules whose orders a solver may find: whole sequences in one direction,
    without overlapped pairs."""
    found = []
    for schedule in SHIPPED:
        numbers = ranks, microbatches, virtual_stages, 1
        if schedule.serves(*numbers) and not schedule.splits_sequences:
            order = make_order(schedule.name, ranks, microbatches, virtual_stages)
            if order.lanes == order.directions == 1:
                found.append(schedule.name)
    return found


def solve_order(
    named: Sequence[Order],
    numbers: tuple[int, int, int],
    costs: Costs,
    saved_passes: float,
    *,
    seconds: float,
    threads: int = 0,
) -> Solution:
    """Searches for the order with the least lockstep makespan.

    Args:
      named: orders. The fastest within the limit begins the search, so that the result is not
        slower, and determines the ranks of virtual stages.
      numbers: ranks, micro-batches, virtual stages per rank.
      costs: of forward and both gradients; positive, with at most six decimals.
      saved_passes: the limit of `peak_stash` on every rank.
      seconds: for the solver, after its model is built.
      threads: of the solver; 0 is one per core.

    Raises:
      ValueError: the costs, the limit or the size of the model are not supported.
      ModuleNotFoundError: the solver is not installed; names the extra.
    """
    ranks, _, chunks = numbers
    if saved_passes < 1:
        raise ValueError(f"saved_passes = {saved_passes:g}; a rank saves at least 1 pass")
    for order in named:
        if order.lanes * order.directions * order.sequence_chunks > 1 or any(
            op.kind in (R, X) for row in order.rows for op in row
        ):
            raise ValueError(
                f"{order.name} has other operations than F, B and W of whole sequences in one "
                "direction, so that a solver cannot begin with it"
            )
    times, scale = _whole_times(costs, ranks * chunks)
    tables = [compile_order(order) for order in (*named, _greedy(*numbers, int(saved_passes)))]
    runs = [(table, simulate(table, costs)) for table in tables]
    within = [one for one in runs if max(one[1].peak_stash) <= saved_passes + 1e-9]

    def makespan(one: tuple[Table, Run]) -> float:
        return one[1].lockstep_makespan

    start = min(within, key=makespan)
    best = min(within[:-1], key=makespan, default=None)
    limit = int(saved_passes * chunks + 1e-9)
    most_ticks = _most_ticks(start[0], times, round(makespan(start) * scale * chunks))
    order, bound = _search(start[0], times, limit, most_ticks, seconds, threads)
    table = compile_order(order)
    found = min(start, (table, simulate(table, costs)), key=makespan)
    return Solution(
        *found,
        bound=min(bound / (scale * chunks), makespan(found)),
        named=best[0].order.name if best else "",
        named_time=makespan(best) if best else math.inf,
    )


def _whole_times(costs: Costs, stages: int) -> tuple[np.ndarray, int]:
    """The costs as whole numbers, int [kind, stage], and the factor by which they are larger."""
    by_kind = costs_by_kind(costs, stages)
    if by_kind[R].any():
        raise ValueError("a solver's order has no recompute, and r > 0; set --costs r=0")
    needed = by_kind[[F, B, W]]
    if not needed.all():
        raise ValueError("a solver needs operations that take time; --costs above 0 for f, b and w")
    exact = {cost: Fraction(round(cost * 10**6), 10**6) for cost in needed.ravel().tolist()}
    for cost, fraction in exact.items():
        if abs(cost - fraction) > 1e-9 * cost:
            raise ValueError(f"--costs {cost}: a solver needs at most six decimals")
    scale = math.lcm(*(fraction.denominator for fraction in exact.values()))
    if scale * needed.max() > 2**31:
        raise ValueError(
            f"--costs from {needed.min():g} to {needed.max():g} have no common unit that is coarse "
            "enough for a solver; round them to fewer decimals"
        )
    times = np.zeros(by_kind.shape, np.int64)
    times[[F, B, W]] = np.rint(needed * scale)
    return times, scale


def _greedy(ranks: int, microbatches: int, chunks: int, most: int) -> Order:
    """An order with at most `most` micro-batches in flight on a rank.

    In each tick a rank runs a B if it can; else an F of a later chunk; else an F of its first chunk
    if one more micro-batch may be in flight; else a W. The latest chunk is first.
    """
    stages = ranks * chunks
    rows: Rows = [[] for _ in range(ranks)]
    done = np.zeros((X + 1, stages), np.int64)  # micro-batches that have passed
    while done[W].min() < microbatches:
        offered = np.zeros_like(done)  # by the end of the previous tick
        offered[F] = [microbatches, *done[F, :-1]]
        offered[B] = [*done[B, 1:], done[F, -1]]
        offered[W] = done[B]
        for rank, row in enumerate(rows):
            mine = range(rank, stages, ranks)
            if done[F, rank] - done[W, mine].min() >= most:
                offered[F, rank] = 0
            order = [(B, s) for s in mine[::-1]] + [(F, s) for s in mine[::-1]]
            for kind, stage in [*order, *((W, s) for s in mine[::-1])]:
                if done[kind, stage] < offered[kind, stage]:
                    row.append(Op(kind, int(done[kind, stage]), stage))
                    done[kind, stage] += 1
                    break
    return Order("greedy", tuple(map(tuple, rows)), microbatches, chunks, 1, loop)


def _most_ticks(table: Table, times: np.ndarray, makespan: int) -> int:
    """The most ticks of an order that is not slower: on every rank, ticks in which it idles last at
    least as long as the shortest operation."""
    ops = table.ops
    cost = times[ops.kind, ops.stage]
    work = np.bincount(ops.rank, weights=cost).astype(np.int64)
    idle = (makespan - work) // cost.min()
    return int((np.bincount(ops.rank) + idle).min())


def _search(
    start: Table, times: np.ndarray, limit: int, most_ticks: int, seconds: float, threads: int
) -> tuple[Order, float]:
    """The fastest order that the solver finds, and its lower bound of the lockstep makespan.

    Args:
      start: a table within the limit, whose operations and placement are those of the order.
      times: int [kind, stage].
      limit: of saved passes of a chunk.
      most_ticks: of the order.
    """
    sat = _import_solver()
    model = sat.CpModel()
    grid = _make_grid(model, start, limit, most_ticks)
    cost = times[start.ops.kind, start.ops.stage]
    makespan, least = _add_durations(model, grid, cost), _least_time(start, times, limit)
    model.add(makespan >= least)
    model.minimize(makespan)
    _add_earliest(model, grid)
    for n, tick in enumerate(grid.hint):
        for t, literal in grid.free(n):
            model.add_hint(literal, int(tick <= t))
    solver = sat.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = threads
    # One thread alone would not improve orders by local search.
    solver.parameters.interleave_search = threads == 1
    status = solver.solve(model)
    bound = max(solver.best_objective_bound, least)
    if status not in (sat.OPTIMAL, sat.FEASIBLE):
        return start.order, bound
    ticks = [grid.begin[n] + sum(not solver.value(x) for _, x in grid.free(n)) for n in grid.all]
    return _make_order(start, ticks), bound


def _import_solver() -> ModuleType:
    try:
        from ortools.sat.python import cp_model  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"--solve needs an optional package: uv sync --inexact --extra solver ({error})"
        ) from None
    return cp_model


@dataclass(frozen=True)
class _Grid:
    """Whether each operation has run by the end of each tick.

    False before tick `begin`, true from tick `end`, and a Boolean of the model between them.
    """

    table: Table
    before: list[list[int]]  # operations that must have ended
    hint: list[int]  # the tick of each operation in the table
    begin: list[int]
    end: list[int]
    literals: list[list["IntVar"]]  # from `begin` on
    false: "IntVar"
    ticks: int

    @property
    def all(self) -> range:
        return range(len(self.hint))

    def by(self, n: int, t: int) -> Any:
        """Whether operation n has run by the end of tick t."""
        if t < self.begin[n]:
            return self.false
        return self.literals[n][t - self.begin[n]] if t < self.end[n] else ~self.false

    def at(self, n: int, t: int) -> "LinearExprT":
        """1 if operation n runs in tick t, else 0."""
        return self.by(n, t) - self.by(n, t - 1)

    def free(self, n: int) -> Iterator[tuple[int, "IntVar"]]:
        """The ticks that leave open whether operation n has run, and its Booleans."""
        return enumerate(self.literals[n], self.begin[n])

    def of_rank(self, rank: int, t: int) -> list[int]:
        """The operations of a rank that can run in tick t."""
        mine = np.flatnonzero(self.table.ops.rank == rank).tolist()
        return [n for n in mine if self.begin[n] <= t <= self.end[n]]


def _make_grid(model: "CpModel", start: Table, limit: int, ticks: int) -> _Grid:
    """The Booleans of a model, with the needs of operations, the sequence of micro-batches in each
    stage and the limit of saved passes."""
    ops, before = start.ops, [[n for n in row if n >= 0] for row in start.needs.tolist()]
    hint, lanes = start.tick.copy(), {}
    for kind, stage in itertools.product((F, B, W), range(start.order.stages)):
        lane = np.flatnonzero((ops.kind == kind) & (ops.stage == stage))
        lanes[kind, stage] = lane = lane[np.argsort(ops.microbatch[lane])].tolist()
        hint[lane] = np.sort(hint[lane])
        for earlier, later in itertools.pairwise(lane):
            before[later].append(earlier)
    if start.order.virtual_stages == 1:
        for rank in range(start.order.ranks):
            for freed, saved in zip(lanes[W, rank], lanes[F, rank][limit:]):
                before[saved].append(freed)
    begin, end = np.zeros_like(hint), np.full_like(hint, ticks - 1)
    sequence = np.argsort(hint, kind="stable")
    for n in sequence:
        begin[n] = max([begin[need] + 1 for need in before[n]], default=0)
    for n in sequence[::-1]:
        for need in before[n]:
            end[need] = min(end[need], end[n] - 1)
    if (end - begin).sum() > MOST_LITERALS:
        raise ValueError(
            f"{len(hint)} operations in up to {ticks} ticks are too many for a solver, which has "
            f"{MOST_LITERALS} pairs of both at most; lower --stages or --microbatches"
        )
    literals = [[model.new_bool_var("") for _ in range(low, high)] for low, high in zip(begin, end)]
    begin, end, hint = begin.tolist(), end.tolist(), hint.tolist()
    grid = _Grid(start, before, hint, begin, end, literals, model.new_constant(0), ticks)
    for n in grid.all:
        for t, literal in grid.free(n):
            for implied in (grid.by(n, t + 1), *(grid.by(need, t - 1) for need in before[n])):
                model.add_implication(literal, implied)
    if start.order.virtual_stages > 1:
        _add_limit(model, grid, limit)
    return grid


def _add_limit(model: "CpModel", grid: _Grid, limit: int) -> None:
    """Bounds the saved passes of ranks with several chunks."""
    ops = grid.table.ops
    for rank, t in itertools.product(range(grid.table.order.ranks), range(grid.ticks)):
        saved = np.flatnonzero((ops.rank == rank) & (ops.kind == F))
        freed = np.flatnonzero((ops.rank == rank) & (ops.kind == W))
        begun = sum(grid.by(n, t) for n in saved.tolist() if grid.begin[n] <= t)
        model.add(begun - sum(grid.by(n, t - 1) for n in freed.tolist()) <= limit)


def _add_durations(model: "CpModel", grid: _Grid, cost: np.ndarray) -> "LinearExprT":
    """A step of a rank per tick; returns the sum of the ticks' durations.

    A tick's duration is a sum of levels: those of the costs of all operations, up to the longest in
    the tick.
    """
    levels = np.unique(cost).tolist()
    tops = np.zeros(grid.ticks, np.int64)
    np.maximum.at(tops, grid.hint, cost)
    total = 0
    for t in range(grid.ticks):
        reaches = [model.new_bool_var("") for _ in levels]
        for level, reached in zip(levels, reaches):
            model.add_hint(reached, int(tops[t] >= level))
        for lower, higher in itertools.pairwise(reaches):
            model.add_implication(higher, lower)
        total += sum(int(n) * x for n, x in zip(np.diff(levels, prepend=0), reaches))
        for rank in range(grid.table.order.ranks):
            here, count = grid.of_rank(rank, t), 0
            for level, reached in zip(levels[::-1], reaches[::-1]):
                longer = [n for n in here if cost[n] >= level]
                if len(longer) > count:
                    model.add(sum(grid.at(n, t) for n in longer) <= reached)
                    count = len(longer)
    return total


def _add_earliest(model: "CpModel", grid: _Grid) -> None:
    """An operation runs in the tick after the rank's previous one, or after one that it needs."""
    needs = [[n for n in row if n >= 0] for row in grid.table.needs.tolist()]
    ran = {(grid.table.ops.rank[n], t) for n, t in enumerate(grid.hint)}
    for rank in range(grid.table.order.ranks):
        busy = None
        for t in range(grid.ticks):
            here = grid.of_rank(rank, t)
            if busy is not None:
                for n in here:
                    late = [~grid.by(need, t - 2) for need in needs[n]]
                    model.add_bool_or(~grid.by(n, t), grid.by(n, t - 1), busy, *late)
            busy = model.new_bool_var("")
            model.add_hint(busy, int((rank, t) in ran))
            model.add(sum(grid.at(n, t) for n in here) == busy)


def _least_time(table: Table, times: np.ndarray, limit: int) -> int:
    """A lower bound of the makespan, from the work of a rank and the passes that it saves at a
    time.

    A rank begins when the first micro-batch has come through the stages before its first. With one
    chunk per rank, W of micro-batch i frees the place of F of i + limit, and there are all later
    stages' F and B between the F and the W of a micro-batch.
    """
    order, (f, b, w) = table.order, times[[F, B, W]]
    starts = f.cumsum() - f
    least = 0
    for rank in range(order.ranks):
        mine = [s for s in range(order.stages) if order.rank_of(s, 0) == rank]
        work, begins = int((f + b + w)[mine].sum()), int(starts[mine[0]])
        least = max(least, begins + order.microbatches * work)
        if order.virtual_stages == 1:
            rounds = -(-order.microbatches // limit)
            cycle = int(f[rank:].sum() + b[rank:].sum() + w[rank])
            last = max((order.microbatches - (rounds - 1) * limit) * work, cycle)
            least = max(least, begins + (rounds - 1) * cycle + last)
    return least


def _make_order(start: Table, ticks: Sequence[int]) -> Order:
    """The order in which each rank runs its operations, by their ticks."""
    rows: Rows = [[] for _ in start.order.rows]
    ops = [op for row in start.order.rows for op in row]
    for n in np.argsort(ticks, kind="stable").tolist():
        rows[start.ops.rank[n]].append(ops[n])
    return dataclasses.replace(start.order, name="solved", rows=tuple(map(tuple, rows)))
