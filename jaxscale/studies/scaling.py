"""Weak and strong scaling by sharding, up to 16,384 devices (arXiv 2411.13055)."""

import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxscale import config as configs
from jaxscale.planner.search.plan import Plan
from jaxscale.studies.figures import draw_lines, draw_stack, lines_of, make_figure
from jaxscale.studies.plans import PLAN_COLUMNS, Planned, fastest_plan, known_watts, plan_row
from jaxscale.studies.study import Case, Comparison, Study, StudyRow

DEVICES = tuple(2**n for n in range(5, 15))
QUICK_DEVICES = (128, 2048)
WEAK_TOKENS = 8192
"""Tokens of a device in weak scaling: two sequences of 4,096."""
STRONG_TOKENS = 4 * 2**20
"""Tokens of a step in strong scaling."""

COMMON = {"expert": 1, "context": 1, "tensor_rows": 1, "offload": "none"}
PIPELINE = {"schedule": "1f1b", "pipeline_gather": "chunk", "head": "last"}
REMATS = ("none", "full")
DEGREES = (2, 4, 8, 16)
SHARDINGS: dict[str, list[dict[str, Any]]] = {
    "fsdp": [{"data": 1, "tensor": 1, "pipeline": 1, "zero_stage": 3}],
    "replicated fsdp": [{"tensor": 1, "pipeline": 1, "zero_stage": 3}],
    "tensor": [{"pipeline": 1, "tensor": degree} for degree in DEGREES],
    "pipeline": [{"tensor": 1, "pipeline": degree} for degree in DEGREES],
    "hybrid": [{}],
}
"""Sharding -> fixed fields of the layouts, the fastest of which is taken."""

EXPOSED: tuple[str, ...] = ("fsdp", "data", "tensor", "bubble")
"""Terms of a step that are exposed communication or wait for it."""

WITHOUT_LATENCY = "fsdp without latency"
"""The first sharding with links of the same rates and no latency."""


def _cases(quick: bool, hardware: str) -> Sequence[Case]:
    counts = QUICK_DEVICES if quick else DEVICES
    models = ["llama2_7b"] if quick else ["llama2_7b", "llama2_70b"]
    found = []
    for model, mode in itertools.product(models, ("weak", "strong")):
        names = list(SHARDINGS)
        if mode == "weak" and model == models[0]:
            names.append(WITHOUT_LATENCY)
        for name in names:
            one = {"model": model, "mode": mode, "sharding": name, "hardware": hardware}
            found.append({**one, "devices": list(counts)})
    return found


def _rows(case: Case, _: pathlib.Path) -> list[StudyRow]:
    found = []
    for devices in case["devices"]:
        planned = _planned(case, devices)
        row = {name: case[name] for name in ("mode", "model", "sharding")}
        found.append(row | {"devices": devices} | _figures_of(planned[0]) | plan_row(planned))
    return found


def _planned(case: Case, devices: int) -> Planned:
    config, overrides = configs.load(case["model"]), {}
    tokens = WEAK_TOKENS * devices if case["mode"] == "weak" else STRONG_TOKENS
    sequences = tokens // config.data.seq_len
    config = configs.load(case["model"], [f"data.global_batch_size={sequences}"])
    name = case["sharding"]
    if name == WITHOUT_LATENCY:
        name, overrides = "fsdp", {"node_latency_seconds": 0.0, "network_latency_seconds": 0.0}
    found = [
        fastest_plan(
            config,
            case["hardware"],
            devices,
            {**COMMON, **PIPELINE, **pins, "remat": remat},
            **overrides,
        )
        for pins, remat in itertools.product(SHARDINGS[name], REMATS)
    ]
    return min(found, key=lambda one: one[0].step_seconds if one[0] else math.inf)


