"""loss.png, the plot of a run's losses and learning rate."""

import itertools
import os
from typing import Any


def plot(path: str | os.PathLike, records: list[dict[str, Any]]) -> None:
    """Draws train loss, plain and smoothed, evaluation loss, and the learning rate below.

    Args:
      path: the picture, overwritten.
      records: from `metrics.read`; without a loss nothing is drawn.
    """
    # matplotlib takes seconds to import, and is needed once, at the end.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    steps, losses = _column(records, "loss")
    evaluations = _evaluations(records)
    if not steps and not evaluations:
        return
    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    dot = {"marker": "o", "markersize": 4} if len(steps) == 1 else {}  # a line has no length
    top.plot(steps, losses, color="#9ecae1", linewidth=0.8, label="train", **dot)
    top.plot(
        steps, smoothed(losses), color="#08519c", linewidth=1.8, label="train, smoothed", **dot
    )
    for (name, (at, found)), color in zip(evaluations.items(), itertools.cycle(_COLORS)):
        top.plot(at, found, color=color, marker="o", markersize=4, linewidth=1.2, label=name)
    top.set_ylabel("loss (nats per token)")
    top.legend(frameon=False)
    bottom.plot(*_column(records, "learning_rate"), color="#636363", linewidth=1.2, **dot)
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("step")
    bottom.locator_params(axis="x", integer=True)
    for panel in (top, bottom):
        panel.grid(color="#e5e5e5", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.01)
    figure.align_ylabels()
    figure.savefig(path)


_COLORS = ("#d95f0e", "#31a354", "#756bb1", "#e7298a", "#636363", "#a6761d")


def _column(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """The steps with a value of this field, and the values."""
    found = [record for record in records if record.get(name) is not None]
    return [record["step"] for record in found], [record[name] for record in found]


def _evaluations(records: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Name in the plot -> steps and losses of an evaluated set."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for record in records:
        for key, value in record.items():
            title, _, name = key.partition("/")
            if title == "eval_loss" and value is not None:
                steps, losses = found.setdefault(name or "evaluation", ([], []))
                steps.append(record["step"])
                losses.append(value)
    return found


def smoothed(values: list[float]) -> list[float]:
    """Moving averages over a centred window, a fiftieth of the run wide, shorter at the ends."""
    sums = [0.0, *itertools.accumulate(values)]
    half = len(values) // 100
    ends = [(max(i - half, 0), min(i + half + 1, len(values))) for i in range(len(values))]
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in ends]
