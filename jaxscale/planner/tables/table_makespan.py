"""Makespan of a pipeline's table, vectorised over costs and for any number of micro-batches.

The tables are those of `pipeline.table`, and the results equal those of `pipeline.simulator`; the
suite compares the two. A table is stored as the distinct sets of operations in its ticks and their
counts. Beyond a few micro-batches per rank every further round adds the same ticks, so no table
needs to be larger.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config.layout import Layout
from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.table import Table, compile_order
from jaxscale.pipeline_schedules.operations import B, F, R, W, X
from jaxscale.pipeline_schedules.shipped import NAMES, find_schedule


class TableSpec(NamedTuple):
    """Key of a pipeline's table: the arguments of `pipeline.orders.make_order`."""

    schedule: str
    ranks: int
    microbatches: int
    virtual_stages: int = 1
    fused: bool = False  # one operation for the whole backward pass
    keep: int | None = None  # passes that a rank saves at a time; None without recompute
    segments: int = 1
    parts: tuple[int, ...] = ()  # `Layout.segment_parts`

    @classmethod
    def of(cls, layout: Layout) -> "TableSpec":
        """The table of a resolved layout."""
        spec, keep = layout.schedule_spec, layout.remat_policy.kept_passes
        chunks = max(1, layout.virtual_stages)
        parts = layout.segment_parts
        how = spec.fused, keep, len(parts) or layout.segments, parts
        return cls(spec.name, layout.pipeline, layout.microbatches, chunks, *how)

    @property
    def stages(self) -> int:
        """Virtual stages of all ranks."""
        return self.ranks * self.virtual_stages

    @property
    def round(self) -> int:
        """Micro-batches of a period."""
        return find_schedule(self.schedule).round(self.ranks)

    @property
    def settled(self) -> int | None:
        """Micro-batches, at least the schedule's `steady_rounds`, beyond which the table is
        periodic; None where no such number is known."""
        if self.keep or self.schedule.endswith(".csv"):
            return None  # with partial recompute each rank has its own period
        steady = find_schedule(self.schedule).steady_rounds
        if steady is None:
            return None
        first = self.ranks * steady
        return first + (self.microbatches - first) % self.round


class OperationSeconds(NamedTuple):
    """Seconds of a rank's whole share of the model for one micro-batch, by operation; a chunk takes
    1/v of them, and one of k equal segments 1/k of that.

    Each a number, or float [..., 1] (equal for all virtual stages), or float [..., virtual stages].
    A fused backward costs b + w.
    """

    f: Any = 1.0
    b: Any = 1.0
    w: Any = 1.0
    r: Any = 0.0


def makespan(
    spec: TableSpec, costs: OperationSeconds, attention: OperationSeconds | None = None
) -> np.ndarray:
    """Seconds from the first operation to the end of the last: a tick lasts as long as its slowest
    operation, as in our executor.

    >>> costs = OperationSeconds(f=[[1.0], [2.0]], b=1.0, w=1.0)
    >>> float(makespan(TableSpec("1f1b", 4, 8), costs)[0])
    30.0

    Args:
      costs: costs of operations that the schedule does not have are ignored.
      attention: the parts of them that grow with the number of earlier tokens; None is none.

    Returns:
      Float [...], the leading dimensions of the costs.

    Raises:
      ValueError: numbers that the schedule does not support, or costs of another number of stages.
    """
    durations, shape = _durations(costs, spec.stages)
    if spec.segments > 1:
        grows, _ = _durations(attention or OperationSeconds(0, 0, 0, 0), spec.stages)
        durations = _by_segment(spec, durations, grows)
    found = extended(spec, lambda spec: _seconds(spec, durations))
    return found.reshape(shape) / (spec.virtual_stages * spec.segments)


def _by_segment(spec: TableSpec, durations: np.ndarray, attention: np.ndarray) -> np.ndarray:
    """float [kinds, N, stages * segments]: of segment g of k equal ones, attention takes (2 g + 1)
    / k of the mean."""
    count, parts = spec.segments, np.array(spec.parts or (1,) * spec.segments)
    share, seen = parts / parts.sum(), np.cumsum(parts) / parts.sum()
    linear, grows = count * share, count * (seen**2 - (seen - share) ** 2)
    each = durations[..., None] * linear + attention[..., None] * (grows - linear)
    shape = *durations.shape[:2], spec.stages, count
    return np.broadcast_to(each, shape).reshape(*shape[:2], -1)


def extended(spec: TableSpec, found_of: Callable[[TableSpec], np.ndarray]) -> np.ndarray:
    """`found_of` of a table, extrapolated from two small tables where the table is periodic."""
    first = spec.settled
    if first is None or spec.microbatches <= first + spec.round:
        return found_of(spec)

    def found(rounds: int) -> np.ndarray:
        return found_of(spec._replace(microbatches=first + rounds * spec.round))

    base, after = found(0), found(1)
    return base + (spec.microbatches - first) // spec.round * (after - base)


