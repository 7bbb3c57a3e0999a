"""Bidirectional schedules (Chimera, BitPipe): half of the micro-batches enter at each end."""

from jaxscale.pipeline_schedules.operations import F, Op, Rows, X, zigzag
from jaxscale.pipeline_schedules.schedule import (
    EVEN_STAGES,
    ONE_CHUNK,
    ROUNDS_OF_STAGES,
    TWO_CHUNKS,
    WHOLE_SEQUENCES,
    Need,
    Schedule,
)


def _bidirectional(p: int, m: int, v: int, k: int) -> Rows:
    """Chimera, and BitPipe with two chunks per rank in a V: of every p micro-batches half enter at
    each end.

    One formula gives the slots of both directions; by parity they never collide on a rank.
    """
    stages = p * v
    slots: list[list[tuple[int, int, Op]]] = [[] for _ in range(p)]
    for i in range(m):
        block, index = divmod(i, p)
        direction, index = divmod(index, p // 2)
        entry = block * stages + 2 * index
        for s in range(stages):
            rank = zigzag(s, p)
            row = slots[p - 1 - rank if direction else rank]
            # Where two blocks overlap, the backward comes first.
            row.append((entry + s, 1, Op(F, i, s, 0, direction)))
            row.append((entry + 2 * stages - 1 - s, 0, Op(X, i, s, 0, direction)))
    return [[op for _, _, op in sorted(row)] for row in slots]


CHIMERA = Schedule(
    name="chimera",
    paper="Chimera, arXiv 2107.06925",
    make_rows=_bidirectional,
    needs=(ONE_CHUNK, WHOLE_SEQUENCES, EVEN_STAGES, ROUNDS_OF_STAGES),
    steady_rounds=2,
)

BITPIPE = Schedule(
    name="bitpipe",
    paper="BitPipe, arXiv 2410.19367",
    make_rows=_bidirectional,
    needs=(
        TWO_CHUNKS,
        WHOLE_SEQUENCES,
        Need("an even number of stages, at least 4", lambda p, m, v, k: p % 2 == 0 and p >= 4),
        ROUNDS_OF_STAGES,
    ),
    stage_to_rank=zigzag,
    virtual_stages=2,
    searched_virtual_stages=(2,),
    steady_rounds=2,
)
