"""A study's results: text, CSV, JSON, PNG, and one HTML page with all of them."""

import base64
import csv
import html
import io
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxscale.formatting import table
from jaxscale.planner.report.html_report import html_document
from jaxscale.storage import durable
from jaxscale.studies.study import EVIDENCE, Comparison, Study, StudyRow

WRAPPED = """
td, th { text-align: left !important; white-space: normal !important; vertical-align: top; }
td.number { text-align: right !important; white-space: nowrap !important; }
img { max-width: 100%; } .rows { overflow-x: auto; font-size: 12px; }
"""


def write_results(
    study: Study, rows: Sequence[StudyRow], output: pathlib.Path, command: str
) -> list[pathlib.Path]:
    """Writes `NAME.csv`, `NAME.json`, a PNG for each figure, and `NAME.html`.

    Args:
      command: that computes the rows again.

    Returns:
      The files, the page last.
    """
    pictures = {}
    for number, (title, figure) in enumerate(study.figures(rows).items(), 1):
        png = io.BytesIO()
        figure.savefig(png, format="png")
        pictures[title] = (f"{study.name}_{number}.png", png.getvalue())
    files = {
        f"{study.name}.csv": rows_csv(study, rows).encode(),
        f"{study.name}.json": (
            json.dumps(results_json(study, rows, command), indent=1, allow_nan=False) + "\n"
        ).encode(),
        **dict(pictures.values()),
        f"{study.name}.html": study_page(
            study, rows, {title: data for title, (_, data) in pictures.items()}, command
        ).encode(),
    }
    for name, data in files.items():
        durable.replace_file(output / name, data)
    return [output / name for name in files]


def rows_csv(study: Study, rows: Iterable[StudyRow]) -> str:
    """The table with a line of columns; a missing value is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(study.columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def results_json(study: Study, rows: Sequence[StudyRow], command: str) -> dict[str, Any]:
    """The study as plain values, for programs."""
    return {
        "study": study.name,
        "question": study.question,
        "papers": study.papers,
        "method": study.method,
        "command": command,
        "comparisons": [vars(one) for one in study.comparisons(rows)],
        "findings": study.findings(rows),
        "columns": dict(study.columns),
        "rows": list(rows),
    }


def results_text(study: Study, rows: Sequence[StudyRow]) -> str:
    """The comparisons and the findings, for a terminal."""
    parts = []
    for one in study.comparisons(rows):
        known = "" if one.evidence == "published" else f" ({one.evidence})"
        pairs = [(f"published{known}", one.published), ("ours", one.ours)]
        pairs += [("differs", one.differs)] if one.differs else []
        parts.append(f"{one.what}\n{table(pairs)}")
    return "\n".join([*parts, *(f"- {one}" for one in study.findings(rows))])


def study_page(
    study: Study, rows: Sequence[StudyRow], pictures: Mapping[str, bytes], command: str
) -> str:
    """A self-contained HTML page.

    Args:
      pictures: title -> PNG.
    """
    sections = [
        f"<h1>{html.escape(study.name)}</h1>",
        f"<p><b>{html.escape(study.question)}</b></p>",
        f"<p>{html.escape(study.papers)}. {html.escape(study.method)}</p>",
        f"<pre>{html.escape(command)}</pre>",
        "<h2>Published, and ours</h2>",
        _comparisons(study.comparisons(rows)),
        "<h2>Findings</h2>",
        "<ul>",
        *(f"<li>{html.escape(one)}</li>" for one in study.findings(rows)),
        "</ul>",
    ]
    for title, data in pictures.items():
        encoded = base64.b64encode(data).decode()
        text = html.escape(title)
        sections += [
            f"<h2>{text}</h2>",
            f'<img alt="{text}" src="data:image/png;base64,{encoded}">',
        ]
    sections += ["<h2>Rows</h2>", _rows(study, rows), "<h2>Columns</h2>", _meanings(study)]
    return html_document(study.name, sections, WRAPPED)


def _comparisons(comparisons: Iterable[Comparison]) -> str:
    head = _cells("th", ("figure", "published", "evidence", "ours", "not comparable"))
    body = "".join(_cells("td", vars(one).values()) for one in _ordered(comparisons))
    notes = "; ".join(f"{name}: {meaning}" for name, meaning in EVIDENCE.items())
    return f'<table>{head}{body}</table><p class="note">{html.escape(notes)}.</p>'


def _ordered(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """The best known figures first."""
    return sorted(comparisons, key=lambda one: list(EVIDENCE).index(one.evidence))


def _rows(study: Study, rows: Iterable[StudyRow]) -> str:
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="number">{shown(value)}</td>'
            if isinstance(value, int | float)
            else f"<td>{html.escape(shown(value))}</td>"
            for value in row.values()
        )
        + "</tr>"
        for row in rows
    )
    head = _cells("th", (name.replace("_", " ") for name in study.columns))
    return f'<div class="rows"><table>{head}{body}</table></div>'


def _meanings(study: Study) -> str:
    rows = "".join(_cells("td", pair) for pair in study.columns.items())
    return f"<table>{rows}</table>"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(one)}</{tag}>" for one in texts) + "</tr>"


def shown(value: Any) -> str:
    """A value of a table as text, numbers with four digits.

    >>> [shown(one) for one in (None, True, 3, 12345.678, 0.0123456, "fsdp 8")]
    ['', 'yes', '3', '12,346', '0.01235', 'fsdp 8']
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
