"""Results of a measured search, as text, JSON and a figure."""

import collections
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.autotune.search import OUTCOMES, Devices, Trial
from jaxscale.config.layout import Layout
from jaxscale.formatting import human_bytes, table
from jaxscale.planner.report.text_report import layout_text

SHOWN = 5
"""The number of layouts in the table."""

POINT, BEST, FAILED, BARS = "#56b4e9", "#0072b2", "#d55e00", "#0072b2"
"""Colours of the colour-blind-safe palette of Okabe and Ito."""


def layout_flags(layout: Layout, base: Layout) -> str:
    """The flags of `python -m jaxscale.train` that set a layout.

    Args:
      base: the layout of the config.
    """
    return " ".join(
        f"--config.layout.{name}={value}"
        for name, value in vars(layout).items()
        if name == "data" or value != getattr(base, name)
    )


def trial_line(trial: Trial, before: Sequence[Trial], trials: int) -> str:
    """A line about a finished trial."""
    head = f"{len(before) + 1:4d}/{trials}  "
    if not trial.measured:
        return f"{head}{trial.outcome:>13}  {layout_text(trial.layout)}: {trial.message}"
    best = min([one.step_seconds for one in before if one.step_seconds], default=float("inf"))
    new = "  best so far" if trial.step_seconds < best else ""  # pyright: ignore
    return f"{head}{trial.step_seconds:11.4g} s  {layout_text(trial.layout)}{new}"


def search_summary(
    trials: Sequence[Trial], importance: Mapping[str, float], devices: Devices, base: Layout
) -> str:
    """Text of outcomes, the fastest layouts with the first one as a reference, and the importance
    of settings.

    Args:
      base: the layout of the config.
    """
    counts = collections.Counter(trial.outcome for trial in trials)
    came = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    parts = [f"{len(trials)} trials on {devices.devices} x {devices.kind}: {came}"]
    best = ranked(trials)
    if not best:
        return "\n\n".join([*parts, f"no layout could be measured; {_advice(trials)}"])
    first = next(trial for trial in trials if trial.measured)
    shown = best[:SHOWN] + ([first] if first not in best[:SHOWN] else [])
    rows = [("rank", "s/step", "memory", "trial", "layout")]
    rows += [
        (
            str(best.index(one) + 1),
            f"{one.step_seconds:.4g}",
            human_bytes(one.memory_bytes or 0),
            str(one.number + 1),  # as in its line
            layout_text(one.layout),
        )
        for one in shown
    ]
    parts.append("fastest layouts, and the first measured one\n" + table(rows))
    if importance:
        rows = [(name, f"{share:.0%}") for name, share in importance.items()]
        parts.append(
            "importance of settings: share of the variance of step time (fANOVA)\n" + table(rows)
        )
    parts.append(f"flags of the fastest layout:\n  {layout_flags(best[0].layout, base)}")
    return "\n\n".join(parts)


def _advice(trials: Sequence[Trial]) -> str:
    """Advice for a search without a measured layout."""
    if all(trial.outcome == "timed out" for trial in trials):
        return "all timed out: raise --trial_seconds, and give another file in --storage"
    return "see the messages above"


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """The measured trials, fastest first."""
    return sorted(
        (trial for trial in trials if trial.measured), key=lambda one: one.step_seconds or 0
    )


def search_json(trials: Sequence[Trial], importance: Mapping[str, float]) -> dict[str, Any]:
    """The trials and the importances as plain values, for JSON."""
    return {
        "trials": [
            {**vars(trial), "layout": vars(trial.layout), "text": layout_text(trial.layout)}
            for trial in trials
        ],
        "importance": dict(importance),
    }


def save_png(path: pathlib.Path, trials: Sequence[Trial], importance: Mapping[str, float]) -> None:
    """The history of a search and the importance of each setting, as a PNG file."""
    # matplotlib is slow to import, and only figures need it.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(11, 4.2), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    _history(left, trials)
    _bars(right, importance)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def _history(axes: Any, trials: Sequence[Trial]) -> None:
    at, seconds, best, failed = [], [], [], []
    for count, trial in enumerate(trials, 1):
        if trial.measured:
            at.append(count)
            seconds.append(trial.step_seconds)
            best.append(min(seconds))
        else:
            failed.append(count)
    axes.set(xlabel="trial", ylabel="seconds per step", title="Search by measuring")
    axes.locator_params(axis="x", integer=True)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    if seconds:
        axes.set_yscale("log")
        axes.scatter(at, seconds, s=28, color=POINT, label="measured", zorder=3)
        axes.step(
            [*at, len(trials)],
            [*best, best[-1]],
            where="post",
            color=BEST,
            linewidth=2,
            label=f"best so far: {best[-1]:.3g} s",
        )
        _plain_ticks(axes)
    if failed:
        axes.scatter(
            failed,
            [1] * len(failed),
            s=34,
            marker="x",
            color=FAILED,
            zorder=3,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            label="failed",
        )
    axes.legend(frameon=False, loc="best")


def _plain_ticks(axes: Any) -> None:
    from matplotlib import ticker  # noqa: PLC0415

    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def _bars(axes: Any, importance: Mapping[str, float]) -> None:
    axes.set(title="Importance of settings", xlabel="share of variance (fANOVA)")
    if not importance:
        axes.text(0.5, 0.5, "too few trials", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    names = [name.replace("_", " ") for name in importance][::-1]
    shares = list(importance.values())[::-1]
    axes.barh(names, shares, color=BARS, height=0.7)
    axes.tick_params(axis="y", length=0)
    for row, share in enumerate(shares):
        axes.text(share, row, f" {share:.0%}", va="center", fontsize=9)
    axes.set_xlim(0, max(shares) * 1.18)
    axes.set_xticks([])
