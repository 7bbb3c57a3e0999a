"""ZeRO stages 0 to 3 on the five sizes of mT5 over numbers of nodes (arXiv 2310.05350)."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale import config as configs
from jaxscale.config import zero_stage
from jaxscale.config.layout import Layout
from jaxscale.planner.search.plan import Plan
from jaxscale.studies.figures import draw_lines, lines_of, make_figure
from jaxscale.studies.plans import PLAN_COLUMNS, plan_of, plan_row
from jaxscale.studies.study import Case, Comparison, Study, StudyRow

NODE = 8
"""Devices of a node."""
SEQUENCES = {"small": 16, "base": 16, "large": 8, "xl": 4, "xxl": 2}
"""Size -> most sequences of a micro-batch, with which stages 2 and 3 fit on 80 GB."""
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
RECALLED = {2: {2: 20.4, 4: 12.0, 8: 31.4}, 3: {2: 25.8, 4: 23.3, 8: 38.9}}
"""Stage -> nodes -> seconds of a step of mT5-XXL, quoted second-hand: uncertain."""


def adam_state_bytes(stage: int, params: float, devices: int) -> float:
    """Bytes of weights, gradients and Adam's state of a device at 16 bytes a parameter, in mixed
    precision (arXiv 1910.02054).

    >>> [round(adam_state_bytes(stage, 12.921e9, 64) / 1e9, 1) for stage in range(4)]
    [206.7, 54.1, 28.7, 3.2]
    """
    whole = {0: 16, 1: 4, 2: 2, 3: 0}[stage]
    return (whole + (16 - whole) / devices) * params


def sent_bytes(layout: Layout, params: float, gradient_bytes: int) -> float:
    """Bytes that a device sends in a step for weights, gradients and state: rings over fsdp, with
    weights in 16 bits; of a layout without pipeline, tensor or experts.

    >>> [sent_bytes(Layout(data=1, fsdp=2, zero_stage=n), 100, 4) for n in range(4)]
    [400.0, 300.0, 300.0, 400.0]
    """
    stage, passes = layout.zero_stage, layout.num_groups
    share = params * (layout.fsdp - 1) / layout.fsdp
    if zero_stage.replicates(stage):
        return 2 * gradient_bytes * share
    gathers = 2 * passes if zero_stage.gathers_each_pass(stage) else 1
    reductions = passes if zero_stage.scatters(stage) else 1
    return (2 * gathers + gradient_bytes * reductions) * share


def _cases(quick: bool, hardware: str) -> Sequence[Case]:
    sizes, nodes = (["xxl"], NODES[:-2]) if quick else (list(SEQUENCES), NODES)
    return [{"size": size, "hardware": hardware, "nodes": list(nodes)} for size in sizes]


def _rows(case: Case, _: pathlib.Path) -> list[StudyRow]:
    config = configs.load(f"mt5_{case['size']}", ["optimizer.name=adamw"])
    sequences, found = config.data.global_batch_size, []
    for nodes, stage in itertools.product(case["nodes"], range(4)):
        devices = NODE * nodes
        each = min(SEQUENCES[case["size"]], sequences // devices)
        layout = Layout(
            data=1,
            fsdp=devices,
            zero_stage=stage,
            microbatches=sequences // devices // each,
            remat="full",
        )
        planned = plan_of(config, case["hardware"], devices, layout)
        row = {"model": f"mt5_{case['size']}", "nodes": nodes, "devices": devices, "stage": stage}
        row |= {"microbatches": layout.microbatches, "microbatch_sequences": each}
        found.append(row | _figures_of(planned[0], layout) | plan_row(planned))
    return found


def _figures_of(plan: Plan | None, layout: Layout) -> StudyRow:
    names = "steps_per_second", "states_16_gb", "states_gb", "sent_gb", "exposed_s", "overlapped_s"
    if plan is None:
        return dict.fromkeys(names)
    params, memory = plan.planned_model.num_params, plan.memory
    held = memory.parameters + memory.optimizer + memory.kept_weights + memory.gradients
    width = plan.parallelism.gradient_bytes
    values = (
        1 / plan.step_seconds,
        adam_state_bytes(layout.zero_stage, params, layout.fsdp) / 1e9,
        held / 1e9,
        sent_bytes(layout, params, width) / 1e9,
        plan.terms.get("fsdp", 0.0) + plan.terms.get("data", 0.0),
        sum(plan.hidden.values()),
    )
    return dict(zip(names, values, strict=True))


def _of(rows: Sequence[StudyRow], **wanted: Any) -> list[StudyRow]:
    """The rows with these values and a plan."""
    return [
        row
        for row in rows
        if row["step_seconds"] is not None and all(row[name] == wanted[name] for name in wanted)
    ]


def _seconds(rows: Sequence[StudyRow], stage: int) -> dict[int, float]:
    """Nodes -> seconds of a step of mT5-XXL."""
    return {row["nodes"]: row["step_seconds"] for row in _of(rows, model="mt5_xxl", stage=stage)}


def later_stage_slower(rows: Sequence[StudyRow]) -> tuple[int, int]:
    """The points, of a model and a number of nodes, at which stage 2 takes at most as long as stage
    3; and all points with both."""
    times = {(row["model"], row["nodes"], row["stage"]): row["step_seconds"] for row in _of(rows)}
    both = [(m, n) for m, n, stage in times if stage == 2 and (m, n, 3) in times]
    return sum(times[*point, 2] <= times[*point, 3] for point in both), len(both)


def falling_rates(rows: Sequence[StudyRow]) -> list[str]:
    """Where twice the nodes take fewer steps a second."""
    found = []
    for model, stage in dict.fromkeys((row["model"], row["stage"]) for row in rows):
        line = _of(rows, model=model, stage=stage)
        for few, many in itertools.pairwise(line):
            if many["steps_per_second"] < few["steps_per_second"]:
                found.append(
                    f"{model}, stage {stage}: {few['steps_per_second']:.2f} steps a second on "
                    f"{few['nodes']} nodes, {many['steps_per_second']:.2f} on {many['nodes']}"
                )
    return found


def _listed(values: Mapping[int, float]) -> str:
    nodes = [n for n in (2, 4, 8) if n in values]
    return ", ".join(f"{values[n]:.1f} s on {n} nodes" for n in nodes)


def _comparisons(rows: Sequence[StudyRow]) -> list[Comparison]:
    unknown = (
        "sequence lengths, batch, micro-batches, optimizer and network of the paper are not known"
    )
    found = [
        Comparison(
            f"mT5-XXL, ZeRO stage {stage}, seconds of a step",
            _listed(RECALLED[stage]),
            "uncertain",
            _listed(_seconds(rows, stage)),
            f"{unknown}; a dip at four nodes is not predicted",
        )
        for stage in RECALLED
    ]
    held, points = later_stage_slower(rows)
    found.append(
        Comparison(
            "stage 2 takes at most as long as stage 3",
            "at every number of nodes, mT5-XXL",
            "uncertain",
            f"at {held} of {points} points",
            unknown,
        )
    )
    falls = falling_rates(rows)
    found.append(
        Comparison(
            "more nodes need not give more steps a second",
            "falls from 4 to 8 nodes",
            "uncertain",
            f"falls at {len(falls)} points" if falls else "no fall at these numbers of nodes",
            f"{unknown}; ours falls where the latency of gathers and reductions over all ranks is "
            "longer than the compute of one micro-batch",
        )
    )
    states = [_of(rows, model="mt5_xxl", nodes=8, stage=stage) for stage in range(4)]
    if all(states):
        found.append(
            Comparison(
                "mT5-XXL on 64 GPUs, states at 16 bytes a parameter, stages 0 to 3",
                "206.7, 54.1, 28.7, 3.2 GB",
                "derived",
                ", ".join(f"{one[0]['states_16_gb']:.1f}" for one in states) + " GB",
                "the column states_gb is our step's, which shards weights at rest from stage 1 and "
                "adds gradients in 32 bits",
            )
        )
    return found


def _findings(rows: Sequence[StudyRow]) -> list[str]:
    found = []
    for stage in (0, 1, 2, 3):
        fits = [row["nodes"] for row in _of(rows, model="mt5_xxl", stage=stage) if row["fits"]]
        where = f"from {min(fits)} nodes" if fits else "on no number of nodes here"
        found.append(f"mT5-XXL in stage {stage} fits {where}.")
    one = _of(rows, model="mt5_xxl", nodes=max(row["nodes"] for row in rows))
    sent = {row["stage"]: row["sent_gb"] for row in one}
    if len(sent) == 4:
        found.append(
            f"With the fewest micro-batches a device of mT5-XXL sends {sent[2]:.0f} GB a step in "
            f"stage 2 and {sent[3]:.0f} GB in stage 3, which gathers weights again in the backward "
            "pass."
        )
    return found + [f"More nodes are slower: {one}." for one in falling_rates(rows)]


def _figures(rows: Sequence[StudyRow]) -> dict[str, Any]:
    figure, (left, middle, right) = make_figure(3)
    xxl = [{**row, "label": f"stage {row['stage']}"} for row in _of(rows, model="mt5_xxl")]
    lines = lines_of(xxl, "label", "nodes", "step_seconds")
    paper = {
        f"paper (uncertain), stage {stage}": list(points.items())
        for stage, points in RECALLED.items()
    }
    title = "mT5-XXL, seconds of a step"
    draw_lines(left, lines, paper, log_y=True, xlabel="nodes of 8", title=title)
    third = _of(rows, stage=3)
    draw_lines(
        middle,
        lines_of(third, "model", "nodes", "steps_per_second"),
        log_y=True,
        xlabel="nodes of 8",
        title="Stage 3, steps a second",
    )
    states = lines_of(xxl, "label", "nodes", "states_16_gb")
    draw_lines(
        right,
        states,
        log_y=True,
        xlabel="nodes of 8",
        title="mT5-XXL, GB of states at 16 bytes a parameter",
    )
    return {"Step time, steps a second and states": figure}


ZERO = Study(
    name="zero",
    question="Which ZeRO stage is fastest for each size of mT5, and do more nodes always help?",
    papers="arXiv 2310.05350; ZeRO: arXiv 1910.02054; mT5: arXiv 2010.11934",
    method="The planner's prediction of a step of 1,024 sequences of 1,024 tokens in and 256 out, "
    "fully sharded over all devices, full remat, AdamW. The batch is fixed, so that more nodes "
    "have fewer micro-batches each, of at most "
    + ", ".join(f"{count} sequences ({size})" for size, count in SEQUENCES.items())
    + ".",
    hardware="A100-80",
    columns={
        "model": "a size of mT5",
        "nodes": "of eight devices",
        "devices": "all of them, over which a stage shards",
        "stage": "of ZeRO",
        "microbatches": "of a step on each device",
        "microbatch_sequences": "of a micro-batch",
        "steps_per_second": "predicted",
        "states_16_gb": "weights, gradients and Adam's state at 16 bytes a parameter",
        "states_gb": "the same of our step, with weights that are kept for the step",
        "sent_gb": "sent by a device for weights and gradients in a step",
        "exposed_s": "seconds of that which are not overlapped",
        "overlapped_s": "seconds of that which are overlapped with compute",
        **PLAN_COLUMNS,
    },
    cases=_cases,
    rows=_rows,
    comparisons=_comparisons,
    findings=_findings,
    figures=_figures,
)
