"""GPT models of 22B, 175B and 1T parameters on Frontier (arXiv 2312.12705)."""

import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from etils import epy

from jaxscale import config as configs
from jaxscale.config import Config
from jaxscale.config.layout import Layout
from jaxscale.planner.search.plan import Plan
from jaxscale.studies.figures import COLORS, draw_lines, lines_of, make_figure
from jaxscale.studies.plans import PLAN_COLUMNS, plan_of, plan_row
from jaxscale.studies.study import Case, Comparison, Study, StudyRow

with epy.lazy_imports():  # optional packages
    from jaxscale.autotune import search

Recipe = tuple[str, int, int, int, int]
"""Model, tensor ranks, pipeline ranks, ZeRO stage, sequences of a replica."""
RECIPES: dict[str, Recipe] = {
    "22b": ("gpt_22b", 1, 8, 0, 320),
    "175b": ("gpt_175b", 4, 16, 1, 640),
    "1t, 8 x 64": ("gpt_1t", 8, 64, 1, 1600),
    "1t, 4 x 128": ("gpt_1t", 4, 128, 1, 512),
}
"""The layouts of the authors' scripts, and for 1T and batches of the paper's text (uncertain)."""
PUBLISHED = {"22b": 38.38, "175b": 36.14, "1t, 8 x 64": 31.96}
"""Recipe -> published % of peak."""
PUBLISHED_STRONG = {"175b": (1024, 89), "1t, 8 x 64": (3072, 87)}
"""Recipe -> GCDs, published % of the throughput of a GCD at the fewest; of the abstract."""
REPLICAS = 2
"""Of the throughput's layouts."""

WEAK = {"175b": (2, 4, 8, 16), "1t, 8 x 64": (2, 4, 6)}
"""Recipe -> replicas; the batch grows with them."""
STRONG = {"175b": (8000, (2, 4, 8, 16)), "1t, 8 x 64": (8016, (2, 4, 6))}
"""Recipe -> sequences of a step, replicas."""

SPACE = {
    "tensor": (4, 8),
    "pipeline": (2, 4, 8, 12, 16),
    "microbatch_sequences": (1, 2, 4, 8, 12, 16, 20),
    "accumulation": (5, 10),
    "zero_1": (0, 1),
    "nodes": (12, 16),
}
"""The search of the paper over 175B (uncertain), and micro-batches of 1 and 2 as in its scripts."""
NODE = 8


def counted_flops(config: Config, recompute: bool) -> float:
    """FLOPs of a step as the authors' code counts them: attention over all keys, and with full
    recompute a fourth forward pass."""
    model, data = config.model, config.data
    layers, width, seq = model.num_layers, model.d_model, data.seq_len
    passes = 4 if recompute else 3
    inner = 1 + seq / (6 * width) + model.vocab_size / (16 * layers * width)
    return 24 * passes * data.global_batch_size * seq * layers * width**2 * inner


def _cases(quick: bool, hardware: str) -> Sequence[Case]:
    recipes = ("22b", "175b", "1t, 8 x 64") if quick else RECIPES
    found: list[dict[str, Any]] = [
        {"part": "throughput", "recipe": name, "replicas": [REPLICAS]} for name in recipes
    ]
    series = {"weak": WEAK, "strong": {name: counts for name, (_, counts) in STRONG.items()}}
    for part, name in itertools.product(series, ("175b",) if quick else WEAK):
        counts = series[part][name]
        ends = [counts[0], counts[-1]] if quick else list(counts)
        found.append({"part": part, "recipe": name, "replicas": ends})
    found.append({"part": "importance", "recipe": "175b", "quick": quick})
    return [{**one, "hardware": hardware} for one in found]


def _rows(case: Case, _: pathlib.Path) -> list[StudyRow]:
    if case["part"] == "importance":
        return _importance_rows(case)
    return [_recipe_row(case, replicas) for replicas in case["replicas"]]


def _recipe_row(case: Case, replicas: int) -> StudyRow:
    model, tensor, pipeline, zero, sequences = RECIPES[case["recipe"]]
    batch = sequences * replicas
    if case["part"] == "strong":
        batch = STRONG[case["recipe"]][0]
    config = configs.load(model, [f"data.global_batch_size={batch}"])
    # State is sharded over as many replicas as divide the width: over two of six.
    shards = math.gcd(replicas, config.model.d_model) if zero else 1
    layout = Layout(
        data=replicas // shards,
        fsdp=shards,
        tensor=tensor,
        pipeline=pipeline,
        microbatches=batch // replicas,
        zero_stage=zero,
        remat="full",
    )
    planned = plan_of(config, case["hardware"], layout.num_devices, layout)
    return {
        "part": case["part"],
        "recipe": case["recipe"],
        "devices": layout.num_devices,
        "batch_sequences": batch,
        **_figures_of(planned[0], config),
        "setting": None,
        "importance": None,
        **plan_row(planned),
    }


