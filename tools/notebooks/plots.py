"""Figures of layouts for notebooks: sharding, traffic, losses, step time, memory.

A notebook shows them after `%matplotlib inline`; without it a cell prints only the figure's size.
Colours are the colour-blind-safe palette of Okabe and Ito.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from matplotlib.axes import Axes as Panel
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from jaxscale.compiled import hlo
from jaxscale.compiled.collectives import KINDS, Collective, collectives
from jaxscale.formatting import human_bytes
from jaxscale.planner.memory.terms import GROUPS
from jaxscale.planner.search.plan import Plan
from jaxscale.sharding.resolve import leaf_name, resolve
from jaxscale.sharding.rules import Axes, Rules
from jaxscale.studies.figures import COLORS
from jaxscale.training.engine import Engine

HELD = {"weights": "blue", "gradients": "green", "optimizer state": "orange", "batch": "purple"}
SENT = dict(zip(KINDS, ("blue", "green", "orange", "purple", "yellow", "sky"), strict=True))
"""Label of a panel or bar -> colour."""

EMPTY, EDGE = "#f1f1f3", "#9a9aa2"
Spans = tuple[tuple[int, int], ...]
Dims = tuple[int | None, ...]
"""The dimensions shown as layers, as experts, across and down; None is no dimension."""


def placement_figure(
    engines: Mapping[str, Engine], parameter: Sequence[str] = ("layers", "mlp", "up")
) -> Figure:
    """Sharding of a parameter, its gradient, its moments and the batch: a row per layout.

    A square is the whole array, its coloured part the shard of one device. Layers of a stack and
    experts of a layer are bands, with the first other dimension across and the second down. A
    dimension that is never sharded, such as head_dim, is not shown if there are enough others.

    Args:
      engines: title -> engine.
      parameter: a path in the tree of parameters.

    Raises:
      ValueError: a model has no such parameter.
    """
    _check_some("engines", engines)
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
        for panel, (what, (arrays, dims)) in zip(row, _arrays(engine, parameter).items()):
            if not arrays:  # an optimizer without moments, such as plain SGD
                panel.set_axis_off()
                continue
            _tiles(panel, arrays[0], dims, COLORS[HELD[what]])
            whole = sum(math.prod(one.shape) * one.dtype.itemsize for one in arrays)
            size = sum(
                math.prod(one.sharding.shard_shape(one.shape)) * one.dtype.itemsize
                for one in arrays
            )
            share = round(whole / size)
            panel.set_xlabel(
                f"{human_bytes(size)} each" + (f", 1/{share}" if share > 1 else ", whole"),
                fontsize=8,
                labelpad=2,
            )
    for panel, what in zip(grid[0], HELD):
        panel.set_title(what, fontsize=11, color=COLORS[HELD[what]], weight="bold")
    return figure


def _arrays(engine: Engine, parameter: Sequence[str]) -> dict[str, tuple[list[Any], Dims]]:
    """Label -> arrays with shardings, and the dimensions of the first, which is shown.

    An optimizer may have none or several arrays per parameter, of any shape; the largest is first.
    """
    state, axes, zero = engine.abstract_state, engine.state_axes, engine.zero
    known = {name: (leaf, names) for name, leaf, names in _leaves(state.params, axes.params)}
    wanted = "/".join(parameter)
    if wanted not in known:
        raise ValueError(
            f"parameter = {parameter!r} is not one of the model's parameters: {', '.join(known)}; "
            f"pass the parts of a path, as {tuple(next(iter(known)).split('/'))}"
        )
    weights, names = known[wanted]
    rules = zero.accumulator_rules(single_visit=engine.layout.single_visit)
    summed = NamedSharding(engine.mesh, resolve(names, rules, zero.sizes))
    grads = jax.ShapeDtypeStruct(weights.shape, zero.accumulation_dtype, sharding=summed)
    moments = [
        (leaf, names)
        for name, leaf, names in _leaves(state.opt_state, axes.opt_state)
        if name.endswith(f"/{wanted}")
    ]
    moments.sort(key=lambda moment: -math.prod(moment[0].shape))
    shown = _dims(moments[0][1] if moments else (), zero.rules)
    shape = engine.config.data.global_batch_size, engine.config.data.seq_len
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=engine.batch_sharding)
    dims = _dims(names, zero.rules)
    return {
        "weights": ([weights], dims),
        "gradients": ([grads], dims),
        "optimizer state": ([leaf for leaf, _ in moments], shown),
        "batch": ([batch], (None, None, 1, 0)),
    }


def _leaves(tree: Any, axes: Any) -> list[tuple[str, Any, Axes]]:
    """Name, array and logical axes of each leaf; the axes of a scalar are an empty tuple."""
    found = []
    jax.tree_util.tree_map_with_path(
        lambda path, leaf, names: found.append((leaf_name(path), leaf, names)), tree, axes
    )
    return found


def _dims(names: Axes, rules: Rules) -> Dims:
    """Layers and experts are bands; of the other dimensions two are shown, sharded ones first."""
    bands = [names.index(name) if name in names else None for name in ("layers", "experts")]
    others = [dim for dim in range(len(names)) if dim not in bands]
    shown = sorted(sorted(others, key=lambda dim: not rules[names[dim]])[:2])
    across, down, *_ = *shown, None, None
    return (*bands, across, down)


def _tiles(panel: Panel, array: Any, dims: Dims, color: str) -> None:
    """A square per device, in two rows."""
    places = array.sharding.devices_indices_map(array.shape)
    devices = list(places)
    columns = -(-len(devices) // 2) if len(devices) > 1 else 1
    layers = 1 if dims[0] is None else array.shape[dims[0]]
    for n, device in enumerate(devices):
        left, top = 1.12 * (n % columns), 1.2 * (n // columns)
        if len(devices) == 1:
            left, top = 1.68, 0.6
        panel.add_patch(Rectangle((left, top), 1, 1, facecolor=EMPTY, linewidth=0))
        spans = tuple(part.indices(size)[:2] for part, size in zip(places[device], array.shape))
        boxes = _boxes(spans, array.shape, dims)
        for x, y, width, height in boxes:
            part = Rectangle((left + x, top + y), width, height, facecolor=color, linewidth=0)
            part.set_snap(len(boxes) < 32)  # more boxes are smaller than a pixel
            panel.add_patch(part)
        panel.add_patch(
            Rectangle((left, top), 1, 1, facecolor="none", edgecolor=EDGE, linewidth=0.8)
        )
        for band in range(1, layers):
            # Full-width lines between many layers would cover them.
            width = min(0.8, 8 / layers)
            panel.plot([left, left + 1], [top + band / layers] * 2, color="white", linewidth=width)
    panel.set(xlim=(-0.05, 1.12 * max(columns, 4) - 0.07), ylim=(2.25, -0.05))
    panel.set_aspect("equal")
    panel.set_xticks([])
    panel.set_yticks([])
    panel.spines[:].set_visible(False)


def _boxes(
    spans: Spans, shape: tuple[int, ...], dims: Dims
) -> list[tuple[float, float, float, float]]:
    """x, y, width and height of a shard's parts, in a square of side 1."""
    (l0, l1, layers), (e0, e1, experts), (x0, x1, across), (y0, y1, down) = (
        (0, 1, 1) if dim is None else (*spans[dim], shape[dim]) for dim in dims
    )
    x, width = x0 / across, (x1 - x0) / across
    # Whole experts are one box.
    whole = y1 - y0 == down
    parts = [(e0, e1 - e0)] if whole else [(e + y0 / down, (y1 - y0) / down) for e in range(e0, e1)]
    return [
        (x, (layer + y / experts) / layers, width, height / experts / layers)
        for layer in range(l0, l1)
        for y, height in parts
    ]


