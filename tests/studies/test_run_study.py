"""Cases are computed once, whatever interrupts a study, and a folder holds one study."""

import dataclasses
import json

import pytest

from jaxscale.studies.run_study import CASES_FILE, check_columns, run_study
from jaxscale.studies.study import Comparison, Study

COLUMNS = {"size": "of a case", "value": "of a row", "name": "with a <sign>"}


def make_study(computed, fail_at=-1):
    """A study of three cases of two rows; one case may fail."""

    def rows(case, folder):
        if case["size"] == fail_at:
            raise KeyboardInterrupt
        computed.append((case["size"], folder.name))
        size = case["size"]
        return [{"size": size, "value": n / 3 or None, "name": "<b>"} for n in range(2)]

    def figures(some):
        from jaxscale.studies.figures import draw_lines, lines_of, make_figure  # noqa: PLC0415

        figure, (panel,) = make_figure(1, height=1)
        draw_lines(panel, lines_of(some, "name", "size", "value"), {"paper": [(1, 1.0)]})
        return {"A < picture": figure}

    return Study(
        name="small",
        question="Is 1 < 2?",
        papers="none",
        method="Counted.",
        hardware="H100-SXM",
        columns=COLUMNS,
        cases=lambda quick, hardware: [{"size": n, "on": hardware} for n in range(1, 4 - quick)],
        rows=rows,
        comparisons=lambda some: [
            Comparison("a", "1", "uncertain", "2", "all"),
            Comparison("b", "3", "published", f"{len(some)}", ""),
        ],
        findings=lambda some: ["2 > 1."],
        figures=figures,
    )


def test_an_interrupted_study_resumes_after_its_last_finished_case(tmp_path):
    computed = []
    with pytest.raises(KeyboardInterrupt):
        run_study(make_study(computed, fail_at=3), tmp_path)
    assert computed == [(1, "case_1"), (2, "case_2")]
    rows = run_study(make_study(computed), tmp_path)
    assert computed == [(1, "case_1"), (2, "case_2"), (3, "case_3")]
    assert rows == run_study(make_study([]), tmp_path) == run_study(make_study([]), tmp_path / "b")
    check_columns(make_study([]), rows)
    assert len(computed) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quick": True}, "of study small, quick False, hardware H100-SXM, version .*, and these"),
        ({"hardware": "TPUv5p"}, "hardware TPUv5p, version .*; set another folder in --output"),
    ],
)
def test_a_folder_has_one_form_of_one_study(settings, message, tmp_path):
    run_study(make_study([]), tmp_path)
    with pytest.raises(ValueError, match=message):
        run_study(make_study([]), tmp_path, **settings)


def test_damaged_cases_and_unread_hardware_are_refused(tmp_path):
    run_study(make_study([]), tmp_path)
    path = tmp_path / CASES_FILE
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match=r"cases.jsonl is damaged \(.*; remove it, or set"):
        run_study(make_study([]), tmp_path)
    local = dataclasses.replace(make_study([]), hardware="")
    with pytest.raises(ValueError, match="--hardware X: the study small runs on the local devices"):
        run_study(local, tmp_path / "b", hardware="X")


def test_finished_cases_are_lines_of_json(tmp_path):
    run_study(make_study([]), tmp_path)
    subject, *cases = map(json.loads, (tmp_path / CASES_FILE).read_text().splitlines())
    assert subject.pop("version")
    assert subject == {"study": "small", "quick": False, "hardware": "H100-SXM"}
    assert [one["case"]["size"] for one in cases] == [1, 2, 3]
