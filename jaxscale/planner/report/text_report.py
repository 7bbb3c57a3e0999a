"""Plans as text: the ranking, a step's time and a device's memory by term, and comparisons."""

import math

from jaxscale.config.layout import Layout
from jaxscale.formatting import gigabytes, table
from jaxscale.planner.cost.energy import BUILDING
from jaxscale.planner.memory.terms import TEXTS
from jaxscale.planner.search.plan import Plan, RankedPlans
from jaxscale.planner.search.sized_model import SizedModel
from jaxscale.planner.search.trainable_model import TrainableModel

MOST_STAGES = 16
"""Pipeline ranks whose memory is listed."""

BAR = 40
"""Characters of the longest bar."""

TERMS = {
    "matmul": "matmuls of layers and head",
    "attention": "attention",
    "elementwise": "norms, activations, residual additions",
    "weights": "casts of weights, sums of gradients",
    "recompute": "recompute for the backward pass",
    "tensor": "tensor parallelism, exposed",
    "context": "context parallelism, exposed",
    "expert": "expert all-to-alls, exposed",
    "fsdp": "ZeRO all-gather and reduce-scatter, exposed",
    "data": "gathers and reductions once a step, exposed",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer update",
    "offload": "host offload, exposed",
    "stragglers": "stragglers",
    "end": "fixed cost per step",
}


def layout_text(layout: Layout) -> str:
    """A layout in one line: the settings that differ from a single device's defaults."""
    parts = [layout.axes_text or "one device"]
    if layout.zero_ranks > 1:
        parts.append(f"zero {layout.zero_stage}")
    if layout.microbatches > 1:
        order = " layered" if layout.accumulation == "layered" else ""
        parts.append(f"{layout.microbatches} micro-batches{order}")
    if layout.pipeline > 1:
        chunks = f" of {layout.virtual_stages} chunks" if layout.virtual_stages > 1 else ""
        parts.append(layout.schedule + chunks)
        lengths = f" of {layout.segment_lengths}" if layout.segment_lengths else ""
        parts += [f"{layout.sequence_chunks} segments{lengths}"] * (layout.sequence_chunks > 1)
    by_layer = layout.pipeline > 1 and layout.pipeline_gather == "layer"
    parts += ["gathered by layer"] * by_layer
    parts += ["sliced head"] * layout.slices_head
    if layout.context > 1:
        parts.append(layout.context_method)
    if layout.expert_nodes > 1:
        parts.append(f"tokens to {layout.expert_nodes} nodes once")
    parts += ["experts overlapped"] * layout.overlap_experts
    parts += ["tensor overlapped"] * layout.overlap_tensor
    parts += ["layers unrolled"] * layout.unroll_layers
    parts += [f"remat {layout.remat}"] * (layout.remat != "none")
    parts += [f"offload {layout.offload}"] * (layout.offload != "none")
    parts += [f"offload {gigabytes(layout.offload_bytes)} of state"] * (layout.offload_bytes > 0)
    return ", ".join(parts)


def waterfall_text(plan: Plan) -> str:
    """A waterfall of the terms that add up to a step."""
    rows, total, begin = [], plan.step_seconds, 0.0
    for name, value in plan.terms.items():
        low, high = round(BAR * begin / total), round(BAR * (begin + value) / total)
        rows.append(
            (
                TERMS[name],
                f"{value:.4f} s",
                f"{100 * value / total:5.1f} %",
                " " * low + "#" * (high - low),
            )
        )
        begin += value
    rows.append(("step", f"{total:.4f} s", "100.0 %", "=" * BAR))
    rows += [
        (f"overlapped with compute: {name}", f"{value:.4f} s", "", "")
        for name, value in plan.hidden.items()
    ]
    return table(rows)


def memory_text(plan: Plan) -> str:
    """Memory of a device at its peak by term, largest first."""
    parts = sorted(plan.memory.at_peak.items(), key=lambda item: -item[1])
    most = max(size for _, size in parts)
    rows = [(TEXTS[name], gigabytes(size), "#" * round(BAR * size / most)) for name, size in parts]
    rows.append(("peak", gigabytes(plan.memory_bytes), f"of {gigabytes(plan.limit_bytes)}"))
    on_host = ("host_optimizer", "host_stash", "host_weights")
    sizes = ((name, getattr(plan.memory, name)) for name in on_host)
    rows += [(TEXTS[name], gigabytes(size), "") for name, size in sizes if size]
    return "\n".join([table(rows), *_stages(plan)])


