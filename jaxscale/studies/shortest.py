"""The shortest training time of the X family at the critical batch, with and without layered
gradient accumulation and modular pipelines (arXiv 2106.02679)."""

import itertools
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from jaxscale import config as configs
from jaxscale.choices import divisors
from jaxscale.config import Config
from jaxscale.config.layout import Layout
from jaxscale.planner.cost.cluster import find_device
from jaxscale.studies.figures import draw_lines, lines_of, make_figure
from jaxscale.studies.plans import PLAN_COLUMNS, Planned, plan_of, plan_row
from jaxscale.studies.study import Case, Comparison, Study, StudyRow

STEPS = 100_000
"""Steps of a training: the facts of the paper's time model, uncertain."""
SIZES = (64, 108, 160)
NEITHER, LAYERED, MODULAR, BOTH = "neither", "layered", "modular", "both"
VARIANTS = {
    NEITHER: ("sequential", "1f1b", False),
    LAYERED: ("layered", "gpipe", False),
    MODULAR: ("sequential", "interleaved", True),
    BOTH: ("layered", "breadth_first", True),
}
"""Variant -> the order of accumulation without a pipeline, the schedule of a pipeline, and whether
each of its chunks is one layer."""
BANDWIDTHS = (1.56, 3.12, 6.25, 12.5, 50.0, 100.0)
"""GB/s of a device's network, next to that of its row."""
TORUS_NODE = 8
"""Most tensor ranks on a torus, which has no nodes."""
MOST_RANKS = 64
"""Pipeline ranks that are tried."""


def _cases(quick: bool, hardware: str) -> Sequence[Case]:
    own = find_device(hardware).network_bytes_per_second / 1e9
    sizes = SIZES[-1:] if quick else SIZES
    rates = [own] if quick else [own, *(one for one in BANDWIDTHS if one != own)]
    found = [
        {"x": x, "variant": variant, "network_gb_per_second": own, "hardware": hardware}
        for x in sizes
        for variant in VARIANTS
    ]
    found = [{**one, "every_depth": not quick} for one in found]
    found += [
        {**one, "network_gb_per_second": rate, "every_depth": False}
        for rate in rates[1:]
        for one in found
        if one["x"] == sizes[-1] and one["variant"] in (NEITHER, BOTH)
    ]
    return found


