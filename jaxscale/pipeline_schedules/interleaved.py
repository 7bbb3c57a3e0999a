"""Interleaved 1F1B: several chunks of the model on each rank."""

from jaxscale.pipeline_schedules.operations import F, Op, Rows, X
from jaxscale.pipeline_schedules.schedule import (
    ROUNDS_OF_STAGES,
    SEVERAL_CHUNKS,
    WHOLE_SEQUENCES,
    Schedule,
)
from jaxscale.pipeline_schedules.scripts import alternate


def _interleaved(p: int, m: int, v: int, k: int) -> Rows:
    """p micro-batches pass through a chunk, then through the next one."""
    units = [(p * block + u, c) for block in range(m // p) for c in range(v) for u in range(p)]
    return [
        alternate(
            [Op(F, i, c * p + r) for i, c in units],
            [Op(X, i, (v - 1 - c) * p + r) for i, c in units],
            2 * (p - 1 - r) + (v - 1) * p,
        )
        for r in range(p)
    ]


INTERLEAVED = Schedule(
    name="interleaved",
    paper="Megatron-LM, arXiv 2104.04473",
    make_rows=_interleaved,
    needs=(WHOLE_SEQUENCES, ROUNDS_OF_STAGES, SEVERAL_CHUNKS),
    virtual_stages=2,
    searched_virtual_stages=(2, 3, 4, 5, 8),
    steady_rounds=2,
)
