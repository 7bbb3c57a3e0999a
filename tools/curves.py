"""python tools/curves.py RUN [RUN ...] --png FILE

Plots several runs in one figure, by step: each of `PANELS` that their metrics.jsonl has. Docs name
the runs of their figures.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence

from matplotlib.figure import Figure

from jaxscale import command_line

PANELS = {
    "loss": "training loss, nats per token",
    "eval_bits_per_byte": "held-out text, bits per byte",
    "eval_auc": "held-out clicks, area under the ROC curve",
    "sparsity": "share of zeros in pruned matrices",
}
MOST_POINTS = 100
"""Of a curve: means of consecutive steps."""


def main(argv: Sequence[str]) -> None:
    """Reads `metrics.jsonl` of each run."""
    parser = argparse.ArgumentParser(description="Plots the losses of runs in one figure.")
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN")
    parser.add_argument("--png", required=True, metavar="FILE", type=command_line.output_file)
    options = parser.parse_args(argv)
    runs = {}
    for run in options.runs:
        if not (run / "metrics.jsonl").is_file():
            parser.error(f"{run} has no metrics.jsonl; give the --workdir of a run")
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        runs[run.name] = list(lines)
    found = [name for name in PANELS if any(name in line for run in runs.values() for line in run)]
    figure = Figure(figsize=(4.5 * len(found), 3.4), layout="constrained", dpi=110)
    for panel, name in zip(figure.subplots(1, len(found), squeeze=False)[0], found):
        for number, (run, lines) in enumerate(runs.items()):
            if points := [(line["step"], line[name]) for line in lines if name in line]:
                marker = "o" if len(points) < 20 else ""
                panel.plot(*zip(*means(points)), label=run, marker=marker, color=f"C{number}")
        panel.set(xlabel="step", title=PANELS[name])
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False)
    figure.savefig(options.png, format="png")


def means(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Means of as few consecutive points as give a curve of at most about `MOST_POINTS`."""
    each = max(1, len(points) // MOST_POINTS)
    groups = itertools.batched(points, each)
    return [(statistics.fmean(x), statistics.fmean(y)) for x, y in (zip(*one) for one in groups)]


if __name__ == "__main__":
    main(sys.argv[1:])
