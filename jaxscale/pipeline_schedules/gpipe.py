"""GPipe: all forward passes, then all backward passes."""

from jaxscale.pipeline_schedules.operations import F, Op, Rows, X
from jaxscale.pipeline_schedules.schedule import ONE_CHUNK, WHOLE_SEQUENCES, Schedule


def _gpipe(p: int, m: int, v: int, k: int) -> Rows:
    return [[Op(F, i, r) for i in range(m)] + [Op(X, i, r) for i in range(m)] for r in range(p)]


GPIPE = Schedule(
    name="gpipe",
    paper="GPipe, arXiv 1811.06965",
    make_rows=_gpipe,
    needs=(ONE_CHUNK, WHOLE_SEQUENCES),
    steady_rounds=2,
)
