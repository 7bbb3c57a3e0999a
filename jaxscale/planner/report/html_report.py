"""Plans as one self-contained HTML page: tables and SVG figures."""

import html
from collections.abc import Iterable, Mapping

import numpy as np

from jaxscale.formatting import gigabytes
from jaxscale.pipeline.draw import COLORS, WORDS
from jaxscale.pipeline.simulator import Costs, simulate
from jaxscale.planner.cost.uneven_pipeline import UnevenPipelineCost
from jaxscale.planner.memory.terms import TEXTS
from jaxscale.planner.report.text_report import (
    TERMS,
    batch_text,
    known,
    layout_text,
    params_text,
)
from jaxscale.planner.search.plan import Plan, RankedPlans
from jaxscale.planner.tables.table_makespan import TableSpec, pipeline_table

SHOWN = 5
"""Number of plans with figures."""

SHOWN_MICROBATCHES = 3
"""Micro-batches per rank in a timeline: the schedule repeats after that."""

PALETTE = (
    "#3f78d1",
    "#e9a13b",
    "#43a663",
    "#c8553d",
    "#8f7cc4",
    "#1f8e9e",
    "#b5739d",
    "#7a7a52",
    "#5b8fb9",
    "#d98880",
    "#73b27f",
    "#a98d5d",
    "#6a6fb0",
    "#4aa3a2",
    "#c27ba0",
    "#999999",
)
WIDTH, ROW = 1000, 22  # pixels
NAMES = 250  # pixels of the names next to bars

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: 3px 9px; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:nth-child(2), td:nth-child(2) { text-align: left; white-space: normal; }
h2 { margin-top: 2em; } svg { display: block; margin: 6px 0 18px; max-width: 100%; }
svg text { font-size: 12px; fill: #333; } .note { color: #666; }
"""


def plan_page(answer: RankedPlans) -> str:
    """HTML page of the plans."""
    query = answer.query
    title = f"{query.cluster.num_devices} {query.cluster.name}"
    sections = [
        f"<h1>Layouts on {html.escape(title)}</h1>",
        f"<p>{params_text(query.planned_model)}, {batch_text(query.planned_model)} per step. "
        f"{answer.found.considered:,} layouts were considered. {answer.note}</p>",
        _table(answer.plans),
        _rejected(answer.found.rejected),
    ]
    for number, plan in enumerate(answer.plans[:SHOWN], 1):
        sections += [
            f"<h2>{number}. {html.escape(layout_text(plan.layout))}</h2>",
            f"<h3>Step time: {plan.step_seconds:.3f} s</h3>",
            _waterfall(plan),
            f"<h3>Memory per device: {gigabytes(plan.memory_bytes)} "
            f"of {gigabytes(plan.limit_bytes)}</h3>",
            _stack(plan),
            *([_timeline(plan)] if plan.layout.pipeline > 1 else []),
        ]
    return html_document(title, sections)


def html_document(title: str, sections: Iterable[str], style: str = "") -> str:
    """A self-contained page.

    Args:
      sections: HTML.
      style: CSS that follows `STYLE`.
    """
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>'
        f"{html.escape(title)}</title><style>{STYLE}{style}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _table(plans: Iterable[Plan]) -> str:
    head = "".join(
        f"<th>{name}</th>"
        for name in ("", "layout", "step", "tokens/s", "MFU", "HFU", "memory", "W per device")
    )
    rows = "".join(
        f"<tr><td>{number}</td><td>{html.escape(layout_text(plan.layout))}</td>"
        f"<td>{plan.step_seconds:.3f} s</td><td>{plan.tokens_per_second:,.0f}</td>"
        f"<td>{100 * plan.mfu:.1f} %</td><td>{100 * plan.hfu:.1f} %</td>"
        f"<td>{gigabytes(plan.memory_bytes)}</td><td>{known(plan.watts)}</td></tr>"
        for number, plan in enumerate(plans, 1)
    )
    return f'<table id="plans"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _rejected(rejected: Mapping[str, int]) -> str:
    rows = "".join(
        f"<tr><td>{count:,}</td><td>{html.escape(reason)}</td></tr>"
        for reason, count in rejected.items()
    )
    return f'<p class="note">Rejected layouts:</p><table>{rows}</table>'


def _waterfall(plan: Plan) -> str:
    """Each term begins where the one before it ends."""
    scale, x, marks = (WIDTH - NAMES - 90) / plan.step_seconds, float(NAMES), []
    for n, (name, seconds) in enumerate(plan.terms.items()):
        marks.append(_bar(n, TERMS[name], x, seconds * scale, f"{seconds:.4f} s", _color(n)))
        x += seconds * scale
    count = len(marks)
    for n, (name, seconds) in enumerate(plan.hidden.items(), count):
        words = f"overlapped with compute: {name}"
        marks.append(_bar(n, words, NAMES, seconds * scale, f"{seconds:.4f} s", "#dddddd"))
    return _svg("waterfall", marks, len(marks) * ROW)


def _color(n: int) -> str:
    """The n-th colour, in a cycle: experts in a pipeline over ranks of context and tensor have more
    terms than there are colours."""
    return PALETTE[n % len(PALETTE)]


def _bar(row: int, name: str, x: float, width: float, value: str, color: str) -> str:
    y = row * ROW
    end = min(x + width + 6, WIDTH - 70)
    return (
        f'<text x="{NAMES - 8}" y="{y + 15}" text-anchor="end">{html.escape(name)}</text>'
        f'<rect x="{x:.1f}" y="{y + 3}" width="{max(width, 0.5):.1f}" height="{ROW - 6}" '
        f'fill="{color}"/><text x="{end:.1f}" y="{y + 15}">{value}</text>'
    )


def _stack(plan: Plan) -> str:
    """The terms live at the peak as one bar, with the limit and a legend."""
    parts = sorted(plan.memory.at_peak.items(), key=lambda item: -item[1])
    scale, x, marks = WIDTH / max(plan.limit_bytes, plan.memory_bytes), 0.0, []
    for n, (_, size) in enumerate(parts):
        width = size * scale
        marks.append(
            f'<rect x="{x:.1f}" y="4" width="{width:.1f}" height="30" fill="{_color(n)}"/>'
        )
        x += width
    limit = plan.limit_bytes * scale
    marks.append(f'<line x1="{limit - 1:.1f}" x2="{limit - 1:.1f}" y1="0" y2="38" stroke="#c00"/>')
    for n, (name, size) in enumerate(parts):
        left, y = (n % 2) * WIDTH // 2, 44 + n // 2 * 18
        marks.append(
            f'<rect x="{left}" y="{y}" width="11" height="11" fill="{_color(n)}"/>'
            f'<text x="{left + 17}" y="{y + 10}">{TEXTS[name]}, {gigabytes(size)}'
            "</text>"
        )
    return _svg("stack", marks, 50 + (len(parts) + 1) // 2 * 18)


def _timeline(plan: Plan) -> str:
    """The first micro-batches of the schedule in lockstep ticks, with predicted durations."""
    layout = plan.layout
    spec = TableSpec.of(layout)
    ranks, chunks = spec.ranks, spec.virtual_stages
    count = min(layout.microbatches, SHOWN_MICROBATCHES * ranks)
    priced = UnevenPipelineCost.of(plan.planned_model.work, plan.cluster, plan.parallelism)
    costs = priced.costs([0], plan.layers)
    # In the unit of the costs, of which a chunk takes a part.
    head = spec.virtual_stages * float((priced.sliced_head + priced.head_sums)[0])
    table = pipeline_table(spec._replace(microbatches=count))
    run = simulate(
        table, Costs(*(tuple(np.ravel(cost).tolist()) for cost in costs)), shared_head=head
    )
    scale, height = (WIDTH - 60) / run.lockstep_makespan, min(ROW, 480 // ranks)
    marks = [
        f'<text x="0" y="{rank * height + height * 0.7:.1f}">rank {rank}</text>'
        for rank in range(0, ranks, max(1, 16 // height))
    ]
    for n in np.flatnonzero(run.duration > 0):
        x, width = 60 + run.lockstep_start[n] * scale, run.duration[n] * scale
        kind, row = int(table.ops.kind[n]), int(table.ops.rank[n])
        shade = 1 - 0.45 * (table.ops.stage[n] // ranks) / max(1, chunks - 1)
        marks.append(
            f'<rect x="{x:.2f}" y="{row * height}" width="{max(width - 0.3, 0.2):.2f}" '
            f'height="{height - 1}" fill="{COLORS[kind]}" opacity="{shade:.2f}"/>'
        )
    y, x = ranks * height + 8, 60
    for kind in sorted({int(kind) for kind in table.ops.kind}):
        marks.append(
            f'<rect x="{x}" y="{y}" width="11" height="11" fill="{COLORS[kind]}"/>'
            f'<text x="{x + 16}" y="{y + 10}">{WORDS[kind]}</text>'
        )
        x += 130
    words = (
        f"{count} of {layout.microbatches} micro-batches, " if count < layout.microbatches else ""
    )
    head = f"<h3>Timeline: {html.escape(layout.schedule)}, {words}ranks in lockstep</h3>"
    return head + _svg("timeline", marks, y + 16)


def _svg(kind: str, marks: Iterable[str], height: float) -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img">{"".join(marks)}</svg>'
    )