def _figures_of(plan: Plan | None) -> StudyRow:
    names = "tokens_per_second_device", "watts_device", "tokens_per_joule"
    if plan is None:
        return dict.fromkeys([*names, "model_parallel", *(f"{one}_s" for one in EXPOSED)])
    rate, watts = plan.tokens_per_second / plan.cluster.num_devices, known_watts(plan)
    values = rate, watts, rate / watts if watts else None
    return {
        **dict(zip(names, values, strict=True)),
        "model_parallel": plan.layout.tensor * plan.layout.pipeline,
        **{f"{name}_s": plan.terms.get(name, 0.0) for name in EXPOSED},
    }


def _at(rows: Sequence[StudyRow], sharding: str, devices: int) -> StudyRow | None:
    """The row of weak scaling of the first model."""
    return next(
        (
            row
            for row in rows
            if (row["mode"], row["sharding"], row["devices"]) == ("weak", sharding, devices)
            and row["model"] == rows[0]["model"]
            and row["step_seconds"]
        ),
        None,
    )


def change(rows: Sequence[StudyRow], column: str, sharding: str = "fsdp") -> float | None:
    """The ratio of a column at 2,048 devices to that at 128, in weak scaling of the first model."""
    few, many = (_at(rows, sharding, n) for n in (128, 2048))
    if not few or not many or few[column] is None or many[column] is None:
        return None
    return many[column] / few[column]


def _percent(ratio: float | None) -> str:
    return "no plan" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def _comparisons(rows: Sequence[StudyRow]) -> list[Comparison]:
    unknown = (
        "model, batch and network of the paper's figure are not known, and its parameters are not "
        "gathered again in the backward pass"
    )
    where = "fully sharded, 128 to 2,048 devices, the same batch a device"
    rate, watts, joules = (
        change(rows, name)
        for name in ("tokens_per_second_device", "watts_device", "tokens_per_joule")
    )
    step = change(rows, "step_seconds")
    return [
        Comparison(
            f"throughput of a device, {where}",
            "-37.22 %",
            "uncertain",
            _percent(rate),
            unknown,
        ),
        Comparison(
            f"seconds of a step, {where}",
            "1.593 times",
            "derived",
            "no plan" if step is None else f"{step:.3f} times",
            "computed from the figure above",
        ),
        Comparison(
            f"power of a device, {where}",
            "-5.87 %",
            "uncertain",
            _percent(watts),
            "not independent: the planner's power at rest and in exposed communication was chosen "
            "with this figure in view",
        ),
        Comparison(
            f"tokens per joule, {where}",
            "-33.3 %",
            "derived",
            _percent(joules),
            "computed from the figures above; power of the devices alone, without their hosts",
        ),
    ]


def first_gain(rows: Sequence[StudyRow], mode: str, model: str) -> dict[str, int | None]:
    """The fewest devices from which tensor or pipeline ranks give more tokens a second, than full
    sharding and than replicated shards; None where they never do."""
    rates: dict[int, dict[str, float]] = {}
    for row in rows:
        if (row["mode"], row["model"]) == (mode, model) and row["step_seconds"]:
            rates.setdefault(row["devices"], {})[row["sharding"]] = row["tokens_per_second"]

    def first(other: str) -> int | None:
        gains = {
            count: max(one.get("tensor", 0), one.get("pipeline", 0)) > one.get(other, 0)
            for count, one in rates.items()
            if one.keys() & {"tensor", "pipeline", other}
        }
        # From there on, at every larger count.
        lasting = [n for n in gains if all(gains[more] for more in gains if more >= n)]
        return min(lasting, default=None)

    return {other: first(other) for other in ("fsdp", "replicated fsdp")}


