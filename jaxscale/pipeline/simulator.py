"""Pipeline simulator: makespan, bubble and live activations of a table. NumPy only.

Times are in the unit of the costs, which are for all of a rank's layers and one micro-batch: a
chunk costs 1/v of them, a segment 1/k.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxscale.pipeline.table import Table, is_head, replay
from jaxscale.pipeline_schedules.operations import B, F, R, W, X


class Costs(NamedTuple):
    """The cost of each operation (F, B, W, R): a number, or one for each virtual stage.

    A fused backward costs b + w.
    """

    f: float | tuple[float, ...] = 1.0
    b: float | tuple[float, ...] = 1.0
    w: float | tuple[float, ...] = 1.0
    r: float | tuple[float, ...] = 0.0


EQUAL = Costs(r=1.0)


@dataclass(frozen=True, eq=False)
class Run:
    """A simulated table, with operations as early as possible and in lockstep.

    In lockstep every tick lasts as long as its slowest operation on any rank, as on devices that
    exchange messages after each tick. Arrays are float [N], one entry per operation.
    """

    start: np.ndarray
    duration: np.ndarray
    lockstep_start: np.ndarray
    makespan: float
    idle_fraction: float  # of makespan x ranks
    lockstep_makespan: float
    lockstep_idle_fraction: float
    peak_stash: tuple[float, ...]  # per rank, in a rank's activations of one micro-batch
    messages: int  # between different ranks


def simulate(table: Table, costs: Costs = EQUAL, *, shared_head: float = 0.0) -> Run:
    """Simulates a table; by default each operation costs 1, R included.

    Args:
      shared_head: cost, on each rank, of a head that all ranks compute together: in lockstep it is
        added to a tick for each backward pass of the last stage. Without lockstep it is not
        counted.

    >>> from jaxscale.pipeline.orders import make_order
    >>> from jaxscale.pipeline.table import compile_order
    >>> simulate(compile_order(make_order("1f1b", stages=4, microbatches=8))).makespan
    30.0

    Raises:
      ValueError: a negative cost, or costs for another number of virtual stages.
    """
    ops, order = table.ops, table.order
    parts = order.virtual_stages * order.sequence_chunks
    duration = costs_by_kind(costs, order.stages)[ops.kind, ops.stage]
    step_durations = np.bincount(table.step, weights=duration)
    lasts = step_durations[table.step]
    # The second operation of a pair is shown after the first.
    later = np.where(ops.paired, lasts - duration, 0)

    ends = replay(ops.rank, table.step, table.needs, step_durations)
    tick_durations = np.zeros(table.ticks)
    np.maximum.at(tick_durations, table.tick, lasts)
    heads = shared_head * np.bincount(table.tick[is_head(table)], minlength=table.ticks)
    tick_durations += heads  # before the operations of its tick
    tick_ends = np.cumsum(tick_durations)

    def idle(makespan: float, work: float) -> float:
        available = makespan * order.ranks
        return float((available - work) / available)

    makespan, lockstep_makespan = ends.max(), tick_ends[-1]
    return Run(
        start=(ends - lasts + later) / parts,
        lockstep_start=((tick_ends - tick_durations + heads)[table.tick] + later) / parts,
        duration=duration / parts,
        makespan=float(makespan / parts),
        idle_fraction=idle(makespan, duration.sum()),
        lockstep_makespan=float(lockstep_makespan / parts),
        lockstep_idle_fraction=idle(lockstep_makespan, duration.sum() + order.ranks * heads.sum()),
        peak_stash=tuple((peak_stash(table) / parts).tolist()),
        messages=count_messages(table),
    )


def peak_stash(table: Table) -> np.ndarray:
    """int [ranks], the maximum of live activations (of a chunk and segment) on a rank.

    Activations are live from F, or from R if the pass has one, to the last operation that needs
    them, W or X.
    """
    ops = table.ops
    saved = (ops.kind == F) | (ops.kind == R)
    saved[table.needs[ops.kind == R, 0]] = False  # the F of these passes
    released = (ops.kind == W) | (ops.kind == X)
    alive = np.cumsum(saved.astype(int) - released) + released  # while the operation runs
    before = np.searchsorted(ops.rank, np.arange(table.order.ranks))
    return np.maximum.reduceat(alive, before)  # one cumulative sum: each rank ends with 0 alive


def count_messages(table: Table) -> int:
    """The number of activations and gradients sent between different ranks."""
    ops, order = table.ops, table.order
    forward = (ops.kind == F) & (ops.stage < order.stages - 1)
    backward = ((ops.kind == B) | (ops.kind == X)) & (ops.stage > 0)
    home = np.array([order.rank_of(stage, 0) for stage in range(order.stages)])
    leaves = home[:-1] != home[1:]  # from stage to the next
    return int(leaves[ops.stage[forward]].sum() + leaves[ops.stage[backward] - 1].sum())


def costs_by_kind(costs: Costs, stages: int) -> np.ndarray:
    """The costs as an array, float [kind, stage]; X is B and W.

    Raises:
      ValueError: a negative cost, or costs for another number of virtual stages.
    """
    by_kind = np.zeros((X + 1, stages))
    for kind, name in ((F, "f"), (B, "b"), (W, "w"), (R, "r")):
        cost = np.asarray(getattr(costs, name), float)
        if cost.shape not in ((), (stages,)):
            raise ValueError(
                f"costs.{name} has {len(cost)} numbers; it can be one number, or one for each of "
                f"the {stages} virtual stages"
            )
        if not ((cost >= 0) & (cost < np.inf)).all():
            raise ValueError(f"costs.{name} = {getattr(costs, name)}; costs are at least 0")
        by_kind[kind] = cost
    by_kind[X] = by_kind[B] + by_kind[W]
    if not by_kind.any():
        raise ValueError(f"costs = {costs}: every operation costs 0; give one of them more")
    return by_kind