def _figures_of(plan: Plan | None, config: Config) -> StudyRow:
    names = "tflops_device", "percent_of_peak", "percent_without_recompute", "bubble_share"
    if plan is None:
        return dict.fromkeys(names)
    seconds, devices = plan.step_seconds, plan.cluster.num_devices
    peak = plan.cluster.peak_flops()
    with_recompute, without = (
        counted_flops(config, recompute) / seconds / devices for recompute in (True, False)
    )
    return {
        "tflops_device": with_recompute / 1e12,
        "percent_of_peak": 100 * with_recompute / peak,
        "percent_without_recompute": 100 * without / peak,
        "bubble_share": plan.terms.get("bubble", 0.0) / seconds,
    }


def searched_layouts(quick: bool) -> list[dict[str, int]]:
    """The settings of the search whose ranks divide the nodes."""
    space = {**SPACE, **({"microbatch_sequences": (1, 4, 12)} if quick else {})}
    every = (dict(zip(space, values)) for values in itertools.product(*space.values()))
    return [one for one in every if NODE * one["nodes"] % (one["tensor"] * one["pipeline"]) == 0]


def _importance_rows(case: Case) -> list[StudyRow]:
    """Shares of the settings in the variance of the seconds of a sequence, by fANOVA: of the
    layouts that fit, and of all, where one that does not fit counts as ten times the slowest."""
    times: list[float | None] = []
    tried = searched_layouts(case["quick"])
    for one in tried:
        replicas = NODE * one["nodes"] // one["tensor"] // one["pipeline"]
        batch = replicas * one["microbatch_sequences"] * one["accumulation"]
        config = configs.load(RECIPES["175b"][0], [f"data.global_batch_size={batch}"])
        layout = Layout(
            data=1 if one["zero_1"] else replicas,
            fsdp=replicas if one["zero_1"] else 1,
            tensor=one["tensor"],
            pipeline=one["pipeline"],
            microbatches=one["accumulation"],
            zero_stage=one["zero_1"],
            remat="full",
        )
        plan, _ = plan_of(config, case["hardware"], layout.num_devices, layout)
        fits = plan is not None and plan.fits
        times.append(plan.step_seconds * layout.num_devices / batch if plan and fits else None)
    known = [seconds for seconds in times if seconds is not None]
    worst = 10 * max(known, default=math.nan)
    sets = {
        "layouts that fit": [(s, t) for s, t in zip(tried, times) if t is not None],
        "all layouts": [(s, worst if t is None else t) for s, t in zip(tried, times)],
    }
    return [
        _importance_row(f"{len(trials)} {name}", setting, share, len(known), len(tried))
        for name, trials in sets.items()
        for setting, share in search.importances_of(trials).items()
    ]


def _importance_row(which: str, setting: str, share: float, fitting: int, tried: int) -> StudyRow:
    empty = dict.fromkeys(COLUMNS)
    known = {"part": "importance", "recipe": which, "setting": setting, "importance": share}
    return {**empty, **known, "refused": f"{tried - fitting} of {tried} layouts do not fit"}


def _part(rows: Sequence[StudyRow], part: str, recipe: str) -> list[StudyRow]:
    return [
        row
        for row in rows
        if (row["part"], row["recipe"]) == (part, recipe) and row["step_seconds"]
    ]


def efficiency(rows: Sequence[StudyRow], part: str, recipe: str) -> float | None:
    """Throughput of a device at the most devices over that at the fewest."""
    some = _part(rows, part, recipe)
    if len(some) < 2:
        return None
    few, many = (one["tokens_per_second"] / one["devices"] for one in (some[0], some[-1]))
    return many / few


def _comparisons(rows: Sequence[StudyRow]) -> list[Comparison]:
    differs = (
        "that the paper's figures include recompute is inferred from its code; it has fp16, "
        "Megatron-DeepSpeed and its own kernels, and a tick of ours waits for the slowest rank"
    )
    unclear = "; whether the final layout was 8 x 64 or 4 x 128 is not known"
    found = [
        Comparison(
            f"{name}: % of the peak of a GCD, 191.5 TFLOP/s",
            f"{percent} %",
            "published",
            f"{one['percent_of_peak']:.2f} % ({one['tflops_device']:.1f} TFLOP/s)",
            differs + unclear * name.startswith("1t"),
        )
        for name, percent in PUBLISHED.items()
        for one in _part(rows, "throughput", name)
    ]
    strong = [f"{percent} %" for _, percent in PUBLISHED_STRONG.values()]
    for part, published in (("weak", ("100 %", "100 %")), ("strong", strong)):
        for name, percent in zip(WEAK, published, strict=True):
            ours = efficiency(rows, part, name)
            if ours is not None:
                some = _part(rows, part, name)
                found.append(
                    Comparison(
                        f"{name}: efficiency of {part} scaling to {some[-1]['devices']:,} GCDs",
                        percent,
                        "published",
                        f"{100 * ours:.1f} %, from {some[0]['devices']:,}",
                        "batches and the first number of GCDs are uncertain",
                    )
                )
    order, fitting = _order(rows, "all layouts"), _order(rows, "layouts that fit")
    if order:
        found.append(
            Comparison(
                "175B: importance of settings, largest first",
                "micro-batch size, tensor, pipeline, nodes, ZeRO-1",
                "uncertain",
                f"{order}; of layouts that fit: {fitting}",
                "the paper has SHAP values of measured trials; ours is fANOVA of predictions, "
                "where a layout that does not fit counts as ten times the slowest",
            )
        )
    return found


