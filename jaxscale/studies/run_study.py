"""Runs a study case by case: finished cases are on disk, and an interrupted study resumes."""

import importlib.metadata
import json
import pathlib
from collections.abc import Callable, Sequence

from jaxscale.planner.cost.cluster import find_device
from jaxscale.storage import durable
from jaxscale.studies.study import Case, Study, StudyRow

CASES_FILE = "cases.jsonl"
"""Finished cases: a line about the study, then one with each case and its rows."""


def run_study(
    study: Study,
    output: pathlib.Path,
    *,
    quick: bool = False,
    hardware: str = "",
    report: Callable[[int, int, Case], None] = lambda done, count, case: None,
) -> list[StudyRow]:
    """The rows of all cases, in their order; cases that are finished in the folder are read.

    Args:
      output: a folder, which is made.
      quick: the short form of the study.
      hardware: a device of `hardware.csv` instead of the study's.
      report: called after each computed case, with the number of finished ones and of all.

    Raises:
      ValueError: the folder has cases of another study, form or version, or damaged ones; the
        hardware is not known, or the study does not read it.
    """
    if hardware and not study.hardware:
        raise ValueError(
            f"--hardware {hardware}: the study {study.name} runs on the local devices; leave it out"
        )
    if hardware:
        find_device(hardware)  # refuses an unknown one before anything is computed
    subject = {"study": study.name, "quick": quick, "hardware": hardware or study.hardware}
    subject["version"] = importlib.metadata.version("jaxscale")
    cases = study.cases(quick, subject["hardware"])
    output.mkdir(parents=True, exist_ok=True)
    path = output / CASES_FILE
    finished = read_cases(path, subject)
    for number, case in enumerate(cases, 1):
        if _key(case) in finished:
            continue
        folder = output / f"case_{number}"
        finished[_key(case)] = study.rows(case, folder)
        lines = [subject, *({"case": json.loads(key), "rows": finished[key]} for key in finished)]
        durable.replace_file(path, "".join(json.dumps(one) + "\n" for one in lines).encode())
        report(number, len(cases), case)
    return [row for case in cases for row in finished[_key(case)]]


def read_cases(path: pathlib.Path, subject: Case) -> dict[str, list[StudyRow]]:
    """Case, as text -> its rows; {} where there is no file.

    Args:
      subject: the study and its form, as the file's first line has them.

    Raises:
      ValueError: the file is of another study, form or version, or damaged.
    """
    if not path.exists():
        return {}
    try:
        had, *lines = map(json.loads, path.read_text().splitlines())
        found = {_key(line["case"]): line["rows"] for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, or set --output") from error
    if had != subject:
        raise ValueError(
            f"{path} has cases of {_words(had)}, and these are of {_words(subject)}; "
            "set another folder in --output"
        )
    return found


def _words(subject: Case) -> str:
    return ", ".join(f"{name} {value}" for name, value in subject.items())


def _key(case: Case) -> str:
    return json.dumps(case, sort_keys=True)


def check_columns(study: Study, rows: Sequence[StudyRow]) -> None:
    """Asserts that every row has the study's columns, in their order."""
    for row in rows:
        assert list(row) == list(study.columns), (study.name, list(row))
