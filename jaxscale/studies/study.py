"""`Study`, the record of a study: what it asks, how it is computed, and what was published."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Case = Mapping[str, Any]
"""A part of a study that is computed at once, as JSON values: an interrupted study resumes after
its last finished case. A study that trains has a case for each run."""

StudyRow = dict[str, Any]
"""A row of a study's table: column -> a string, a number, a bool, or None where it has no value."""

EVIDENCE = {
    "published": "read in the primary source",
    "derived": "computed from published formulas",
    "uncertain": "quoted second-hand or recalled; not confirmed, and never asserted",
}
"""How well a figure of a paper is known."""


@dataclass(frozen=True)
class Comparison:
    """A published figure, and ours."""

    what: str
    published: str
    evidence: str  # of `EVIDENCE`
    ours: str
    differs: str  # what is not comparable


@dataclass(frozen=True)
class Study:
    """A study of a paper. All functions are pure, but `rows` of a study that trains."""

    name: str
    question: str  # one sentence
    papers: str
    method: str  # what is varied and what is fixed, in one paragraph
    hardware: str  # a device of hardware.csv; "" where the study runs on the local devices
    columns: Mapping[str, str]  # column -> its meaning; sizes carry units in their names
    cases: Callable[[bool, str], Sequence[Case]]  # (quick, hardware) -> cases, cheapest first
    # Of one case. A study that trains keeps its run in the folder, which is not made for others.
    rows: Callable[[Case, pathlib.Path], list[StudyRow]]
    comparisons: Callable[[Sequence[StudyRow]], list[Comparison]]
    findings: Callable[[Sequence[StudyRow]], list[str]]  # a sentence each, of our rows
    figures: Callable[[Sequence[StudyRow]], Mapping[str, Any]]  # title -> matplotlib's Figure
