"""Figures of layouts for notebooks and talks: placement, traffic, losses, step time, memory.

Colours are the colour-blind-safe palette of Okabe and Ito.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding
from matplotlib.axes import Axes as Panel
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from jaxscale.compiled import hlo
from jaxscale.compiled.collectives import KINDS, Collective, collectives
from jaxscale.formatting import human_bytes
from jaxscale.planner.search.plan import Plan
from jaxscale.sharding.resolve import resolve
from jaxscale.training.engine import Engine

COLORS = {
    "blue": "#0072b2",
    "orange": "#e69f00",
    "green": "#009e73",
    "purple": "#cc79a7",
    "vermilion": "#d55e00",
    "sky": "#56b4e9",
    "yellow": "#f0e442",
    "gray": "#8a8a8a",
}
HELD = {"weights": "blue", "gradients": "green", "optimizer state": "orange", "batch": "purple"}
SENT = dict(zip(KINDS, ("blue", "green", "orange", "purple", "yellow", "sky"), strict=True))
"""Label of a panel or bar -> its colour."""

EMPTY, EDGE = "#f1f1f3", "#9a9aa2"
Spans = tuple[tuple[int, int], ...]


def placement_figure(
    engines: Mapping[str, Engine], parameter: Sequence[str] = ("layers", "mlp", "up")
) -> Figure:
    """A row per layout: the shard of a parameter, its gradient, its moments and the batch on each
    device.

    A square is the whole array, and its coloured part the shard of one device. The layers of a
    stack are bands, in which the first dimension runs across and the second down.

    Args:
      engines: title -> engine.
      parameter: the path of one in the tree of parameters.
    """
    inches = 0.6 + 1.45 * len(engines)
    figure = Figure(figsize=(12, inches), dpi=110)
    figure.subplots_adjust(
        left=0.19,
        right=0.995,
        top=1 - 0.35 / inches,
        bottom=0.25 / inches,
        wspace=0.05,
        hspace=0.25,
    )
    grid = figure.subplots(len(engines), len(HELD), squeeze=False)
    for row, (title, engine) in zip(grid, engines.items()):
        row[0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=10, labelpad=10)
        for panel, (what, (sharding, shape, layered, width)) in zip(
            row, _arrays(engine, parameter).items()
        ):
            _tiles(panel, sharding, shape, layered, COLORS[HELD[what]])
            size = math.prod(sharding.shard_shape(shape)) * width
            whole = math.prod(shape) * width
            share = round(whole / size)
            panel.set_xlabel(
                f"{human_bytes(size)} each" + (f", 1/{share}" if share > 1 else ", whole"),
                fontsize=8,
                labelpad=2,
            )
    for panel, what in zip(grid[0], HELD):
        panel.set_title(what, fontsize=11, color=COLORS[HELD[what]], weight="bold")
    return figure


def _arrays(engine: Engine, parameter: Sequence[str]) -> dict[str, tuple]:
    """Label -> sharding, shape, whether it is a stack of layers, bytes per element."""
    leaf, axes, zero = engine.abstract_state.params, engine.state_axes.params, engine.zero
    for name in parameter:
        leaf, axes = leaf[name], axes[name]
    single = engine.layout.single_visit
    rules = {
        "weights": zero.state_rules,
        "gradients": zero.accumulator_rules(single_visit=single),
        "optimizer state": zero.state_rules,
    }
    widths = {"gradients": zero.accumulation_dtype.itemsize}
    found: dict[str, tuple] = {
        what: (
            NamedSharding(engine.mesh, resolve(axes, these, zero.sizes)),
            leaf.shape,
            axes[0] == "layers",
            widths.get(what, leaf.dtype.itemsize),
        )
        for what, these in rules.items()
    }
    data = engine.config.data
    shape = data.global_batch_size, data.seq_len
    return found | {"batch": (engine.batch_sharding, shape, False, 4)}


def _tiles(
    panel: Panel, sharding: NamedSharding, shape: tuple[int, ...], layered: bool, color: str
) -> None:
    """A square per device, in two rows."""
    places = sharding.devices_indices_map(shape)
    devices = list(places)
    columns = -(-len(devices) // 2) if len(devices) > 1 else 1
    for n, device in enumerate(devices):
        left, top = 1.12 * (n % columns), 1.2 * (n // columns)
        if len(devices) == 1:
            left, top = 1.68, 0.6
        panel.add_patch(Rectangle((left, top), 1, 1, facecolor=EMPTY, linewidth=0))
        spans = tuple(part.indices(size)[:2] for part, size in zip(places[device], shape))
        for x, y, width, height in _boxes(spans, shape, layered):
            panel.add_patch(
                Rectangle((left + x, top + y), width, height, facecolor=color, linewidth=0)
            )
        panel.add_patch(
            Rectangle((left, top), 1, 1, facecolor="none", edgecolor=EDGE, linewidth=0.8)
        )
        for band in range(1, shape[0] if layered else 1):
            panel.plot([left, left + 1], [top + band / shape[0]] * 2, color="white", linewidth=0.8)
    panel.set(xlim=(-0.05, 1.12 * max(columns, 4) - 0.07), ylim=(2.25, -0.05))
    panel.set_aspect("equal")
    panel.set_xticks([])
    panel.set_yticks([])
    panel.spines[:].set_visible(False)


def _boxes(
    spans: Spans, shape: tuple[int, ...], layered: bool
) -> list[tuple[float, float, float, float]]:
    """x, y, width and height of a shard's parts, in a square of side 1."""
    if not layered:
        (y0, y1), (x0, x1) = spans[:2]
        return [(x0 / shape[1], y0 / shape[0], (x1 - x0) / shape[1], (y1 - y0) / shape[0])]
    (x0, x1), (y0, y1) = spans[1:3]
    layers, across, down = shape[:3]
    return [
        (x0 / across, (band + y0 / down) / layers, (x1 - x0) / across, (y1 - y0) / down / layers)
        for band in range(*spans[0])
    ]