def layouts(config: Config, variant: str, node: int, every_depth: bool) -> Iterator[Layout]:
    """Layouts of a variant, each with its number of devices: tensor ranks inside a node, and in
    pipelines one sequence in a micro-batch, and half to four times as many micro-batches as ranks.

    Args:
      node: devices of a node.
      every_depth: all numbers of pipeline ranks that divide the layers, or every second.
    """
    accumulation, schedule, modular = VARIANTS[variant]
    model, batch = config.model, config.data.global_batch_size
    tensor = max(n for n in divisors(math.gcd(model.num_heads, model.d_model)) if n <= node)
    depths = [n for n in divisors(model.num_layers) if n <= MOST_RANKS]
    for p, m, zero in itertools.product(
        depths[:: 1 if every_depth else 2], divisors(batch), (1, 3)
    ):
        if (p > 1 and not p <= 2 * m <= 8 * p) or (modular and p == model.num_layers):
            continue
        settings: dict[str, Any] = {"schedule": schedule, "virtual_stages": 1}
        if p == 1:
            settings = {"accumulation": accumulation}
        elif modular:
            settings["virtual_stages"] = model.num_layers // p
        for each in divisors(batch // m) if p == 1 else [1]:
            fsdp = math.gcd(batch // m // each, model.d_model)
            yield Layout(
                data=batch // m // each // fsdp,
                fsdp=fsdp,
                tensor=tensor,
                pipeline=p,
                microbatches=m,
                zero_stage=zero,
                remat="full",
                **settings,
            )


def _rows(case: Case, _: pathlib.Path) -> list[StudyRow]:
    """The plans that fit and are faster than all with at most as many devices."""
    config = configs.load(f"x_family:{case['x']}")
    node = find_device(case["hardware"]).node_devices
    node = node if node > 1 else TORUS_NODE
    rate = case["network_gb_per_second"] * 1e9
    found: list[tuple[int, Planned]] = []
    for layout in layouts(config, case["variant"], node, case["every_depth"]):
        planned = plan_of(
            config,
            case["hardware"],
            layout.num_devices,
            layout,
            network_bytes_per_second=rate,
        )
        if planned[0] and planned[0].fits:
            found.append((layout.num_devices, planned))
    found.sort(key=lambda one: (one[0], one[1][0].step_seconds if one[1][0] else 0))
    rows, best = [], math.inf
    for devices, planned in found:
        seconds = planned[0].step_seconds if planned[0] else math.inf
        if seconds < best:
            best = seconds
            rows.append(_row(case, config, devices, planned))
    return rows


def _row(case: Case, config: Config, devices: int, planned: Planned) -> StudyRow:
    return {
        "x": case["x"],
        "variant": case["variant"],
        "network_gb_per_second": case["network_gb_per_second"],
        "batch_sequences": config.data.global_batch_size,
        "devices": devices,
        "days": planned[0].step_seconds * STEPS / 86_400 if planned[0] else None,
        "bubble_s": planned[0].terms.get("bubble", 0.0) if planned[0] else None,
        **plan_row(planned),
    }


def best_days(
    rows: Sequence[StudyRow], x: int, variant: str, rate: float, most: float = math.inf
) -> StudyRow | None:
    """The row of the shortest training time of a variant, on at most so many devices."""
    wanted = (x, variant, rate)
    some = [
        row
        for row in rows
        if (row["x"], row["variant"], row["network_gb_per_second"]) == wanted
        and row["devices"] <= most
    ]
    return min(some, key=lambda row: row["days"], default=None)


def speedup(rows: Sequence[StudyRow], x: int, rate: float) -> float | None:
    """The shortest time of neither over that of both."""
    slow, fast = best_days(rows, x, NEITHER, rate), best_days(rows, x, BOTH, rate)
    return slow["days"] / fast["days"] if slow and fast else None


def most_gain(rows: Sequence[StudyRow], x: int, rate: float) -> tuple[float, int] | None:
    """The largest ratio of the times of neither and of both on at most as many devices, and that
    number."""
    counts = {row["devices"] for row in rows if row["x"] == x and row["variant"] == BOTH}
    found = []
    for most in counts:
        slow, fast = (best_days(rows, x, variant, rate, most) for variant in (NEITHER, BOTH))
        if slow and fast:
            found.append((slow["days"] / fast["days"], most))
    return max(found, default=None)


def _own_rate(rows: Sequence[StudyRow]) -> float:
    return rows[0]["network_gb_per_second"]


def _comparisons(rows: Sequence[StudyRow]) -> list[Comparison]:
    rate, largest = _own_rate(rows), max(row["x"] for row in rows)
    ratio = speedup(rows, largest, rate)
    one_device = 8 * 12 * 160**5 * 2417 * 2560 * STEPS / 312e12 / 86_400 / 365.25
    return [
        Comparison(
            "shortest training time with neither over that with both",
            '2 ("half"), a trillion parameters and more',
            "published",
            "no plan" if ratio is None else f"{ratio:.2f}, X_{largest}",
            "the paper's constraint on cost, its layouts and its model of overlap are not known; "
            "ours prices all collectives, and has ticks in lockstep",
        ),
        Comparison(
            "years to train X_160 on one A100 at its peak",
            "about 630",
            "uncertain",
            f"{one_device:.0f}",
            "by the facts' formula, 8 FLOPs a parameter and token, no layout",
        ),
        Comparison(
            "a fast network is not required",
            "InfiniBand is not necessary",
            "published",
            _network_text(rows, largest),
            "the paper's thresholds are ratios of FLOPs to bytes; ours are predicted step times",
        ),
    ]


def ratios(rows: Sequence[StudyRow], x: int) -> dict[float, float]:
    """GB/s of the network -> `speedup`."""
    rates = sorted({row["network_gb_per_second"] for row in rows if row["x"] == x})
    found = {rate: speedup(rows, x, rate) for rate in rates}
    return {rate: ratio for rate, ratio in found.items() if ratio is not None}


def _network_text(rows: Sequence[StudyRow], x: int) -> str:
    found = [
        f"{best['days']:.1f} days at {rate:g} GB/s"
        for rate in ratios(rows, x)
        if (best := best_days(rows, x, BOTH, rate))
    ]
    return f"X_{x} with both: " + ", ".join(found)


def _findings(rows: Sequence[StudyRow]) -> list[str]:
    rate, found = _own_rate(rows), []
    for x in dict.fromkeys(row["x"] for row in rows):
        parts = [
            f"{variant} {best['days']:.2f} days on {best['devices']:,} devices"
            for variant in VARIANTS
            if (best := best_days(rows, x, variant, rate))
        ]
        found.append(f"X_{x} ({12 * x**5 / 1e9:,.0f}B): {', '.join(parts)}.")
        if best := best_days(rows, x, BOTH, rate):
            found.append(f"The layout of X_{x} with both: {best['layout']}.")
        if gain := most_gain(rows, x, rate):
            found.append(
                f"On equal numbers of devices neither takes at most {gain[0]:.2f} times as long as "
                f"both, X_{x} on {gain[1]:,}."
            )
    largest = max(row["x"] for row in rows)
    by_rate = ratios(rows, largest)
    if len(by_rate) > 1:
        listed = ", ".join(f"{ratio:.2f} at {rate:g} GB/s" for rate, ratio in by_rate.items())
        found.append(f"Neither over both, X_{largest}, by network: {listed}.")
        half = [rate for rate, ratio in by_rate.items() if ratio >= 2]
        found.append(
            f"The time is at least halved up to {max(half):g} GB/s a device."
            if half
            else "The time is halved at none of these networks."
        )
    return found


def _figures(rows: Sequence[StudyRow]) -> dict[str, Any]:
    rate, largest = _own_rate(rows), max(row["x"] for row in rows)
    own = [row for row in rows if row["x"] == largest and row["network_gb_per_second"] == rate]
    many = max(row["devices"] for row in own) / 8
    own = [row for row in own if row["devices"] >= many]
    by_rate = ratios(rows, largest)
    figure, panels = make_figure(2 if len(by_rate) > 1 else 1)
    draw_lines(
        panels[0],
        lines_of(own, "variant", "devices", "days"),
        log_y=True,
        xlabel="devices",
        title=f"X_{largest}: days to train, fastest layouts",
    )
    ticks = [2**n for n in range(5, 18) if many <= 2**n <= 8 * many]
    panels[0].set_xticks(ticks, [f"{n:,}" for n in ticks])
    if len(by_rate) > 1:
        draw_lines(
            panels[1],
            {"neither over both": list(by_rate.items())},
            {"paper: half": [(rate, 2.0)]},
            xlabel="GB/s of a device's network",
            title=f"X_{largest}: ratio of the shortest times",
        )
    return {"Training time by devices, and ratio by network": figure}


SHORTEST = Study(
    name="shortest",
    question="What is the shortest training time at the critical batch, and how much of it do "
    "layered accumulation and modular pipelines save?",
    papers="arXiv 2106.02679; breadth-first pipelines: arXiv 2211.05953",
    method="The planner's prediction of 100,000 steps at the critical batch of "
    "configs/x_family.py, about 82 x^(2/3) sequences. Layouts have tensor ranks inside a node, "
    "ZeRO stage 1 or 3 and full remat, and in pipelines one sequence in a micro-batch; a row is a "
    "layout that is faster than all with at most as many devices. Variants: neither has sequential "
    "accumulation or a contiguous 1F1B pipeline, layered has layered accumulation or GPipe, "
    "modular an interleaved pipeline of one-layer chunks, both layered accumulation or a "
    "breadth-first pipeline of one-layer chunks. For networks other than the device's every second "
    "number of pipeline ranks is tried.",
    hardware="A100-80",
    columns={
        "x": "of the family X_x: 12 x^5 parameters",
        "variant": "as in the method",
        "network_gb_per_second": "GB/s of a device's network, nominal",
        "batch_sequences": "of a step",
        "devices": "all of them",
        "days": "of 100,000 steps without failures",
        "bubble_s": "seconds of the pipeline's bubble and sends in a step",
        **PLAN_COLUMNS,
    },
    cases=_cases,
    rows=_rows,
    comparisons=_comparisons,
    findings=_findings,
    figures=_figures,
)