def _stages(plan: Plan) -> list[str]:
    """Memory that each pipeline rank uses; every few ranks where there are many."""
    used = plan.stage_bytes
    if len(used) == 1:
        return []
    step = -(-len(used) // MOST_STAGES)
    shown = ", ".join(f"{size / 1e9:.1f}" for size in used[::step])
    which = "each rank" if step == 1 else f"ranks 0, {step}, {2 * step}, ..."
    return [f"  used by {which} of the pipeline, in GB: {shown}"]


def comparison(a: Plan, b: Plan) -> str:
    """Two plans term by term, the largest difference first."""
    names = sorted(
        a.terms | b.terms,
        key=lambda name: -abs(b.terms.get(name, 0) - a.terms.get(name, 0)),
    )
    rows = [("", "A", "B", "B - A")]
    for name in names:
        first, second = a.terms.get(name, 0.0), b.terms.get(name, 0.0)
        rows.append((TERMS[name], *_pair(first, second)))
    change = b.step_seconds - a.step_seconds
    rows.append(("step", *_pair(a.step_seconds, b.step_seconds)))
    sizes = a.memory.at_peak, b.memory.at_peak
    for name in sorted(
        sizes[0] | sizes[1], key=lambda name: -abs(sizes[1].get(name, 0) - sizes[0].get(name, 0))
    ):
        first, second = (size.get(name, 0) for size in sizes)
        rows.append((TEXTS[name], gigabytes(first), gigabytes(second), gigabytes(second - first)))
    rows.append(
        (
            "peak",
            gigabytes(a.memory_bytes),
            gigabytes(b.memory_bytes),
            gigabytes(b.memory_bytes - a.memory_bytes),
        )
    )
    faster = "A" if change > 0 else "B"
    share = abs(change) / max(a.step_seconds, b.step_seconds)
    head = f"A: {layout_text(a.layout)}\nB: {layout_text(b.layout)}\n"
    return f"{head}{faster} is faster, by {100 * share:.1f} %\n{table(rows)}"


def _pair(first: float, second: float) -> tuple[str, str, str]:
    return f"{first:.4f} s", f"{second:.4f} s", f"{second - first:+.4f} s"


def params_text(model: TrainableModel | SizedModel) -> str:
    """ "46.7 B parameters, 12.9 B active per token"."""
    active = f", {_count(model.num_active_params)} active per token"
    return f"{_count(model.num_params)} parameters{active if model.work.num_experts else ''}"


def _count(params: float) -> str:
    return f"{params / 1e9:.1f} B" if params >= 5e7 else f"{params / 1e6:.2f} M"


def batch_text(model: TrainableModel | SizedModel) -> str:
    """ "512 sequences of 8192 tokens"."""
    work = model.work
    source = f" and {work.source_len} encoder tokens" if work.source_len else ""
    return f"{model.sequences} sequences of {work.seq_len} tokens{source}"


def known(value: float) -> str:
    """ "1,234", "5.6", "0.078", or "-" for nan, where `hardware.csv` has no figure."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _rounded(value: float) -> str:
    """Rounded to a tenth, or a small value to two digits: "51.5", "0.078"."""
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def _uneven_batch(sequences: int, devices: int) -> list[str]:
    """A line for a batch that does not split evenly over all devices."""
    if sequences % devices == 0:
        return []
    near = max(1, round(sequences / devices)) * devices
    return [
        f"{sequences} sequences do not split over {devices} devices, which rules out layouts of "
        f"data, fsdp and expert ranks alone; the nearest number that splits is {near}"
    ]


def ranking_text(answer: RankedPlans) -> str:
    """The plans as a table, and why the other layouts were rejected."""
    query, model = answer.query, answer.query.planned_model
    tokens = model.run_tokens
    rows = [("", "layout", "step", "tokens/s", "MFU", "HFU", "memory", "days", "MWh", "USD")]
    for number, one in enumerate(answer.plans, 1):
        run_cost = one.run_cost(tokens)
        rows.append(
            (
                str(number),
                layout_text(one.layout),
                f"{one.step_seconds:.3f} s",
                f"{one.tokens_per_second:,.0f}",
                f"{100 * one.mfu:.1f} %",
                f"{100 * one.hfu:.1f} %",
                gigabytes(one.memory_bytes),
                _rounded(run_cost.seconds / 86400),
                known(run_cost.joules / 3.6e9),
                known(run_cost.usd),
            )
        )
    good = answer.plans[0].run_cost(tokens).goodput
    seen = "causal attention" if model.causal else "attention to all tokens"
    billions = f"{tokens / 1e9:,.0f}" if tokens >= 1e12 else f"{tokens / 1e9:.4g}"
    lines = [
        f"{params_text(model)} on {query.cluster.num_devices} {query.cluster.name}, "
        f"{batch_text(model)} per step",
        *_uneven_batch(model.sequences, query.cluster.num_devices),
        table(rows),
        f"MFU counts {_rounded(model.flops_per_token / 1e9)} GFLOP per token: "
        f"3 x forward, {seen} counted once, no recompute; HFU adds recompute. "
        f"Peak {query.cluster.peak_flops() / 1e12:.0f} TFLOP/s.",
        "All ranks of a pipeline have the same buffers. Days, energy and cost are for "
        f"{billions} B tokens at {100 * good.fraction:.1f} % goodput (a failure "
        f"every {good.between_failures_seconds / 3600:.0f} h, a checkpoint every "
        f"{good.checkpoint_every_seconds / 60:.0f} min), with a PUE of {BUILDING}.",
        *([answer.note] if answer.note else []),
        f"{answer.found.considered:,} layouts considered",
    ]
    lines += [f"  {count:12,}  {reason}" for reason, count in answer.found.rejected.items()]
    return "\n".join(lines)
