"""DualPipe: overlapped pairs of forward and backward passes of two directions, or of two chunks."""

from jaxscale.pipeline_schedules.operations import Rows, zigzag
from jaxscale.pipeline_schedules.schedule import (
    EVEN_MICROBATCHES,
    EVEN_STAGES,
    ONE_CHUNK,
    TWO_CHUNKS,
    WHOLE_SEQUENCES,
    Need,
    Schedule,
)
from jaxscale.pipeline_schedules.scripts import play


def _dualpipe(p: int, m: int, v: int, k: int) -> Rows:
    """Half of the micro-batches enter at each end.

    Lanes are directions; lane 0 enters at the nearer end.
    """
    rows = []
    for r in range(p):
        far = int(r >= p // 2)
        depth = p - 1 - r if far else r
        lanes = [(depth, far, far * m // 2), (p - 1 - depth, 1 - far, (1 - far) * m // 2)]
        rows.append(play(_dualpipe_script(depth, p // 2, m // 2), lanes))
    return rows


def _dualpipe_v(p: int, m: int, v: int, k: int) -> Rows:
    """DualPipe-V, half of DualPipe: the two directions are the two arms of a V. Lanes are
    chunks."""
    return [
        play(_dualpipe_script(r, p, m), lanes=[(r, 0, 0), (2 * p - 1 - r, 0, 0)]) for r in range(p)
    ]


def _dualpipe_script(depth: int, ranks: int, microbatches: int) -> str:
    """The script of the rank `depth` ranks after the entrance; rank `ranks` - 1 is the innermost,
    where lanes meet."""
    ahead = ranks - 1 - depth
    backwards = ["X1", "X0"] * (depth + 1)
    # The second half defers its weight gradients to the cool-down.
    backwards[depth + 1 :] = [word.replace("X", "B") for word in backwards[depth + 1 :]]
    script = (
        "F0 " * (2 * ahead)
        + "F0 F1 " * (depth + 1)
        + "B1 W F1 " * ahead
        + "F0+X1 F1+X0 " * (microbatches - 2 * ranks + depth + 1)
        + "X1 F1+X0 " * ahead
        + " ".join(backwards)
        + " W B0" * ahead
    )
    # On the innermost rank the backward of the first pair needs the forward of that pair.
    return script if ahead else script.replace("F0+X1", "F0 X1", 1)


ENOUGH_MICROBATCHES = Need("microbatches >= 2 * stages", lambda p, m, v, k: m >= 2 * p)

DUALPIPE = Schedule(
    name="dualpipe",
    paper="DeepSeek-V3, arXiv 2412.19437",
    make_rows=_dualpipe,
    needs=(
        ONE_CHUNK,
        WHOLE_SEQUENCES,
        EVEN_STAGES,
        EVEN_MICROBATCHES,
        ENOUGH_MICROBATCHES,
    ),
    splits_backward=True,
    steady_rounds=2,
)

DUALPIPE_V = Schedule(
    name="dualpipe_v",
    paper="DualPipe cut in half, github.com/deepseek-ai/DualPipe",
    make_rows=_dualpipe_v,
    needs=(TWO_CHUNKS, WHOLE_SEQUENCES, ENOUGH_MICROBATCHES),
    stage_to_rank=zigzag,
    splits_backward=True,
    virtual_stages=2,
    searched_virtual_stages=(2,),
    steady_rounds=3,
)
