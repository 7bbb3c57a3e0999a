"""Schedules whose backward pass is one operation, X; `orders.make_order` splits it unless asked not
to.

Each is a pure function of p ranks, m micro-batches, v virtual stages (chunks) per rank and k
sequence chunks (segments) per micro-batch, and returns a row of operations for each rank r; it says
nothing of time. Stage c * p + r is chunk c of rank r, unless the stages lie in a V.
"""

import math

from jaxscale.pipeline.operations import F, Op, Rows, X, zigzag


def gpipe(p: int, m: int, v: int, k: int) -> Rows:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965)."""
    return [[Op(F, i, r) for i in range(m)] + [Op(X, i, r) for i in range(m)] for r in range(p)]


def one_f_one_b(p: int, m: int, v: int, k: int) -> Rows:
    """1F1B (PipeDream-Flush, arXiv 2006.09503; DAPPLE, arXiv 2007.01045): a rank has no more
    micro-batches in flight than there are ranks from it to the end."""
    return [
        alternate([Op(F, i, r) for i in range(m)], [Op(X, i, r) for i in range(m)], p - 1 - r)
        for r in range(p)
    ]


def interleaved(p: int, m: int, v: int, k: int) -> Rows:
    """Interleaved 1F1B (Megatron-LM, arXiv 2104.04473): p micro-batches through a chunk, then p
    through the next."""
    units = [(p * block + u, c) for block in range(m // p) for c in range(v) for u in range(p)]
    return [
        alternate(
            [Op(F, i, c * p + r) for i, c in units],
            [Op(X, i, (v - 1 - c) * p + r) for i, c in units],
            2 * (p - 1 - r) + (v - 1) * p,
        )
        for r in range(p)
    ]


def breadth_first(p: int, m: int, v: int, k: int) -> Rows:
    """All micro-batches of a chunk before the next chunk (modular pipeline, arXiv 2106.02679;
    breadth-first, arXiv 2211.05953): a chunk's weights are gathered once a pass and its gradients
    reduced once a step. Below p micro-batches it idles between chunks."""
    return [
        [Op(F, i, c * p + r) for c in range(v) for i in range(m)]
        + [Op(X, i, c * p + r) for c in reversed(range(v)) for i in range(m)]
        for r in range(p)
    ]


def seq1f1b(p: int, m: int, v: int, k: int) -> Rows:
    """1F1B over segments of causal sequences (Seq1F1B, arXiv 2406.03488). Micro-batches go back
    first in, first out; the segments of one of them last in, first out."""
    units = [(i, g) for i in range(m) for g in range(k)]
    return [
        alternate(
            [Op(F, i, r, g) for i, g in units],
            [Op(X, i, r, k - 1 - g) for i, g in units],
            p - 1 - r + k - 1,
        )
        for r in range(p)
    ]


def seq1f1b_interleaved(p: int, m: int, v: int, k: int) -> Rows:
    """Seq1F1B over chunks (Seq1F1B-I, arXiv 2406.03488). A chunk takes lcm(p, k) segments at a
    time, whole sequences; the paper's p deadlock when k does not divide p."""
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


def alternate(forwards: list[Op], backwards: list[Op], warmup: int) -> list[Op]:
    """`warmup` forwards, then one forward and one backward in turn, then what is left."""
    steady = [op for pair in zip(forwards[warmup:], backwards) for op in pair]
    return forwards[:warmup] + steady + backwards[len(forwards[warmup:]) :]


def bidirectional(p: int, m: int, v: int, k: int) -> Rows:
    """Of every p micro-batches half enter at each end: Chimera (arXiv 2107.06925), and with two
    chunks a rank in a V BitPipe (arXiv 2410.19367).

    One formula gives the slots of both directions; parity keeps them apart on every rank.
    """
    stages = p * v
    slots: list[list[tuple[int, int, Op]]] = [[] for _ in range(p)]
    for i in range(m):
        block, place = divmod(i, p)
        direction, place = divmod(place, p // 2)
        entry = block * stages + 2 * place
        for s in range(stages):
            rank = zigzag(s, p)
            row = slots[p - 1 - rank if direction else rank]
            # Where blocks meet, the backward goes first.
            row.append((entry + s, 1, Op(F, i, s, 0, direction)))
            row.append((entry + 2 * stages - 1 - s, 0, Op(X, i, s, 0, direction)))
    return [[op for _, _, op in sorted(row)] for row in slots]
