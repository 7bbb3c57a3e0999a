"""Seq1F1B: 1F1B over segments of causal sequences, optionally interleaved over chunks."""

import math

from jaxscale.pipeline_schedules.operations import F, Op, Rows, X
from jaxscale.pipeline_schedules.schedule import ONE_CHUNK, SEVERAL_CHUNKS, Need, Schedule
from jaxscale.pipeline_schedules.scripts import alternate


def _seq1f1b(p: int, m: int, v: int, k: int) -> Rows:
    """Backward passes of micro-batches are first in, first out; those of a micro-batch's segments
    are last in, first out."""
    units = [(i, g) for i in range(m) for g in range(k)]
    return [
        alternate(
            [Op(F, i, r, g) for i, g in units],
            [Op(X, i, r, k - 1 - g) for i, g in units],
            p - 1 - r + k - 1,
        )
        for r in range(p)
    ]


def _seq1f1b_interleaved(p: int, m: int, v: int, k: int) -> Rows:
    """A chunk runs lcm(p, k) segments at a time, which are whole sequences."""
    # With p segments at a time, as in the paper, the order deadlocks if k does not divide p.
    group = math.lcm(p, k)
    units = [
        (*divmod(group * block + u, k), c)
        for block in range(m * k // group)
        for c in range(v)
        for u in range(group)
    ]
    return [
        alternate(
            [Op(F, i, c * p + r, g) for i, g, c in units],
            [Op(X, i, (v - 1 - c) * p + r, k - 1 - g) for i, g, c in units],
            2 * (p - 1 - r) + (v - 1) * group + k - 1,
        )
        for r in range(p)
    ]


SEQ1F1B = Schedule(
    name="seq1f1b",
    paper="Seq1F1B, arXiv 2406.03488",
    make_rows=_seq1f1b,
    needs=(ONE_CHUNK,),
)

SEQ1F1B_INTERLEAVED = Schedule(
    name="seq1f1b_interleaved",
    paper="Seq1F1B-I, arXiv 2406.03488",
    make_rows=_seq1f1b_interleaved,
    needs=(
        SEVERAL_CHUNKS,
        Need(
            "microbatches * sequence_chunks to be a multiple of the least common multiple of "
            "stages and sequence_chunks",
            lambda p, m, v, k: m * k % math.lcm(p, k) == 0,
        ),
    ),
    virtual_stages=2,
    searched_virtual_stages=(2, 4),
)
