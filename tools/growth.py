"""python tools/growth.py [--steps N N] [--json FILE] [--png FILE]

Trains small decoders on Python's source in two comparisons at equal FLOPs. Layers: with their own
weights, shared to the end, shared to half. Experts: none, from scratch, and grown from half of the
run without. docs/growth.md shows the table and docs/growth.png the held-out losses. The steps are
those of the two comparisons.
"""

import argparse
import json
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import adapters  # selects the CPU
from matplotlib.figure import Figure

import jaxscale
from jaxscale import command_line, grow
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine

EXPERTS = ["model.family=mixtral", "model.num_experts=8", "model.experts_per_token=2"]
PANELS = "layers", "experts"


def main(argv: Sequence[str]) -> None:
    """Trains all runs in a temporary folder."""
    parser = argparse.ArgumentParser(description="Compares models that grow with others.")
    whole = command_line.whole(20, 10**6)
    parser.add_argument("--steps", type=whole, nargs=2, default=(400, 400), metavar="N")
    parser.add_argument("--json", type=command_line.output_file, metavar="FILE")
    parser.add_argument("--png", type=command_line.output_file, metavar="FILE")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        comparisons = sharing, experts
        rows = {
            panel: compare(pathlib.Path(folder) / panel, steps)
            for panel, compare, steps in zip(PANELS, comparisons, options.steps)
        }
    print(table(rows))
    if options.json:
        command_line.write_json(options.json, rows)
    if options.png:
        draw(rows, options.png)


def sharing(runs: pathlib.Path, steps: int) -> dict[str, Any]:
    """Four layers with separate weights, with one layer's, and with one layer's to half."""
    kinds = {
        "own weights": [],
        "shared": ["model.share_layers=4"],
        "shared to half": ["model.share_layers=4", f"model.unshare_at={steps // 2}"],
    }
    flops, rows = step_flops([]), {}
    for number, (name, settings) in enumerate(kinds.items()):
        train(runs / str(number), steps, settings, every=steps // 20)
        rows[name] = curve([(runs / str(number), flops)])
    return rows


def experts(runs: pathlib.Path, steps: int) -> dict[str, Any]:
    """As many FLOPs for a dense decoder, for experts, and for a dense one that gets experts."""
    dense, sparse = step_flops([]), step_flops(EXPERTS)
    long, half = round(steps * sparse / dense), round(steps * sparse / dense / 2)
    every, end = steps // 20, half + steps // 2
    train(runs / "dense", long, [], every=every)
    train(runs / "experts", steps, EXPERTS, every=every)
    train(runs / "half", half, [f"optimizer.schedule_steps={end}"], every=every)
    grown = runs / "grown"
    grow.main(["--workdir", f"{runs / 'half'}", "--output", f"{grown}", "--to", *EXPERTS])
    config = jaxscale.load(grown / "config.json", [f"run.steps={end}"])
    trainer = jaxscale.open_trainer(config, grown)
    assert trainer
    jaxscale.fit(trainer)
    return {
        "dense": curve([(runs / "dense", dense)]),
        "experts": curve([(runs / "experts", sparse)]),
        "dense to half, then experts": curve([(runs / "half", dense), (grown, sparse)]),
    }


def train(workdir: pathlib.Path, steps: int, settings: Sequence[str], *, every: int) -> None:
    """Trains a decoder, with an evaluation every so many steps."""
    periods = [f"run.steps={steps}", f"run.eval_every={every}"]
    adapters.train([*adapters.BASE, *periods, *settings], workdir)


def step_flops(settings: Sequence[str]) -> float:
    """FLOPs of the compiled step's matmuls."""
    config = jaxscale.load("tiny", [*adapters.MODEL, *adapters.BASE, *settings])
    engine = make_engine(config, make_mesh(config.layout))
    step = engine.step.lower(engine.abstract_state, engine.abstract_batch)
    return adapters.matmul_flops(step.compile())


def curve(parts: Sequence[tuple[pathlib.Path, float]]) -> dict[str, list[float]]:
    """FLOPs spent and held-out losses of runs that continue each other.

    Args:
      parts: folder and FLOPs of a step of each.
    """
    points, spent, begin = [], 0.0, 0
    for workdir, flops in parts:
        lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
        losses = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
        points += [(spent + (step - begin) * flops, loss) for step, loss in losses.items()]
        spent, begin = spent + (max(losses) - begin) * flops, max(losses)
    return {"flops": [at for at, _ in points], "loss": [loss for _, loss in points]}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The last losses as a table in Markdown."""
    lines = ["| run | FLOPs | held-out loss |", "|---|---|---|"]
    for panel in rows.values():
        for name, points in panel.items():
            lines.append(f"| {name} | {points['flops'][-1]:.3g} | {points['loss'][-1]:.3f} |")
    return "\n".join(lines)


def draw(rows: dict[str, dict[str, Any]], file: Any) -> None:
    """Held-out losses by FLOPs, a panel for each comparison."""
    figure = Figure(figsize=(9, 3.4), layout="constrained", dpi=110)
    for axes, (title, runs) in zip(figure.subplots(1, len(rows)), rows.items()):
        for name, points in runs.items():
            axes.plot(points["flops"], points["loss"], label=name, marker="o", markersize=3)
        axes.set(xlabel="FLOPs", ylabel="held-out loss, nats per byte", title=title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(file, format="png")


if __name__ == "__main__":
    main(sys.argv[1:])
