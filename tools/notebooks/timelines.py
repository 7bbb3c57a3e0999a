"""Timelines of several schedules on one time axis, for notebooks and talks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxscale.pipeline import draw
from jaxscale.pipeline.simulator import Run
from jaxscale.pipeline.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

INCHES, MARGIN_INCHES = 12.0, 1.0


def draw_timelines(runs: Mapping[str, tuple[Table, Run]]) -> "Figure":
    """A panel per run, with operations as early as possible, on one time axis.

    Args:
      runs: title -> table, and its simulation.
    """
    # Imported here: slow, and only a picture needs it.
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = [table.order.ranks for table, _ in runs.values()]
    height = sum(0.55 + 0.2 * count for count in rows) + 0.7
    figure = Figure(figsize=(INCHES, height), layout="constrained", dpi=110)
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    longest = max(run.makespan for _, run in runs.values())
    patches = {}
    for panel, (title, (table, run)) in zip(panels, runs.items()):
        ranks = table.order.ranks
        panel.add_patch(_background(run.makespan, ranks))
        cells = longest / run.duration[run.duration > 0].min()
        draw.draw_operations(panel, table, run, 72 * (INCHES - MARGIN_INCHES) / cells)
        panel.set(xlim=(0, longest), ylim=(ranks, 0))
        panel.set_yticks([0.5, ranks - 0.5], ["rank 0", f"rank {ranks - 1}"], fontsize=8)
        panel.tick_params(axis="y", length=0)
        panel.tick_params(axis="x", length=0, labelbottom=False)
        panel.spines[:].set_visible(False)
        idle = f"{run.idle_fraction:.0%} idle, saves at most {max(run.peak_stash):g} micro-batches"
        panel.set_title(f"{title}:  {idle}", loc="left", fontsize=10)
        patches |= {patch.get_label(): patch for patch in draw.legend(table)}
    panels[-1].tick_params(axis="x", length=3, labelbottom=True)
    panels[-1].set_xlabel("time, in forward passes of a rank's layers")
    figure.legend(
        handles=list(patches.values()),
        loc="outside lower center",
        ncols=len(patches),
        frameon=False,
        fontsize=9,
        handlelength=1.4,
    )
    return figure


def _background(makespan: float, ranks: int) -> "Rectangle":
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    return Rectangle((0, 0), makespan, ranks, facecolor=draw.IDLE, linewidth=0)
