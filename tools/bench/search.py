"""python tools/bench/search.py [--config FILE] [--trials 24] [--random 16] [--config.model....]

Compares a search by measuring, as in `plan --measure`, with random layouts. Trials and random
layouts are interleaved, so that other load on the machine affects both equally. At the end the best
layout and the median random layout are measured again, interleaved.
"""

import argparse
import datetime
import json
import os
import pathlib
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from jaxscale import command_line  # noqa: E402
from jaxscale import config as configs  # noqa: E402
from jaxscale.autotune import results, run, search  # noqa: E402
from jaxscale.autotune.search_space import candidates, layout_of, refusal  # noqa: E402
from jaxscale.config import Config  # noqa: E402
from jaxscale.config.layout import Layout  # noqa: E402
from jaxscale.planner.report.text_report import layout_text  # noqa: E402

FINAL_ROUNDS = 3


def main(argv: Sequence[str]) -> int:
    """Prints both, and appends a line to `--json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--devices", type=command_line.whole(1, 4096), default=8)
    parser.add_argument("--trials", type=command_line.whole(1, 10**6), default=24)
    parser.add_argument("--random", type=command_line.whole(1, 10**6), default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", metavar="FILE", type=command_line.output_file)
    parser.add_argument(
        "--json", metavar="FILE", type=command_line.output_file, help="append a line"
    )
    options, overrides = command_line.parse(parser, argv)
    os.environ["JAX_NUM_CPU_DEVICES"] = str(options.devices)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["PYTHONPATH"] = str(ROOT)

    with command_line.refusals():
        config = configs.load(options.config, overrides)
    devices = search.find_devices()
    drawn = iter(draw(config, devices.devices, options.seed))
    by_chance: list[tuple[float, Layout]] = []
    with tempfile.TemporaryDirectory() as folder:
        storage = pathlib.Path(folder) / "layouts.db"
        first = [*run.config_layout(config, devices, {}), *run.planner_layouts(config, devices, {})]
        trials: list[search.Trial] = []
        for count in range(1, options.trials + 1):
            before = trials
            trials = search.search_by_measuring(
                config, devices, trials=count, storage=storage, first=first, seed=options.seed
            )
            print(results.trial_line(trials[-1], before, options.trials), flush=True)
            if len(by_chance) < options.random * count // options.trials:
                by_chance.append(one_by_chance(config, drawn))
        shares = search.importances(search.open_study(config, devices, storage))
    print(results.search_summary(trials, shares, devices, config.layout))
    if options.png:
        results.save_png(options.png, trials, shares)
    report(config, trials, by_chance, shares, options, argv)
    return 0


def draw(config: Config, num_devices: int, seed: int) -> list[Layout]:
    """Runnable layouts, shuffled."""
    layouts = [
        layout_of(one, config.layout, num_devices) for one in candidates(config, num_devices)
    ]
    random.Random(seed + 1).shuffle(layouts)
    return [layout for layout in layouts[:200] if not refusal(config, layout)]


def one_by_chance(config: Config, drawn: Any) -> tuple[float, Layout]:
    """Seconds of the next random layout that can be measured."""
    while True:
        layout = next(drawn)
        outcome, answer = search.try_layout(config, layout)
        if outcome == "measured":
            seconds = statistics.median(answer["step_seconds"])
            print(f"   by chance {seconds:8.4g} s  {layout_text(layout)}", flush=True)
            return seconds, layout
        print(f"   by chance {outcome}: {layout_text(layout)}", flush=True)


def report(
    config: Config,
    trials: Sequence[search.Trial],
    by_chance: list[tuple[float, Layout]],
    shares: dict[str, float],
    options: argparse.Namespace,
    argv: Sequence[str],
) -> None:
    """Measures the best and the median layout again, prints, and writes a line."""
    best = results.ranked(trials)[0]
    by_chance.sort(key=lambda pair: pair[0])
    median, typical = by_chance[(len(by_chance) - 1) // 2]  # the faster one of two
    again: dict[str, list[float]] = {"best": [], "median": []}
    for _ in range(FINAL_ROUNDS):
        for name, layout in (("best", best.layout), ("median", typical)):
            _, answer = search.try_layout(config, layout)
            again[name].append(statistics.median(answer["step_seconds"]))
    ratio = statistics.median(again["median"]) / statistics.median(again["best"])
    command = re.sub(r" --(png|json)[ =]\S+", "", " ".join(["python tools/bench/search.py", *argv]))
    print(
        f"\n{command}\nbest found {best.step_seconds:.4g} s: {layout_text(best.layout)}\n"
        f"random layouts: fastest {by_chance[0][0]:.4g} s, median {median:.4g} s, "
        f"slowest {by_chance[-1][0]:.4g} s\nbest and median measured again, interleaved: "
        f"{ratio:.2f} x as fast {again}"
    )
    if options.json:
        line = {
            "benchmark": "search",
            "date": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds"),
            "command": command,
            "trials": len(trials),
            "failed": sum(not trial.measured for trial in trials),
            "best_seconds": best.step_seconds,
            "best": layout_text(best.layout),
            "own_seconds": trials[0].step_seconds,
            "own": layout_text(trials[0].layout),
            "random_seconds": [seconds for seconds, _ in by_chance],
            "random_median": layout_text(typical),
            "again_seconds": again,
            "speedup_over_random_median": ratio,
            "importance": shares,
            "load": os.getloadavg()[0],
        }
        with open(options.json, "a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
