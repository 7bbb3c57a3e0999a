"""1F1B: after a warm-up, one forward and one backward alternate."""

from jaxscale.pipeline_schedules.operations import F, Op, Rows, X
from jaxscale.pipeline_schedules.schedule import ONE_CHUNK, WHOLE_SEQUENCES, Schedule
from jaxscale.pipeline_schedules.scripts import alternate


def _one_f_one_b(p: int, m: int, v: int, k: int) -> Rows:
    """A rank has at most as many micro-batches in flight as there are ranks from it to the end."""
    return [
        alternate([Op(F, i, r) for i in range(m)], [Op(X, i, r) for i in range(m)], p - 1 - r)
        for r in range(p)
    ]


ONE_F_ONE_B = Schedule(
    name="1f1b",
    paper="PipeDream-Flush, arXiv 2006.09503; DAPPLE, arXiv 2007.01045",
    make_rows=_one_f_one_b,
    needs=(ONE_CHUNK, WHOLE_SEQUENCES),
    steady_rounds=2,
)
