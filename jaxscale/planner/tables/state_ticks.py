"""Ticks of a pipeline's table in which ranks gather weights or reduce gradients.

The executor does both within a tick, before or after the operation, without overlap: the
tick of all ranks is longer by as much.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from jaxscale.pipeline.buffer_slots import gathers, reduces
from jaxscale.pipeline_schedules.operations import B, X
from jaxscale.planner.tables.table_makespan import TableSpec, extended, pipeline_table

Floats = Any  # a float, or float [N]


class TickCollectives(NamedTuple):
    """Seconds of collectives within some ticks of a rank; 0 where there are none."""

    gather: Floats  # of the weights of a chunk
    reduce: Floats  # of the gradients of a chunk
    outer: Floats  # of the gradients of embedding or head, each on one rank
    embedding: Floats = 0.0  # of the embedding's alone, with a sliced head
    head_slice: Floats = 0.0  # of a slice of the head's, on all ranks


class StateTicks(NamedTuple):
    """Numbers of ticks. A rank of several chunks gathers the weights of one at a time."""

    gathers: int  # some rank gathers a chunk, and none reduces one
    reduces: int  # the reverse
    separate: int  # one rank gathers, another one reduces
    joined: int  # a rank does both
    # Backward passes with the gradients of embedding or head:
    ends: int  # of the first or last stage
    first: int  # of the first stage
    heads: int  # of the last stage, each of several in a tick

    def seconds(self, each: TickCollectives) -> Floats:
        """Seconds by which the ticks are longer."""
        gather, reduce, outer, embedding, head_slice = each
        alone = self.gathers * gather + self.reduces * reduce
        both = self.separate * np.maximum(gather, reduce) + self.joined * (gather + reduce)
        ends = self.ends * outer + self.first * embedding + self.heads * head_slice
        return alone + both + ends


def state_ticks(spec: TableSpec) -> StateTicks:
    """Ticks of a table with any number of micro-batches."""
    return StateTicks(*extended(spec, _counted).tolist())


@functools.lru_cache(maxsize=4096)
def _counted(spec: TableSpec) -> np.ndarray:
    table = pipeline_table(spec)
    kind, stage = table.ops.kind, table.ops.stage
    gather, reduce = gathers(table) == 1, reduces(table) == 1
    backward = (kind == B) | (kind == X)
    first, last = backward & (stage == 0), backward & (stage == spec.stages - 1)

    def by_rank(operations: np.ndarray) -> np.ndarray:
        here = np.zeros((table.ticks, table.order.ranks), bool)
        here[table.tick[operations], table.ops.rank[operations]] = True
        return here

    def ticks(operations: np.ndarray) -> np.ndarray:
        return by_rank(operations).any(axis=1)

    joined = (by_rank(gather) & by_rank(reduce)).any(axis=1)
    some, others = ticks(gather) & ~joined, ticks(reduce) & ~joined
    ends = ticks(first | last), ticks(first), last
    found = some & ~others, others & ~some, some & others, joined, *ends
    return np.array([one.sum() for one in found])
