"""The score itself: what it counts, and that it can be trusted."""

import csv
import json
import pathlib

import numpy as np
import pytest

from tools.planner_validation import score as validation
from tools.planner_validation.published_runs import read_runs
from tools.planner_validation.score import validate
from tools.planner_validation.trainer_cost import trainer_cost

PATH = pathlib.Path(__file__).parents[3] / "tools/planner_validation/rows.csv"


@pytest.fixture(scope="module")
def report():
    return validate(PATH, seed=0)


def test_a_report_has_what_is_promised(report):
    plain = json.loads(json.dumps(report.as_json()))
    for score in [plain["overall"], *plain["sources"].values()]:
        for name in (
            "rows",
            "handled",
            "median_error_physical",
            "median_error_calibrated",
            "memory_median_error",
            "regret",
        ):
            assert name in score
    assert plain["overall"]["rows"] == sum(s["rows"] for s in plain["sources"].values())
    for score in [plain["overall"], *plain["sources"].values()]:
        assert score["handled"] + score["refused"] == score["rows"]
    assert plain["overall"]["refused"] == sum(plain["unhandled"].values()) > 0


def test_the_table_names_every_source_and_reason(report):
    text = report.text()
    for name in report.sources:
        assert name[:44] in text
    for reason in report.unhandled:
        assert reason in text


def test_the_sample_is_predicted_without_any_fit(report):
    assert report.overall.median_error_physical < 0.10
    assert report.overall.memory_median_error < 0.05
    assert report.overall.oom_missed == 0
    assert report.overall.energy_median_error < 0.01


def rescaled(tmp_path, factor):
    """The file with every measured step taking `factor` times as long, and nothing else."""
    measured = {row.id: row.step_seconds for row in read_runs(PATH).runs}
    path = tmp_path / f"{factor}.csv"
    with PATH.open(newline="") as source, path.open("w", newline="") as file:
        rows = csv.DictReader(source)
        writer = csv.DictWriter(file, rows.fieldnames or ())
        writer.writeheader()
        for row in rows:
            if measured.get(row["id"]) and row["global_batch"]:
                row |= {"step_time_s": measured[row["id"]] * factor, "tok_s_dev": ""}
            writer.writerow(row)
    return path


@pytest.mark.proof
def test_calibration_takes_out_a_common_factor_and_nothing_of_the_scored_half(tmp_path):
    one, three = (validate(rescaled(tmp_path, factor)).overall for factor in (1, 3))
    assert three.median_error_physical > 0.6
    # Groups of one row have no other half to be fitted on, so compare the others.
    source = "vTrain MICRO24 artifact"
    scores = [validate(rescaled(tmp_path, f)).sources[source] for f in (1, 3)]
    physical, calibrated = (
        [getattr(score, name) for score in scores]
        for name in ("mean_error_physical", "mean_error_calibrated")
    )
    assert abs(calibrated[1] - calibrated[0]) < 0.1 * abs(physical[1] - physical[0])
    assert three.pair_accuracy == one.pair_accuracy
    assert three.regret == one.regret


def test_a_factor_is_the_middle_of_the_rows_and_of_one_that_is_right():
    assert validation._factor(np.array([])) == 1
    assert validation._factor(np.array([4.0])) == pytest.approx(2)  # half of the way
    assert validation._factor(np.array([0.25])) == pytest.approx(0.5)
    rows = np.exp(np.random.default_rng(0).normal(0.3, 0.05, 101))
    assert validation._factor(rows) == pytest.approx(np.exp(0.3), rel=0.02)
    outlier = np.array([0.8, 0.9, 0.85, 0.02])
    assert 0.8 <= validation._factor(outlier) <= 0.9


@pytest.mark.proof
def test_the_halves_depend_on_the_seed_alone():
    same = [validate(PATH, seed=3).as_json() for _ in range(2)]
    assert same[0] == same[1]
    assert same[0] != validate(PATH, seed=4).as_json()


def test_a_perfect_planner_scores_perfectly(monkeypatch):
    measured = {
        (row.shape.work, row.cluster.chip.name, row.parallelism): row.step_seconds
        for row in read_runs(PATH).runs
    }

    class Perfect:
        def __init__(self, seconds):
            self.step_seconds = seconds

    monkeypatch.setattr(
        validation,
        "trainer_cost",
        lambda shape, cluster, parallelism: Perfect(
            measured[shape, cluster.chip.name, parallelism]
        ),
    )
    perfect = validate(PATH).overall
    assert perfect.median_error_physical == 0
    assert perfect.regret == 0
    assert perfect.pair_accuracy == 1


def test_predictions_do_not_read_what_was_measured(tmp_path):
    other = {row.id: row for row in read_runs(rescaled(tmp_path, 7)).runs}
    for row in read_runs(PATH).runs:
        if row.step_seconds:
            same = other[row.id]
            expected = trainer_cost(row.shape.work, row.cluster, row.parallelism).step_seconds
            assert (
                trainer_cost(same.shape.work, same.cluster, same.parallelism).step_seconds
                == expected
            )
