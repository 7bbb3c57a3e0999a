"""Schedules made of separate input and weight gradients: zero bubble, and DualPipe.

The functions have the form of those in `fused_orders`: rows of operations for p ranks, m
micro-batches, v virtual stages per rank, k sequence chunks. Weight gradients fill what would be
idle.
"""

from collections import Counter, deque

from jaxscale.pipeline.operations import LETTERS, B, F, Op, Rows, W


def zb_h1(p: int, m: int, v: int, k: int) -> Rows:
    """ZB-H1 (arXiv 2401.10241): 1F1B whose rank r postpones W by r micro-batches."""
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


def zb_h2(p: int, m: int, v: int, k: int) -> Rows:
    """ZB-H2 (arXiv 2401.10241): no idle inside a rank, for twice the stash of 1F1B.

    Played tick by tick, all operations being of one length. A free rank takes B if it can; else
    F while fewer than 2p - 1 activations are alive on it, each from F to W; else the oldest W.
    """
    rows: Rows = [[] for _ in range(p)]
    forwards, backwards, weights = [0] * p, [0] * p, [0] * p  # done so far, per rank
    while min(weights) < m:
        activations = [m, *forwards[:-1]]  # that have arrived at each rank before this tick
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


def zb_v(p: int, m: int, v: int, k: int) -> Rows:
    """ZB-V (arXiv 2401.10241): two chunks a rank in a V, the stash of 1F1B, and no idle inside a
    rank when all operations are of one length. Lanes are chunks."""
    return [
        _play(
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


def dualpipe(p: int, m: int, v: int, k: int) -> Rows:
    """DualPipe (DeepSeek-V3, arXiv 2412.19437): half of the micro-batches enter at each end.

    Lanes are directions, lane 0 the one whose entrance is nearer.
    """
    rows = []
    for r in range(p):
        far = int(r >= p // 2)
        depth = p - 1 - r if far else r
        lanes = [(depth, far, far * m // 2), (p - 1 - depth, 1 - far, (1 - far) * m // 2)]
        rows.append(_play(_dualpipe_script(depth, p // 2, m // 2), lanes))
    return rows


def dualpipe_v(p: int, m: int, v: int, k: int) -> Rows:
    """DualPipe cut in half: both directions become the two arms of a V. Lanes are chunks."""
    return [
        _play(_dualpipe_script(r, p, m), lanes=[(r, 0, 0), (2 * p - 1 - r, 0, 0)]) for r in range(p)
    ]


def _dualpipe_script(depth: int, ranks: int, microbatches: int) -> str:
    """What the rank `depth` steps behind the entrance does, of `ranks` up to the turn."""
    ahead = ranks - 1 - depth
    turns = ["X1", "X0"] * (depth + 1)
    # The second half leaves its weight gradients for the ramp.
    turns[depth + 1 :] = [turn.replace("X", "B") for turn in turns[depth + 1 :]]
    script = (
        "F0 " * (2 * ahead)
        + "F0 F1 " * (depth + 1)
        + "B1 W F1 " * ahead
        + "F0+X1 F1+X0 " * (microbatches - 2 * ranks + depth + 1)
        + "X1 F1+X0 " * ahead
        + " ".join(turns)
        + " W B0" * ahead
    )
    # At the turn the first pair would wait for itself to come back.
    return script if ahead else script.replace("F0+X1", "F0 X1", 1)


def _play(script: str, lanes: list[tuple[int, int, int]]) -> list[Op]:
    """Operations from words: kind and lane ("F0"), two that overlap ("F0+X1"), or "W", the oldest
    weight gradient that is pending; those left at the end follow.

    Args:
      script: words; each takes the next micro-batch of its lane.
      lanes: stage, direction and first micro-batch of each.
    """
    row: list[Op] = []
    done: Counter[tuple[bool, int]] = Counter()
    pending: deque[Op] = deque()
    for word in script.split():
        for paired, part in enumerate(word.split("+")):
            if part == "W":
                row.append(pending.popleft())
                continue
            kind, lane = LETTERS.index(part[0]), int(part[1])
            stage, direction, first = lanes[lane]
            op = Op(kind, first + done[kind == F, lane], stage, 0, direction, paired)
            done[kind == F, lane] += 1
            row.append(op)
            if kind == B:
                pending.append(op._replace(kind=W))
    return row + list(pending)