def traffic_figure(engines: Mapping[str, Engine], steps: Mapping[str, Any]) -> Figure:
    """Bytes of collectives per device and step, by type: a bar per layout.

    Counted in the compiled program, with loops multiplied by their trip counts.

    Args:
      engines: title -> engine.
      steps: title -> compiled step.
    """
    _check_some("engines", engines)
    programs = {title: _collectives(engine, steps[title]) for title, engine in engines.items()}
    figure = Figure(figsize=(9.5, 1.2 + 0.42 * len(programs)), layout="constrained", dpi=110)
    panel = figure.add_subplot()
    titles = list(programs)[::-1]
    rows = range(len(titles))
    totals = [0.0] * len(titles)
    for kind, color in SENT.items():
        sizes = [
            sum(one.count * one.num_bytes for one in programs[title] if one.kind == kind) / 1e6
            for title in titles
        ]
        if any(sizes):
            panel.barh(rows, sizes, left=totals, color=COLORS[color], label=kind, height=0.7)
            totals = [total + size for total, size in zip(totals, sizes)]
    for row, total in zip(rows, totals):
        panel.text(
            total, row, f"  {total:.3g} MB" if total else "  nothing", va="center", fontsize=9
        )
    panel.set_yticks(rows, titles)
    panel.set(xlim=(0, 1.14 * (max(totals) or 1)), ylim=(-0.5, len(rows) - 0.5))
    panel.set_xlabel("MB per step, of whole arrays: gathered, or before the scatter")
    panel.set_title("Communication of a step")
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    if count := len(panel.get_legend_handles_labels()[0]):
        figure.legend(loc="outside lower center", ncols=count, frameon=False, fontsize=9)
    return figure


def _check_some(name: str, given: Mapping) -> None:
    if not given:
        raise ValueError(f"{name} is empty; pass at least one entry, title -> value")


