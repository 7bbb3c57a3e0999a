"""Timelines as text and as a picture: a row for each rank, time to the right."""

import numpy as np

from jaxscale.pipeline.records import LETTERS, B, F, R, W, X
from jaxscale.pipeline.simulate import Run
from jaxscale.pipeline.table import Table

CHUNKS = ("", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹")
WORDS = {F: "forward", R: "recompute", B: "input gradient", W: "weight gradient", X: "backward"}
COLORS = {F: "#3f78d1", R: "#8f7cc4", B: "#35a387", W: "#e9a13b", X: "#35a387"}
IDLE = "#ececee"
CELL_INCHES = 0.25  # of the shortest operation
MOST_INCHES = 60  # of a picture
SMALLEST_POINTS = 3  # of a number that can be read


def text(table: Table, start: np.ndarray, seconds: np.ndarray, columns: int = 0) -> str:
    """The timeline as text, one cell an operation.

    `F3` forward of micro-batch 3, `b3` input gradient, `w3` weight gradient, `X3==` both, `r3`
    recompute; then the segment as a letter, the chunk of the rank as a superscript, `^` for the
    direction that enters at the last rank, `+` before what overlaps with the cell before it.

    Args:
      table: what runs.
      start, seconds: float [N], when and how long.
      columns: of the terminal, to fold long lines into blocks; 0 never folds.
    """
    labels = [_label(table, n) for n in range(len(start))]
    width = max(map(len, labels))
    low = (start * _scale(seconds) * width).round().astype(int)
    high = ((start + seconds) * _scale(seconds) * width).round().astype(int)
    lines = [["."] * high.max() for _ in table.order.rows]
    for n, label in enumerate(labels):
        cell = label.ljust(width).ljust(high[n] - low[n], "=")
        lines[table.ops.rank[n]][low[n] : high[n]] = cell[: high[n] - low[n]]
    names = [f"rank {r}".ljust(len(f"rank {len(lines)}")) for r in range(len(lines))]
    room = columns - len(names[0]) - 3
    room = high.max() if columns <= 0 else max(width, room // width * width)
    return "\n\n".join(
        "\n".join(f"{name} |{''.join(line[at : at + room])}|" for name, line in zip(names, lines))
        for at in range(0, high.max(), room)
    )


def _label(table: Table, n: int) -> str:
    order, ops = table.order, table.ops
    kind = LETTERS[ops.kind[n]]
    if ops.kind[n] in (R, B, W):
        kind = kind.lower()
    chunk = ops.stage[n] // order.ranks
    mark = CHUNKS[chunk] if chunk < len(CHUNKS) else f"'{chunk}"
    direction, overlap = "^" * ops.direction[n], "+" * ops.paired[n]
    return f"{overlap}{kind}{_number(table, n)}{mark}{direction}"


def _scale(seconds: np.ndarray) -> float:
    """Cells per second, so that all but very short operations fill one."""
    return 1 / seconds[seconds >= seconds.max() / 4].min()


def png(path: str, table: Table, run: Run, title: str) -> None:
    """Draws the run, as soon as possible, to a PNG file.

    Colours tell the kinds; later chunks of a rank are lighter; what enters at the last rank is
    darker; a frame joins what overlaps. Numbers are micro-batches, letters sequence chunks.
    """
    # Slow to import, and only a picture needs them.
    from matplotlib.collections import PolyCollection  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Patch, Rectangle  # noqa: PLC0415

    order, ops = table.order, table.ops
    cells = run.makespan * _scale(run.seconds)
    inches = float(np.clip(1.3 + cells * CELL_INCHES, 7, MOST_INCHES))
    cell_points = 72 * (inches - 1.3) / cells
    figure = Figure(figsize=(inches, 1.3 + 0.34 * order.ranks), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    axes.set(xlim=(0, run.makespan), ylim=(order.ranks, 0), title=title, xlabel="time")
    axes.set_facecolor(IDLE)
    axes.set_yticks(np.arange(order.ranks) + 0.5, [f"rank {r}" for r in range(order.ranks)])
    axes.tick_params(axis="y", length=0)

    drawn = [n for n in range(len(run.start)) if run.seconds[n] > 0]
    colors = [_color(table, n) for n in drawn]
    low, high, row = run.start, run.start + run.seconds, ops.rank
    boxes = [
        [(low[n], row[n]), (high[n], row[n]), (high[n], row[n] + 1), (low[n], row[n] + 1)]
        for n in drawn
    ]
    axes.add_collection(
        PolyCollection(boxes, facecolors=colors, edgecolors="white", linewidths=0.5)
    )
    for n in np.flatnonzero(ops.paired):
        frame = (low[n - 1], row[n]), high[n] - low[n - 1], 1
        axes.add_patch(Rectangle(*frame, fill=False, linewidth=1, edgecolor="black", zorder=2))

    labels = [_number(table, n) for n in drawn]
    points = min(8.5, 1.5 * cell_points / max(map(len, labels)))
    if points >= SMALLEST_POINTS:
        for n, label, color in zip(drawn, labels, colors):
            at = (low[n] + high[n]) / 2, row[n] + 0.52
            ink = "black" if np.mean(color) > 0.62 else "white"
            axes.text(*at, label, ha="center", va="center", fontsize=points, color=ink)
    kinds = [kind for kind in WORDS if (ops.kind[drawn] == kind).any()]
    patches = [Patch(facecolor=COLORS[kind], label=WORDS[kind]) for kind in kinds]
    patches.append(Patch(facecolor=IDLE, edgecolor="#bbbbbb", label="idle"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.savefig(path, format="png")


def _number(table: Table, n: int) -> str:
    segment = chr(ord("a") + table.ops.segment[n] % 26) if table.order.sequence_chunks > 1 else ""
    return f"{table.ops.microbatch[n]}{segment}"


def _color(table: Table, n: int) -> np.ndarray:
    """float [3], red, green and blue."""
    order, ops = table.order, table.ops
    code = COLORS[int(ops.kind[n])]
    base = np.array([int(code[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    lighter = 0.55 * (ops.stage[n] // order.ranks) / max(1, order.virtual_stages - 1)
    return (base + lighter * (1 - base)) * (1 - 0.3 * ops.direction[n])
