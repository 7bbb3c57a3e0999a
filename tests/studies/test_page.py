"""A study's files hold its rows, its comparisons and its pictures, in one page without links."""

import csv
import json

from jaxscale.studies.page import results_text, write_results
from jaxscale.studies.run_study import run_study
from tests.studies.test_run_study import make_study


def test_every_file_has_the_rows_and_the_page_is_whole(tmp_path):
    study = make_study([])
    rows = run_study(study, tmp_path)
    files = write_results(study, rows, tmp_path, "python -m jaxscale.study small")
    names = ["small.csv", "small.json", "small_1.png", "small.html"]
    assert [path.name for path in files] == names
    with open(tmp_path / "small.csv") as file:
        read = list(csv.DictReader(file))
    assert [one["value"] for one in read] == ["", str(1 / 3)] * 3
    found = json.loads((tmp_path / "small.json").read_text())
    assert found["rows"] == rows
    assert [one["evidence"] for one in found["comparisons"]] == ["uncertain", "published"]
    page = (tmp_path / "small.html").read_text()
    assert (tmp_path / "small_1.png").read_bytes().startswith(b"\x89PNG")
    for text in (
        'alt="A &lt; picture" src="data:image/png;base64,',
        "Is 1 &lt; 2?",
        "<td>&lt;b&gt;</td>",
        '<td class="number">0.3333</td>',
        "python -m jaxscale.study small",
        "2 &gt; 1.",
    ):
        assert text in page, text
    assert "http" not in page
    # The best known figures first.
    assert page.index("<td>b</td>") < page.index("<td>a</td>")


def test_an_uncertain_figure_is_marked_in_the_text():
    text = results_text(make_study([]), [])
    assert "published (uncertain)  1" in text
    assert "published  3" in text
    assert text.endswith("- 2 > 1.")