def traffic_figure(engines: Mapping[str, Engine], steps: Mapping[str, Any]) -> Figure:
    """Bytes of collectives per device and step, by kind: a bar per layout.

    Counted in the compiled program, with loops multiplied by their trip counts.

    Args:
      engines: title -> engine.
      steps: title -> its step, compiled.
    """
    programs = {title: _collectives(engine, steps[title]) for title, engine in engines.items()}
    figure = Figure(figsize=(9.5, 1.2 + 0.42 * len(programs)), layout="constrained", dpi=110)
    panel = figure.add_subplot()
    titles = list(programs)[::-1]
    totals = [0.0] * len(titles)
    for kind, color in SENT.items():
        sizes = [
            sum(one.count * one.num_bytes for one in programs[title] if one.kind == kind) / 1e6
            for title in titles
        ]
        if any(sizes):
            panel.barh(titles, sizes, left=totals, color=COLORS[color], label=kind, height=0.7)
            totals = [total + size for total, size in zip(totals, sizes)]
    for row, total in enumerate(totals):
        panel.text(
            total, row, f"  {total:.3g} MB" if total else "  nothing", va="center", fontsize=9
        )
    panel.set_xlim(0, 1.14 * max([*totals, 1e-9]))
    panel.set_xlabel("MB per step, of whole arrays: gathered, or before the scatter")
    panel.set_title("Communication of a step")
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    handles, _ = panel.get_legend_handles_labels()
    figure.legend(loc="outside lower center", ncols=max(1, len(handles)), frameon=False, fontsize=9)
    return figure


def _collectives(engine: Engine, compiled: Any) -> list[Collective]:
    program = hlo.parse_hlo(compiled.as_text(), engine.stages.trips if engine.stages else {})
    return collectives(program, engine.layout.sizes)


def loss_figure(curves: Mapping[str, Sequence[float]]) -> Figure:
    """Losses of several layouts: the curves, and their largest difference from the first.

    Args:
      curves: title -> the loss of every step, in nats per token.
    """
    figure = Figure(figsize=(11.5, 3.8), layout="constrained", dpi=110)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    colors = list(COLORS.values())
    (first, base), *others = curves.items()
    steps = range(1, len(base) + 1)
    for n, (title, curve) in enumerate(curves.items()):
        wide = 1 + 2 * (len(curves) - n)  # so that curves below are visible
        left.plot(
            steps,
            curve,
            color=colors[n % len(colors)],
            linewidth=wide,
            label=title,
            solid_capstyle="round",
        )
    left.set(xlabel="step", ylabel="loss, nats per token", title="The same loss in every layout")
    left.set_xticks(steps)
    patches = [Patch(color=line.get_color(), label=line.get_label()) for line in left.get_lines()]
    left.legend(handles=patches, frameon=False, fontsize=8, handlelength=0.8, handleheight=0.8)
    titles = [title for title, _ in others][::-1]
    far = [max(abs(a - b) / abs(a) for a, b in zip(base, curves[title])) for title in titles]
    floor = 1e-9
    right.barh(titles, [max(x, floor) for x in far], color=COLORS["blue"], height=0.6)
    for row, x in enumerate(far):
        right.text(3e-7, row, f"{x:.1e}" if x else "bitwise equal", va="center", fontsize=9)
    right.axvline(2.0**-23, color=COLORS["vermilion"], linewidth=1.2)
    right.text(2.6e-7, len(far) - 0.58, "float32 resolution", color=COLORS["vermilion"], fontsize=8)
    right.set_ylim(-0.5, len(far) - 0.3)
    right.set_xscale("log")
    right.set_xlim(floor, 1e-5)
    right.set(xlabel=f"largest relative difference from {first}", title="Difference by rounding")
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    right.tick_params(axis="y", length=0)
    return figure