def _findings(rows: Sequence[StudyRow]) -> list[str]:
    found = []
    pairs = dict.fromkeys((row["mode"], row["model"]) for row in rows)
    for mode, model in pairs:
        for other, count in first_gain(rows, mode, model).items():
            pays = f"pays from {count:,} devices" if count else "never pays"
            found.append(f"{mode} scaling of {model}: model parallelism {pays}, against {other}.")
    flat = change(rows, "step_seconds", WITHOUT_LATENCY)
    step = change(rows, "step_seconds")
    if flat and step:
        ends = ": latency, not bandwidth, ends weak scaling" if step > 1.1 > flat else ""
        found.append(
            f"Without latency of the links a fully sharded step at 2,048 devices takes {flat:.3f} "
            f"times as long as at 128, with it {step:.3f} times{ends}."
        )
    counts = [row["devices"] for row in rows]
    few, many = (_at(rows, "replicated fsdp", end(counts)) for end in (min, max))
    if few and many:
        ratio = many["tokens_per_second_device"] / few["tokens_per_second_device"]
        found.append(
            f"With replicated shards a device has {_percent(ratio)} tokens a second at "
            f"{many['devices']:,} devices ({many['layout']}), against {few['devices']}."
        )
    return found


def _figures(rows: Sequence[StudyRow]) -> dict[str, Any]:
    first = rows[0]["model"]
    weak, strong = (
        [row for row in rows if row["mode"] == mode and row["model"] == first]
        for mode in ("weak", "strong")
    )
    figure, panels = make_figure(3)
    draw_lines(
        panels[0],
        lines_of(weak, "sharding", "devices", "tokens_per_second_device"),
        xlabel="devices",
        title=f"{first}, weak: tokens/s of a device",
    )
    draw_lines(
        panels[1],
        lines_of(strong, "sharding", "devices", "tokens_per_second"),
        log_y=True,
        xlabel="devices",
        title="strong: tokens/s of all devices",
    )
    joules = lines_of(weak, "sharding", "devices", "tokens_per_joule")
    if joules:
        draw_lines(panels[2], joules, xlabel="devices", title="weak: tokens per joule")
    bars, (left, right) = make_figure(2)
    for panel, some, name in ((left, weak, "fsdp"), (right, strong, "hybrid")):
        parts = {
            f"{row['devices']:,}": {
                one: 100 * row[f"{one}_s"] / row["step_seconds"] for one in EXPOSED
            }
            for row in some
            if row["sharding"] == name and row["step_seconds"]
        }
        title = f"{some[0]['mode']}, {name}: exposed, % of a step" if some else name
        colors = dict(zip(EXPOSED, ("vermilion", "sky", "orange", "purple"), strict=True))
        if parts:
            draw_stack(panel, parts, colors, xlabel="devices", title=title)
    return {"Throughput and energy": figure, "Exposed communication": bars}


SCALING = Study(
    name="scaling",
    question="How far does a model scale by each kind of sharding, and where does model "
    "parallelism begin to pay?",
    papers="arXiv 2411.13055",
    method="The planner's prediction, with the power of the device's row in hardware.csv. Weak "
    "scaling has two sequences of 4,096 tokens a device, strong scaling 4M tokens a step. For each "
    "sharding and number of devices the fastest layout that fits: fsdp is ZeRO-3 over all devices, "
    "replicated fsdp any ZeRO-3 groups, tensor and pipeline (1F1B) have 2 to 16 such ranks and any "
    "ZeRO stage, hybrid is any of these mixed. Micro-batches are free; remat is none or full.",
    hardware="H100-SXM",
    columns={
        "mode": "weak: a batch per device; strong: a batch for all",
        "model": "a shipped config",
        "sharding": "as in the method",
        "devices": "all of them",
        "tokens_per_second_device": "of one device",
        "watts_device": "mean power of a device",
        "tokens_per_joule": "of the devices' power alone",
        "model_parallel": "ranks of tensor times ranks of pipeline",
        "fsdp_s": "exposed seconds of gathers and reductions of ZeRO",
        "data_s": "exposed seconds of gathers and reductions once a step",
        "tensor_s": "exposed seconds of tensor collectives",
        "bubble_s": "seconds of the pipeline's bubble and sends",
        **PLAN_COLUMNS,
    },
    cases=_cases,
    rows=_rows,
    comparisons=_comparisons,
    findings=_findings,
    figures=_figures,
)
