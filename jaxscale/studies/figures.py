"""Figures of studies and notebooks: colours, and curves over numbers of devices.

Colours are the colour-blind-safe palette of Okabe and Ito.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

COLORS = {
    "blue": "#0072b2",
    "orange": "#e69f00",
    "green": "#009e73",
    "purple": "#cc79a7",
    "vermilion": "#d55e00",
    "sky": "#56b4e9",
    "yellow": "#f0e442",
    "gray": "#8a8a8a",
}

Line = Sequence[tuple[float, float]]
"""Points of a curve, (x, y)."""


def make_figure(columns: int, height: float = 3.6) -> tuple[Any, list[Any]]:
    """A figure of several panels in a row."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    figure = Figure(figsize=(4.6 * columns + 0.6, height), layout="constrained", dpi=80)
    panels = list(figure.subplots(1, columns, squeeze=False)[0])
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        panel.set_axisbelow(True)
    return figure, panels


def draw_lines(
    panel: Any,
    lines: Mapping[str, Line],
    points: Mapping[str, Line] | None = None,
    *,
    log_y: bool = False,
    **settings: Any,
) -> None:
    """Curves over numbers of devices or nodes, on a logarithmic axis of base 2.

    Args:
      lines: label -> points of a curve.
      points: label -> points of a paper, drawn as hollow squares; "paper, LABEL" has the colour of
        that curve.
      settings: of the panel, such as its title and labels.
    """
    colors = dict(zip(lines, itertools.cycle(COLORS.values())))
    for label, line in lines.items():
        at, values = [x for x, _ in line], [y for _, y in line]
        panel.plot(at, values, "o-", label=label, color=colors[label], markersize=4)
    for label, line in (points or {}).items():
        at, values = [x for x, _ in line], [y for _, y in line]
        color = colors.get(label.partition(", ")[2], "black")
        panel.plot(at, values, "s", label=label, color=color, fillstyle="none", markersize=6)
    ticks = sorted({x for line in lines.values() for x, _ in line})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [f"{x:,g}" for x in ticks], fontsize=7, rotation=45)
    panel.minorticks_off()
    if log_y:
        _log_ticks(panel)
    else:
        panel.set_ylim(bottom=0)
    panel.set(**settings)
    if lines:
        panel.legend(frameon=False, fontsize=7)


def _log_ticks(panel: Any) -> None:
    from matplotlib import ticker  # noqa: PLC0415 - slow to import

    panel.set_yscale("log")
    panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_locator(ticker.NullLocator())


def draw_stack(
    panel: Any, bars: Mapping[str, Mapping[str, float]], colors: Mapping[str, str], **settings: Any
) -> None:
    """Stacked bars.

    Args:
      bars: label -> part -> height.
      colors: part -> a colour of `COLORS`; the order of the parts.
    """
    bottoms = [0.0] * len(bars)
    for part, color in colors.items():
        heights = [bar.get(part, 0.0) for bar in bars.values()]
        if any(heights):
            panel.bar(list(bars), heights, bottom=bottoms, label=part, color=COLORS[color])
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
    panel.tick_params(axis="x", labelsize=7, rotation=45)
    panel.set(**settings)
    panel.legend(frameon=False, fontsize=7)


def lines_of(
    rows: Sequence[Mapping[str, Any]], label: str, x: str, y: str
) -> dict[str, list[tuple[float, float]]]:
    """Curves of a table: one for each value of a column, in the order of the rows, without rows
    that lack a value."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row[y] is not None and row[x] is not None:
            found.setdefault(str(row[label]), []).append((row[x], row[y]))
    return found
