"""The planner's errors on published runs: by source, of rankings, of memory.

python tools/planner_validation/score.py ROWS.csv [--json FILE]

`rows.csv` shows the columns. Needs no device.

Physical: constants of hardware and software only. Calibrated: one factor for each machine (a
source's runs on one kind of device), fitted on a random half of its rows and scored on the other
half. No row is dropped silently.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from jaxscale import command_line  # noqa: E402
from jaxscale.planner.cost.cluster import find_device  # noqa: E402
from jaxscale.planner.cost.energy import run_joules  # noqa: E402
from tools.planner_validation.published_runs import Bill, Row, read_runs  # noqa: E402
from tools.planner_validation.trainer_cost import trainer_cost  # noqa: E402
from tools.planner_validation.trainer_memory import (  # noqa: E402
    published_size,
    trainer_memory,
)


def main(argv: Sequence[str]) -> int:
    """Prints the scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", metavar="ROWS.csv", help="a file of measured runs")
    parser.add_argument(
        "--json", type=command_line.output_file, metavar="FILE", help="write the numbers to a file"
    )
    options, _ = command_line.parse(parser, argv)
    with command_line.refusals():
        report = validate(options.rows)
    print(report.text())
    if options.json:
        options.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    return 0


@dataclass(frozen=True)
class Score:
    """The score of one source, or of all. Errors are |predicted / measured - 1|; None where nothing
    was measured."""

    rows: int
    handled: int
    refused: int  # incomplete rows, or with an unknown word
    median_error_physical: float | None
    mean_error_physical: float | None
    median_error_calibrated: float | None
    mean_error_calibrated: float | None
    memory_rows: int
    memory_median_error: float | None
    energy_median_error: float | None  # of whole runs, from their device-hours
    oom_flagged: int  # of the runs that ran out of memory
    oom_missed: int
    fit_flagged: int  # of the runs that were measured: false alarms
    fit_passed: int
    groups: int  # of runs that share model and machine and differ in layout or precision
    regret: float | None  # mean over groups: the run that we rank first against the fastest
    regret_of_layouts: float | None  # the same in groups that share their precision, too
    worst_regret: float | None
    pair_accuracy: float | None  # of pairs of a group, in the right order


@dataclass(frozen=True)
class Report:
    """Scores by source, from `validate`."""

    overall: Score
    sources: dict[str, Score]
    unhandled: dict[str, int]  # reason -> rows

    def as_json(self) -> dict:
        """Plain numbers and texts."""
        return dataclasses.asdict(self)

    def text(self) -> str:
        """A table, by source."""
        lines = [f"{'source':44} rows handled refused physical calibrated memory regret"]
        for name, score in [*self.sources.items(), ("overall", self.overall)]:
            cells = (
                score.median_error_physical,
                score.median_error_calibrated,
                score.memory_median_error,
                score.regret,
            )
            shown = [f"{100 * cell:.1f} %" if cell is not None else "-" for cell in cells]
            lines.append(
                f"{name[:44]:44} {score.rows:4} {score.handled:7} {score.refused:7} "
                f"{shown[0]:>8} {shown[1]:>10} {shown[2]:>6} {shown[3]:>6}"
            )
        one = self.overall
        ran_out = one.oom_flagged + one.oom_missed
        lines += [
            "",
            f"mean errors: physical {_percent(one.mean_error_physical)}, calibrated "
            f"{_percent(one.mean_error_calibrated)}; pairs in the right order: "
            f"{_percent(one.pair_accuracy)} in {one.groups} groups, worst regret "
            f"{_percent(one.worst_regret)}, mean of layouts alone "
            f"{_percent(one.regret_of_layouts)}",
            f"out of memory: {one.oom_flagged} of {ran_out} flagged; "
            f"{one.fit_flagged} of {one.fit_flagged + one.fit_passed} measured runs flagged",
        ]
        if self.unhandled:
            lines += ["", "refused:"]
            lines += [f"  {count:4} {reason}" for reason, count in self.unhandled.items()]
        return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


@dataclass(frozen=True)
class _Result:
    row: Row
    ratio: float  # predicted over measured step; nan where none was measured
    calibrated: float  # the same after calibration; nan for rows that the factor was fitted on
    memory: float  # bytes that the run needs
    sizes: tuple[float, ...]  # predicted over measured sizes
    seconds: float


def validate(path: str | pathlib.Path, seed: int = 0) -> Report:
    """Scores the planner on a file of measured runs.

    Args:
      path: a CSV file, see `published_runs`.
      seed: of the random halves on which factors are fitted.
    """
    found = read_runs(path)
    results = _calibrate([_predict(row) for row in found.runs], seed)
    rows = Counter(row.source for row in [*found.runs, *found.bills])
    rows.update(source for source, _ in found.unhandled)
    runs, bills = defaultdict(list), defaultdict(list)
    for result in results:
        runs[result.row.source].append(result)
    for bill in found.bills:
        bills[bill.source].append(bill)
    return Report(
        overall=_score(results, found.bills, sum(rows.values())),
        sources={name: _score(runs[name], bills[name], rows[name]) for name in sorted(rows)},
        unhandled=dict(Counter(why for _, why in found.unhandled).most_common()),
    )


