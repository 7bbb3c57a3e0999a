"""Pipeline timelines as text and as pictures: a row per rank, time to the right."""

from typing import TYPE_CHECKING

import numpy as np

from jaxscale.pipeline.simulator import Run
from jaxscale.pipeline.table import Table
from jaxscale.pipeline_schedules.operations import B, F, R, W, X

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

CHUNKS = ("", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹")
SIGNS = {F: "F", R: "r", B: "b", W: "w", X: "X"}
WORDS = {F: "forward", R: "recompute", B: "input gradient", W: "weight gradient", X: "backward"}
COLORS = {F: "#3f78d1", R: "#8f7cc4", B: "#43a663", W: "#e9a13b", X: "#1f8e9e"}
IDLE = "#ececee"
CELL_INCHES = 0.25  # of the shortest operation
MARGIN_INCHES = 1.3  # for the names of the ranks
MOST_INCHES = 60  # of a picture
SMALLEST_POINTS = 4.5  # of a legible number


def timeline_text(table: Table, start: np.ndarray, duration: np.ndarray, columns: int = 0) -> str:
    """The timeline as text, one cell an operation.

    `F3` forward of micro-batch 3, `b3` input gradient, `w3` weight gradient, `X3==` both, `r3`
    recompute; then the segment as a letter, the chunk of the rank as a superscript, `^` for the
    direction that enters at the last rank, `+` before a cell that overlaps with the previous one.

    Args:
      table: of the operations.
      start, duration: float [N], times of the operations.
      columns: of the terminal, to fold long lines into blocks; 0 never folds.
    """
    labels = [_label(table, n) for n in range(len(start))]
    width = max(map(len, labels))
    low = (start * _scale(duration) * width).round().astype(int)
    high = ((start + duration) * _scale(duration) * width).round().astype(int)
    lines = [["."] * high.max() for _ in table.order.rows]
    for n, label in enumerate(labels):
        cell = label.ljust(width).ljust(high[n] - low[n], "=")
        lines[table.ops.rank[n]][low[n] : high[n]] = cell[: high[n] - low[n]]
    names = [f"rank {r}".ljust(len(f"rank {len(lines)}")) for r in range(len(lines))]
    length = columns - len(names[0]) - 3
    length = high.max() if columns <= 0 else max(width, length // width * width)
    return "\n\n".join(
        "\n".join(f"{name} |{''.join(line[at : at + length])}|" for name, line in zip(names, lines))
        for at in range(0, high.max(), length)
    )


def _label(table: Table, n: int) -> str:
    order, ops = table.order, table.ops
    kind = SIGNS[int(ops.kind[n])]
    chunk = ops.stage[n] // order.ranks
    mark = CHUNKS[chunk] if chunk < len(CHUNKS) else f"'{chunk}"
    direction, overlap = "^" * ops.direction[n], "+" * ops.paired[n]
    return f"{overlap}{kind}{_number(table, n)}{mark}{direction}"


def _scale(duration: np.ndarray) -> float:
    """Cells per unit of time, so that all except very short operations fill one."""
    return 1 / duration[duration >= duration.max() / 4].min()


def write_png(path: str, table: Table, run: Run, title: str) -> None:
    """Draws a run, with operations as early as possible, to a PNG file.

    Colours are types of operation; later chunks of a rank are lighter; micro-batches that enter at
    the last rank are darker; a frame joins an overlapped pair. Numbers are micro-batches, letters
    sequence chunks.
    """
    # Imported here: slow, and only a picture needs it.
    from matplotlib.figure import Figure  # noqa: PLC0415

    ranks = table.order.ranks
    cells = run.makespan * _scale(run.duration)
    inches = float(np.clip(MARGIN_INCHES + cells * CELL_INCHES, 8, MOST_INCHES))
    figure = Figure(figsize=(inches, 1.3 + 0.34 * ranks), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    axes.set(xlim=(0, run.makespan), ylim=(ranks, 0), title=title, xlabel="time")
    axes.set_facecolor(IDLE)
    axes.set_yticks(np.arange(ranks) + 0.5, [f"rank {r}" for r in range(ranks)])
    axes.tick_params(axis="y", length=0)
    draw_operations(axes, table, run, 72 * (inches - MARGIN_INCHES) / cells)
    patches = legend(table)
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=len(patches),
        frameon=False,
        fontsize=9,
        handlelength=1.4,
        columnspacing=1.4,
    )
    figure.savefig(path, format="png")


def draw_operations(axes: "Axes", table: Table, run: Run, cell_points: float) -> None:
    """Draws boxes, with numbers if they fit into `cell_points`, the width of a cell."""
    order, ops = table.order, table.ops
    later = (ops.stage // order.ranks) / max(1, order.virtual_stages - 1)
    colors = [_color(*of) for of in zip(ops.kind.tolist(), later, ops.direction)]
    spans = list(zip(run.start, run.duration))
    drawn = run.duration > 0
    for r in range(order.ranks):
        mine = np.flatnonzero(drawn & (ops.rank == r))
        axes.broken_barh(
            [spans[n] for n in mine],
            (r, 1),
            facecolors=[colors[n] for n in mine],
            edgecolors="white",
            linewidths=0.5,
        )
        pairs = [(spans[n - 1][0], spans[n - 1][1] + spans[n][1]) for n in mine if ops.paired[n]]
        axes.broken_barh(pairs, (r, 1), facecolors="none", edgecolors="black", linewidths=1)

    labels = [_number(table, n) for n in range(len(spans))]
    points = min(8.5, 1.5 * cell_points / max(map(len, labels)))
    if points < SMALLEST_POINTS:
        return
    for n in np.flatnonzero(drawn):
        middle = run.start[n] + run.duration[n] / 2, ops.rank[n] + 0.52
        ink = "black" if np.mean(colors[n]) > 0.62 else "white"
        axes.text(
            *middle,
            labels[n],
            ha="center",
            va="center",
            fontsize=points,
            color=ink,
            in_layout=False,
        )


def legend(table: Table) -> "list[Patch]":
    """A patch for each colour of a table's operations."""
    from matplotlib.patches import Patch  # noqa: PLC0415

    order, ops = table.order, table.ops
    patches = [
        Patch(facecolor=COLORS[kind], label=WORDS[kind])
        for kind in WORDS
        if (ops.kind == kind).any()
    ]
    if order.virtual_stages > 1:
        patches.append(Patch(facecolor=_color(F, 1, 0), label="last chunk"))
    if ops.direction.any():
        patches.append(Patch(facecolor=_color(F, 0, 1), label="enters at the last rank"))
    return [*patches, Patch(facecolor=IDLE, edgecolor="#bbbbbb", label="idle")]


def _number(table: Table, n: int) -> str:
    segment = chr(ord("a") + table.ops.segment[n] % 26) if table.order.sequence_chunks > 1 else ""
    return f"{table.ops.microbatch[n]}{segment}"


def _color(kind: int, later: float, direction: int) -> tuple[float, float, float]:
    """Red, green and blue; `later` runs from 0, the first chunk of a rank, to 1, its last."""
    base = np.array([int(COLORS[kind][at : at + 2], 16) for at in (1, 3, 5)]) / 255
    base *= 1 - 0.35 * direction
    red, green, blue = base + 0.6 * later * (1 - base)
    return red, green, blue
