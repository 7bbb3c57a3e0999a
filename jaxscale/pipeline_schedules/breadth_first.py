"""Breadth-first: all micro-batches of a chunk before the next chunk."""

from jaxscale.pipeline_schedules.operations import F, Op, Rows, X
from jaxscale.pipeline_schedules.schedule import WHOLE_SEQUENCES, Schedule


def _breadth_first(p: int, m: int, v: int, k: int) -> Rows:
    """Weights of a chunk are gathered once per pass and gradients reduced once per step. With fewer
    than p micro-batches the ranks idle between chunks."""
    return [
        [Op(F, i, c * p + r) for c in range(v) for i in range(m)]
        + [Op(X, i, c * p + r) for c in reversed(range(v)) for i in range(m)]
        for r in range(p)
    ]


BREADTH_FIRST = Schedule(
    name="breadth_first",
    paper="modular pipeline, arXiv 2106.02679; breadth-first, arXiv 2211.05953",
    make_rows=_breadth_first,
    needs=(WHOLE_SEQUENCES,),
    searched_virtual_stages=(2, 3, 4, 5, 8),
    steady_rounds=2,
)