def _collectives(engine: Engine, compiled: Any) -> list[Collective]:
    program = hlo.parse_hlo(compiled.as_text(), engine.stages.trips if engine.stages else {})
    return collectives(program, engine.layout.sizes)


def loss_figure(curves: Mapping[str, Sequence[float]]) -> Figure:
    """Losses of several layouts: the curves, and their largest difference from the first.

    Args:
      curves: title -> the loss of every step, in nats per token.
    """
    _check_some("curves", curves)
    figure = Figure(figsize=(11.5, 3.8), layout="constrained", dpi=110)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    colors = list(COLORS.values())
    (first, base), *others = curves.items()
    for n, (title, curve) in enumerate(curves.items()):
        wide = 1 + 2 * (len(curves) - n)  # so that curves underneath are visible
        left.plot(
            range(1, len(curve) + 1),
            curve,
            color=colors[n % len(colors)],
            linewidth=wide,
            label=title,
            solid_capstyle="round",
        )
    left.set(xlabel="step", ylabel="loss, nats per token", title="The same loss in every layout")
    left.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    patches = [Patch(color=line.get_color(), label=line.get_label()) for line in left.get_lines()]
    left.legend(handles=patches, frameon=False, fontsize=8, handlelength=0.8, handleheight=0.8)
    titles = [title for title, _ in others][::-1]
    far = [max(abs(a - b) / abs(a) for a, b in zip(base, curves[title])) for title in titles]
    floor = 1e-9
    right.barh(titles, [max(x, floor) for x in far], color=COLORS["blue"], height=0.6)
    for row, x in enumerate(far):
        words = f"{x:.1e}" if x else "bitwise equal"
        right.text(1.2 * max(2.5e-7, x), row, words, va="center", fontsize=9)
    right.axvline(2.0**-23, color=COLORS["vermilion"], linewidth=1.2)
    right.text(2.6e-7, len(far) - 0.58, "float32 resolution", color=COLORS["vermilion"], fontsize=8)
    right.set_ylim(-0.5, len(far) - 0.3)
    right.set_xscale("log")
    right.set_xlim(floor, 40 * max([2.5e-7, *filter(math.isfinite, far)]))
    right.set_visible(bool(others))
    right.set(xlabel=f"largest relative difference from {first}", title="Difference by rounding")
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    right.tick_params(axis="y", length=0)
    return figure


SECONDS = {
    "matmuls and attention": ("blue", ("matmul", "attention")),
    "elementwise, casts": ("sky", ("elementwise", "weights")),
    "recompute": ("yellow", ("recompute",)),
    "tensor, context, expert": ("orange", ("tensor", "context", "expert")),
    "fsdp and data": ("vermilion", ("fsdp", "data")),
    "pipeline bubble, sends": ("purple", ("bubble",)),
    "update, stragglers, rest": ("gray", ("optimizer", "offload", "stragglers", "end")),
}
"""Group of terms of a step -> colour, terms."""

BYTES = {
    "weights": "blue",
    "gradients": "green",
    "optimizer state": "orange",
    "saved activations": "sky",
    "gathered weights": "purple",
    "temporaries": "gray",
}
"""Group of terms of a device's memory -> colour."""


def step_time_figure(plans: Mapping[str, Plan]) -> Figure:
    """Step time by group of terms: a bar per plan."""
    _check_some("plans", plans)
    bars = {title: one.terms for title, one in plans.items()}
    figure = _stacked(bars, SECONDS, 1.0, "s")
    figure.axes[0].set(xlabel="seconds per step", title="Step time")
    return figure


def memory_figure(plans: Mapping[str, Plan]) -> Figure:
    """Peak memory of a device by group of terms: a bar per plan, with the device's limit."""
    _check_some("plans", plans)
    bars = {title: one.memory.at_peak for title, one in plans.items()}
    names = {label: tuple(n for n, group in GROUPS.items() if group == label) for label in BYTES}
    groups = {label: (color, names[label]) for label, color in BYTES.items()}
    figure = _stacked(bars, groups, 1e-9, "GB")
    panel = figure.axes[0]
    limits = [plan.limit_bytes / 1e9 for plan in plans.values()]
    panel.set_xlabel("GB per device")
    panel.set_title("Peak memory", pad=14)  # above the label of the limit
    for row, limit in enumerate(limits):
        panel.vlines(limit, row - 0.6, row + 0.4, color=COLORS["vermilion"], linewidth=1.5)
    panel.text(limits[0], -0.62, " limit", color=COLORS["vermilion"], fontsize=9, va="center")
    panel.set_xlim(0, max(panel.get_xlim()[1], 1.08 * max(limits)))
    return figure


def _stacked(
    bars: Mapping[str, Mapping[str, float]],
    groups: Mapping[str, tuple[str, tuple[str, ...]]],
    unit: float,
    word: str,
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
            f"{total:{'.3g' if total < 100 else ',.0f'}} {word}",
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
