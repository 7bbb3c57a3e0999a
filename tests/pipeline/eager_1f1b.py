"""A schedule from outside the package: `layout.schedule = "tests.pipeline.eager_1f1b:EAGER_1F1B"`.

It stands for one that a user writes, and imports only what a user would.
"""

from jaxscale.pipeline_schedules.operations import F, Op, Rows, X
from jaxscale.pipeline_schedules.schedule import ONE_CHUNK, WHOLE_SEQUENCES, Schedule
from jaxscale.pipeline_schedules.scripts import alternate


def _rows(p: int, m: int, v: int, k: int) -> Rows:
    """1F1B with twice its warm-up, so that each message between ranks has a pass of slack."""
    return [
        alternate([Op(F, i, r) for i in range(m)], [Op(X, i, r) for i in range(m)], 2 * (p - 1 - r))
        for r in range(p)
    ]


EAGER_1F1B = Schedule(
    name="eager_1f1b",
    paper="On Optimizing the Communication of Model Parallelism, arXiv 2211.05322",
    make_rows=_rows,
    needs=(ONE_CHUNK, WHOLE_SEQUENCES),
    steady_rounds=2,
)