def _order(rows: Sequence[StudyRow], which: str) -> str:
    shares = _shares(rows, which)
    return ", ".join(f"{row['setting']} {100 * row['importance']:.0f} %" for row in shares)


def _shares(rows: Sequence[StudyRow], which: str) -> list[StudyRow]:
    """The rows of importance in "layouts that fit" or in "all layouts", largest first."""
    return [row for row in rows if row["part"] == "importance" and row["recipe"].endswith(which)]


def _findings(rows: Sequence[StudyRow]) -> list[str]:
    found = [
        f"{name}: {one['percent_of_peak']:.1f} % of peak with recompute, "
        f"{one['percent_without_recompute']:.1f} % without; "
        f"{100 * one['bubble_share']:.0f} % of the step is bubble and waiting; "
        f"{one['memory_gb']:.0f} GB a GCD."
        for name in RECIPES
        for one in _part(rows, "throughput", name)
    ]
    failed = [row["refused"] for row in rows if row["part"] == "importance"]
    return [*found, *(f"Of the search for 175B {one}." for one in failed[:1])]


def _figures(rows: Sequence[StudyRow]) -> dict[str, Any]:
    figure, (left, middle, right) = make_figure(3)
    names = [name for name in RECIPES if _part(rows, "throughput", name)]
    ours = [_part(rows, "throughput", name)[0]["percent_of_peak"] for name in names]
    at = range(len(names))
    left.bar([x - 0.2 for x in at], ours, 0.38, color=COLORS["blue"], label="ours, predicted")
    paper = [PUBLISHED.get(name, 0.0) for name in names]
    left.bar([x + 0.2 for x in at], paper, 0.38, color=COLORS["orange"], label="published")
    left.set_xticks(at, names, fontsize=8)
    left.set(title="% of peak, recompute included", ylim=(0, 50))
    left.legend(frameon=False, fontsize=7)
    scaled = []
    for part, name in itertools.product(("weak", "strong"), WEAK):
        some = _part(rows, part, name)
        scaled += [
            {
                "label": f"{part}, {name}",
                "devices": row["devices"],
                "efficiency": 100
                * (row["tokens_per_second"] / row["devices"])
                / (some[0]["tokens_per_second"] / some[0]["devices"]),
            }
            for row in some
        ]
    draw_lines(
        middle,
        lines_of(scaled, "label", "devices", "efficiency"),
        {f"paper, strong, {name}": [point] for name, point in PUBLISHED_STRONG.items()},
        xlabel="GCDs",
        title="Efficiency, % of the fewest GCDs",
        ylim=(80, 105),
    )
    for number, which in enumerate(("layouts that fit", "all layouts")):
        shares = {row["setting"]: row["importance"] for row in _shares(rows, which)}
        heights = [shares.get(name, 0.0) for name in SPACE]
        places = [y + 0.4 * number for y in range(len(SPACE))]
        right.barh(places, heights, 0.38, color=list(COLORS.values())[number], label=which)
    right.set_yticks([y + 0.2 for y in range(len(SPACE))], [n.replace("_", " ") for n in SPACE])
    right.set(title="175B: importance (fANOVA)")
    right.legend(frameon=False, fontsize=7)
    return {"Throughput, efficiency and importance": figure}


COLUMNS = {
    "part": "throughput, weak or strong scaling, or importance",
    "recipe": "the model with its tensor and pipeline ranks; of importance the layouts",
    "devices": "GCDs, half of an MI250X each",
    "batch_sequences": "of 2,048 tokens, of a step",
    "tflops_device": "by the authors' formula, recompute included",
    "percent_of_peak": "the same as a share of the device's peak",
    "percent_without_recompute": "by the same formula without recompute",
    "bubble_share": "share of the step that is the pipeline's bubble and sends",
    "setting": "of the search",
    "importance": "its share of the variance of log seconds of a sequence (fANOVA)",
    **PLAN_COLUMNS,
}

TRILLION = Study(
    name="trillion",
    question="What share of its peak does Frontier reach on models up to a trillion parameters, "
    "how does it scale, and which choices matter?",
    papers="arXiv 2312.12705",
    method="The planner's prediction of the authors' layouts: plain 1F1B, one sequence in a "
    "micro-batch, full recompute, ZeRO-1 over two replicas (22B: two replicas without ZeRO; six "
    "replicas are three times two). "
    "Weak scaling adds replicas of 640 (175B) and 1,600 (1T) sequences, strong scaling has 8,000 "
    "and 8,016 sequences. Importance is fANOVA over all layouts of the paper's search for 175B.",
    hardware="MI250X-GCD",
    columns=COLUMNS,
    cases=_cases,
    rows=_rows,
    comparisons=_comparisons,
    findings=_findings,
    figures=_figures,
)