def _durations(costs: OperationSeconds, stages: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """float [kinds, N, stages or 1], and the shape that N stands for."""
    given = {name: np.atleast_1d(np.asarray(cost, float)) for name, cost in costs._asdict().items()}
    for name, cost in given.items():
        if cost.shape[-1] not in (1, stages):
            raise ValueError(
                f"costs.{name} is of shape {cost.shape}; its last dimension can be 1, or the "
                f"{stages} virtual stages"
            )
    shape = np.broadcast_shapes(*(cost.shape for cost in given.values()))
    durations = np.zeros((X + 1, *shape))
    for kind, name in ((F, "f"), (B, "b"), (W, "w"), (R, "r")):
        durations[kind] = given[name]
    durations[X] = durations[B] + durations[W]
    return durations.reshape(X + 1, -1, shape[-1]), shape[:-1]


@functools.cache
def count_copies(schedule: str) -> tuple[int, int]:
    """The directions of a schedule's micro-batches, and the operations of a rank in a tick: 1 or 2
    each, whatever the number of ranks."""
    if schedule.endswith(".csv"):
        order = make_order(schedule)
    else:
        found = find_schedule(schedule)
        chunks, sizes = found.virtual_stages, itertools.product(range(2, 9), range(1, 33))
        ranks, count = next(size for size in sizes if found.serves(*size, chunks, 1))
        order = make_order(schedule, ranks, count, chunks)
    return order.directions, order.lanes


@functools.lru_cache(maxsize=64)
def pipeline_table(spec: TableSpec) -> Table:
    """The table of a pipeline.

    Raises:
      ValueError: an unknown schedule, or numbers that it does not support.
    """
    name, ranks, microbatches, chunks, fused, keep, segments, _ = spec
    order = make_order(name, ranks, microbatches, chunks, segments, fused=fused, keep=keep)
    return compile_order(order, complete=name in NAMES)


def _seconds(spec: TableSpec, durations: np.ndarray) -> np.ndarray:
    """float [N]: the sum over ticks of the slowest operation."""
    classes, index = _stage_classes(durations, spec.stages * spec.segments)
    active, counts = _patterns(spec, classes)
    costs = durations[:, :, index].transpose(0, 2, 1).reshape(-1, durations.shape[1])
    pairs = _pairs(spec, classes)
    costs = np.concatenate([costs, costs[pairs].sum(axis=1)])
    total = np.zeros(durations.shape[1])
    for members, count in zip(active, counts):
        total += count * costs[members].max(axis=0)
    return total


def _stage_classes(durations: np.ndarray, stages: int) -> tuple[tuple[int, ...], np.ndarray]:
    """A class for each stage, or each segment in one, with equal costs in a class, and one of
    each class."""
    if durations.shape[-1] == 1:
        return (0,) * stages, np.zeros(1, int)
    columns = np.ascontiguousarray(durations.reshape(-1, stages).T)
    known: dict[bytes, int] = {}
    classes = [known.setdefault(column.tobytes(), len(known)) for column in columns]
    return tuple(classes), np.array([classes.index(n) for n in range(len(known))])


@functools.lru_cache(maxsize=4096)
def _patterns(spec: TableSpec, classes: tuple[int, ...]) -> tuple[list[np.ndarray], np.ndarray]:
    """The distinct sets of active operations, as indices into [kinds * classes], then into
    `_pairs`, and their ticks."""
    tick, operation, pair = _operations(spec, classes)
    count = (X + 1) * (max(classes) + 1)
    there = np.zeros((tick.max() + 1, count + int(pair.max(initial=-1)) + 1), bool)
    there[tick, np.where(pair >= 0, count + pair, operation)] = True
    # Ticks with the same active operations last equally long, so each distinct set is priced once.
    packed = np.packbits(there, axis=1)
    _, index, counts = np.unique(packed, axis=0, return_index=True, return_counts=True)
    return [np.flatnonzero(there[n]) for n in index], counts


def _pairs(spec: TableSpec, classes: tuple[int, ...]) -> np.ndarray:
    """int [pairs, 2], the distinct overlapped pairs, as indices into [kinds * classes]."""
    _, operation, pair = _operations(spec, classes)
    members = np.flatnonzero(pair >= 0).reshape(-1, 2)
    _, index = np.unique(pair[members[:, 0]], return_index=True)
    return operation[members[index]]


def _operations(spec: TableSpec, classes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Of every operation the tick, the index into [kinds * classes], and its pair's number among
    the distinct ones; -1 is none."""
    tick, kind, stage, step = _cells(spec)
    operation = kind * (max(classes) + 1) + np.array(classes)[stage]
    pair, members = np.full(len(tick), -1), np.flatnonzero(np.bincount(step)[step] == 2)
    if len(members):
        both = operation[members].reshape(-1, 2)
        _, number = np.unique(both, axis=0, return_inverse=True)
        pair[members] = np.repeat(number.reshape(-1), 2)
    return tick, operation, pair


@functools.lru_cache(maxsize=4096)
def _cells(spec: TableSpec) -> tuple[np.ndarray, ...]:
    """Tick, kind, place (stage * segments + segment) and step of every operation."""
    table = pipeline_table(spec)
    place = table.ops.stage * spec.segments + table.ops.segment
    fields = table.tick, table.ops.kind, place, table.step
    return tuple(x.astype(np.int32) for x in fields)