SECONDS = {
    "matmuls and attention": ("blue", ("matmul", "attention")),
    "elementwise, casts, launches": ("sky", ("elementwise", "weights", "waiting")),
    "recompute": ("yellow", ("recompute",)),
    "tensor, context, expert": ("orange", ("tensor", "context", "expert")),
    "fsdp and data": ("vermilion", ("fsdp", "data")),
    "pipeline bubble, sends": ("purple", ("bubble", "pipeline")),
    "update, stragglers, rest": ("gray", ("optimizer", "offload", "stragglers", "end")),
}
"""Groups of terms of a step: label -> colour, terms."""

BYTES = {
    "weights": ("blue", ("parameters", "kept_weights", "converted")),
    "gradients": (
        "green",
        (
            "gradients",
            "reduced_gradients",
            "pending",
            "outer_gradients",
            "layer_gradients",
            "carried",
            "walk_end",
        ),
    ),
    "optimizer state": ("orange", ("optimizer", "moments_copy")),
    "saved activations": ("sky", ("stash", "group", "messages")),
    "gathered weights": ("purple", ("layer_weights", "outer_weights")),
    "temporaries": ("gray", ("working_set", "forward_loop", "head", "end", "zeros", "batch")),
}


def step_time_figure(plans: Mapping[str, Plan]) -> Figure:
    """Step time by term: a bar per plan."""
    bars = {title: one.terms for title, one in plans.items()}
    figure = _stacked(bars, SECONDS, 1.0, "{:.2f} s")
    figure.axes[0].set(xlabel="seconds per step", title="Step time")
    return figure


def memory_figure(plans: Mapping[str, Plan]) -> Figure:
    """Peak memory of a device by part: a bar per plan, and the limit."""
    bars = {title: one.memory.at_peak for title, one in plans.items()}
    figure = _stacked(bars, BYTES, 1e-9, "{:.0f} GB")
    panel = figure.axes[0]
    limit = next(iter(plans.values())).limit_bytes / 1e9
    panel.set(xlabel="GB per device", title="Peak memory")
    panel.axvline(limit, color=COLORS["vermilion"], linewidth=1.5)
    panel.text(limit, -0.62, " limit", color=COLORS["vermilion"], fontsize=9, va="center")
    panel.set_xlim(0, max(panel.get_xlim()[1], 1.08 * limit))
    return figure


def _stacked(
    bars: Mapping[str, Mapping[str, float]],
    groups: Mapping[str, tuple[str, tuple[str, ...]]],
    unit: float,
    form: str,
) -> Figure:
    figure = Figure(figsize=(10.5, 1.3 + 0.5 * len(bars)), layout="constrained", dpi=110)
    panel = figure.add_subplot()
    rows = range(len(bars))
    totals = [0.0] * len(bars)
    for label, (color, names) in groups.items():
        sizes = [unit * sum(bar.get(name, 0) for name in names) for bar in bars.values()]
        if max(sizes) > 0.002 * unit * max(sum(bar.values()) for bar in bars.values()):
            panel.barh(rows, sizes, left=totals, color=COLORS[color], label=label, height=0.65)
        totals = [total + size for total, size in zip(totals, sizes)]
    for row, total in zip(rows, totals):
        panel.annotate(
            form.format(total),
            (total, row),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    panel.set_yticks(rows, list(bars))
    panel.set(xlim=(0, 1.12 * max(totals)), ylim=(len(bars) - 0.4, -0.6))
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    figure.legend(
        loc="outside lower center",
        ncols=7,
        frameon=False,
        fontsize=8.5,
        handlelength=1.2,
        columnspacing=1.2,
    )
    return figure


def save_figure(figure: Figure, path: str, **settings: Any) -> None:
    """Writes a figure as PNG."""
    figure.savefig(path, format="png", **settings)
