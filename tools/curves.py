"""python tools/curves.py RUN [RUN ...] --png FILE

Plots the losses of several runs in one figure: training loss, and bits per byte of held-out text.
docs/moe_tiny.png shows `--config dense_tiny` and `--config moe_tiny`.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from matplotlib.figure import Figure

from jaxscale import command_line

PANELS = {
    "loss": "training loss, nats per token",
    "eval_bits_per_byte": "held-out text, bits per byte",
}


def main(argv: Sequence[str]) -> None:
    """Reads `metrics.jsonl` of each run."""
    parser = argparse.ArgumentParser(description="Plots the losses of runs in one figure.")
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN")
    parser.add_argument("--png", required=True, metavar="FILE", type=command_line.output_file)
    options = parser.parse_args(argv)
    for run in options.runs:
        if not (run / "metrics.jsonl").is_file():
            parser.error(f"{run} has no metrics.jsonl; give the --workdir of a run")
    figure = Figure(figsize=(9, 3.4), layout="constrained", dpi=110)
    for panel, (name, title) in zip(figure.subplots(1, 2), PANELS.items()):
        for run in options.runs:
            lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            points = [(line["step"], line[name]) for line in lines if name in line]
            steps, values = [step for step, _ in points], [value for _, value in points]
            panel.plot(steps, values, label=run.name, marker="o" if len(points) < 20 else "")
        panel.set(xlabel="step", title=title)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False)
    figure.savefig(options.png, format="png")


if __name__ == "__main__":
    main(sys.argv[1:])
