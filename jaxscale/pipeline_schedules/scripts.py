"""Building blocks shared by the orders of several schedules."""

from collections import Counter, deque

from jaxscale.pipeline_schedules.operations import LETTERS, B, F, Op, W


def alternate(forwards: list[Op], backwards: list[Op], warmup: int) -> list[Op]:
    """`warmup` forwards, then forwards and backwards alternating, then the remaining backwards."""
    steady = [op for pair in zip(forwards[warmup:], backwards) for op in pair]
    return forwards[:warmup] + steady + backwards[len(forwards[warmup:]) :]


def play(script: str, lanes: list[tuple[int, int, int]]) -> list[Op]:
    """Operations from words: operation and lane ("F0"), an overlapped pair ("F0+X1"), or "W", the
    oldest pending weight gradient. Weight gradients pending at the end follow.

    Args:
      script: words; each uses the next micro-batch of its lane.
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