def _predict(row: Row) -> _Result:
    seconds = (
        trainer_cost(row.shape.work, row.cluster, row.parallelism).step_seconds
        if row.step_seconds
        else np.nan
    )
    memory = trainer_memory(row.shape, row.parallelism)
    ratio = seconds / row.step_seconds if row.step_seconds else np.nan
    needed, taken = float(memory.needed), float(memory.read(row.reading))
    sizes = [published_size(row.shape, row.parallelism, name) / n for name, n in row.sizes.items()]
    if row.memory_bytes:
        sizes.append(min(taken, row.cluster.memory_bytes) / row.memory_bytes)
    return _Result(row, float(ratio), np.nan, needed, tuple(sizes), float(seconds))


def _calibrate(results: list[_Result], seed: int) -> list[_Result]:
    generator = np.random.default_rng(seed)
    machines = defaultdict(list)
    for index, result in enumerate(results):
        if np.isfinite(result.ratio):
            machines[result.row.machine].append(index)
    found = list(results)
    for machine in sorted(machines):
        order = generator.permutation(machines[machine])
        fitted, scored = order[: len(order) // 2], order[len(order) // 2 :]
        factor = _factor(np.array([results[i].ratio for i in fitted]))
        for i in scored:
            found[i] = dataclasses.replace(results[i], calibrated=results[i].ratio / factor)
    return found


def _factor(ratios: np.ndarray) -> float:
    """The geometric median of a machine's ratios and one pseudo-observation of 1: a single row can
    be an outlier, and moves the factor by half of its logarithm."""
    return float(np.exp(np.median(np.log([1.0, *ratios]))))


def _score(results: list[_Result], bills: list[Bill], rows: int) -> Score:
    physical = _errors(r.ratio for r in results)
    calibrated = _errors(r.calibrated for r in results)
    memory = _errors(size for r in results for size in r.sizes)
    energy = _errors(_joules(bill) / bill.joules for bill in bills)
    failed = [_does_not_fit(r) for r in results if r.row.out_of_memory]
    ran = [_does_not_fit(r) for r in results if r.row.step_seconds and not r.row.out_of_memory]
    regrets, pairs = _ranking(results, by_precision=False)
    layouts_alone, _ = _ranking(results, by_precision=True)
    handled = len(results) + len(bills)
    return Score(
        rows=rows,
        handled=handled,
        refused=rows - handled,
        median_error_physical=_median(physical),
        mean_error_physical=_mean(physical),
        median_error_calibrated=_median(calibrated),
        mean_error_calibrated=_mean(calibrated),
        memory_rows=len(memory),
        memory_median_error=_median(memory),
        energy_median_error=_median(energy),
        oom_flagged=sum(failed),
        oom_missed=len(failed) - sum(failed),
        fit_flagged=sum(ran),
        fit_passed=len(ran) - sum(ran),
        groups=len(regrets),
        regret=_mean(regrets),
        worst_regret=max(regrets, default=None),
        regret_of_layouts=_mean(layouts_alone),
        pair_accuracy=_mean(pairs),
    )


def _joules(bill: Bill) -> float:
    chip = find_device(bill.hardware)
    # As in the tables of LLaMA and GLaM: a device's power limit, or its share of the server's where
    # none is published, times the overhead of the building.
    limit = chip.system_watts if chip.torus_axes else chip.tdp_watts
    return run_joules(bill.device_hours, limit, bill.overhead)


def _does_not_fit(result: _Result) -> bool:
    return bool(result.memory > result.row.cluster.memory_bytes)


def _errors(ratios: Iterable[float]) -> list[float]:
    return [abs(ratio - 1) for ratio in ratios if np.isfinite(ratio)]


def _median(values: list) -> float | None:
    return float(np.median(values)) if values else None


def _mean(values: list) -> float | None:
    return float(np.mean(values)) if values else None


def _ranking(results: list[_Result], by_precision: bool) -> tuple[list[float], list[bool]]:
    """The regret of each group, and whether each pair is in the right order; by seconds per
    sequence, since layouts may have different batches.

    A group shares source, trainer's release, model and machine, and with `by_precision` also its
    precision.
    """
    groups = defaultdict(list)
    for result in results:
        row = result.row
        if np.isfinite(result.ratio):
            key = (
                *row.machine,
                row.framework,
                row.model,
                row.shape,
                int(row.parallelism.num_devices),
            )
            groups[*key, row.precision if by_precision else None].append(result)
    regrets, pairs = [], []
    for members in groups.values():
        layouts = {dataclasses.replace(r.row.parallelism, microbatches=0) for r in members}
        if len(layouts) < 2:
            continue
        batch = [float(r.row.parallelism.global_batch) for r in members]
        measured = np.array([r.row.step_seconds / b for r, b in zip(members, batch)])
        predicted = np.array([r.seconds / b for r, b in zip(members, batch)])
        regrets.append(float(measured[predicted.argmin()] / measured.min() - 1))
        for i, j in itertools.combinations(range(len(members)), 2):
            if predicted[i] != predicted[j] and measured[i] != measured[j]:
                pairs.append(bool((predicted[i] < predicted[j]) == (measured[i] < measured[j])))
    return regrets, pairs


if __name__ == "__main__":
    command_line.run(main)
