"""Zero-bubble schedules: weight gradients fill the bubble."""

from jaxscale.pipeline_schedules.operations import B, F, Op, Rows, W, zigzag
from jaxscale.pipeline_schedules.schedule import (
    ONE_CHUNK,
    TWO_CHUNKS,
    WHOLE_SEQUENCES,
    Need,
    Schedule,
)
from jaxscale.pipeline_schedules.scripts import play


def _zb_h1(p: int, m: int, v: int, k: int) -> Rows:
    """ZB-H1: 1F1B in which rank r postpones W by r micro-batches."""
    rows = []
    for r in range(p):
        warmup = min(p - 1 - r, m)
        row = [Op(F, i, r) for i in range(warmup)]
        for j in range(m + r):
            if warmup + j < m:
                row.append(Op(F, warmup + j, r))
            if j < m:
                row.append(Op(B, j, r))
            if j >= r:
                row.append(Op(W, j - r, r))
        rows.append(row)
    return rows


def _zb_h2(p: int, m: int, v: int, k: int) -> Rows:
    """ZB-H2: no rank idles between its first and last operation, with twice the activations of
    1F1B.

    Simulated by tick, with operations of equal length. A rank runs B if it can; else F while fewer
    than 2p - 1 activations are alive on it, each from F to W; else the oldest W.
    """
    rows: Rows = [[] for _ in range(p)]
    forwards, backwards, weights = [0] * p, [0] * p, [0] * p  # done so far, per rank
    while min(weights) < m:
        activations = [m, *forwards[:-1]]  # received by each rank before this tick
        gradients = [*backwards[1:], forwards[-1]]
        for r, row in enumerate(rows):
            f, b, w = forwards[r], backwards[r], weights[r]
            if b < gradients[r]:
                row.append(Op(B, b, r))
                backwards[r] += 1
            elif f < activations[r] and f - w < 2 * p - 1:
                row.append(Op(F, f, r))
                forwards[r] += 1
            elif w < b:
                row.append(Op(W, w, r))
                weights[r] += 1
    return rows


def _zb_v(p: int, m: int, v: int, k: int) -> Rows:
    """ZB-V: two chunks per rank in a V, with as many activations as 1F1B. No rank idles between its
    first and last operation if operations have equal length. Lanes are chunks."""
    return [
        play(
            "F0 " * (2 * (p - 1 - r) + 1)
            + "F1 F0 " * r
            + "F1 "
            + "B1 W F1 " * (p - 1 - r)
            + "B1 W F0 B0 W F1 " * (m - 2 * p + 1 + r)
            + "B1 W B0 W F1 " * (p - 1 - r)
            + "B1 B0 " * (r + 1)
            + "W B0 " * (p - 1 - r),
            lanes=[(r, 0, 0), (2 * p - 1 - r, 0, 0)],
        )
        for r in range(p)
    ]


ZB_H1 = Schedule(
    name="zb_h1",
    paper="Zero Bubble Pipeline Parallelism, arXiv 2401.10241",
    make_rows=_zb_h1,
    needs=(ONE_CHUNK, WHOLE_SEQUENCES),
    splits_backward=True,
    steady_rounds=2,
)

ZB_H2 = Schedule(
    name="zb_h2",
    paper="Zero Bubble Pipeline Parallelism, arXiv 2401.10241",
    make_rows=_zb_h2,
    needs=(ONE_CHUNK, WHOLE_SEQUENCES),
    splits_backward=True,
    steady_rounds=3,
)

ZB_V = Schedule(
    name="zb_v",
    paper="Zero Bubble Pipeline Parallelism, arXiv 2401.10241",
    make_rows=_zb_v,
    needs=(
        TWO_CHUNKS,
        WHOLE_SEQUENCES,
        Need("microbatches >= 2 * stages - 1", lambda p, m, v, k: m >= 2 * p - 1),
    ),
    stage_to_rank=zigzag,
    splits_backward=True,
    virtual_stages=2,
    searched_virtual_stages=(2,),
    steady_rounds=2,
)
