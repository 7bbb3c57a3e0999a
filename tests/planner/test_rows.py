"""Published runs become shapes, machines and choices; what a row lacks is said."""

import csv
import pathlib

import pytest

from jaxscale.planner import rows
from jaxscale.planner.columns import Columns, UnhandledError

PATH = pathlib.Path(__file__).with_name("rows.csv")


@pytest.fixture(scope="module")
def texts():
    with PATH.open(newline="") as file:
        return list(csv.DictReader(file))


def by_model(texts, model, **wanted):
    return next(
        row for row in texts
        if row["model"] == model and all(row[name] == value for name, value in wanted.items())
    )  # fmt: skip


def test_every_row_is_handled_or_has_a_reason(texts):
    found = rows.read(PATH)
    assert len(found.runs) + len(found.bills) + len(found.unhandled) == len(texts)
    assert {source for source, _ in found.unhandled} == {"Ultra-Scale Playbook plots"}
    assert all("dimensions" in reason for _, reason in found.unhandled)


def test_layouts_take_all_devices_and_all_sequences(texts):
    for row in rows.read(PATH).runs:
        given = next(one for one in texts if one["id"] == row.id)
        choice = row.choice
        if given["n_devices"]:
            assert int(choice.num_devices) == int(given["n_devices"])
        if given["global_batch"]:
            assert float(choice.global_batch) == pytest.approx(
                float(given["global_batch"]), rel=0.05
            )
        assert row.shape.num_params > 0


def test_parameters_are_the_sources_own(texts):
    for row in rows.read(PATH).runs:
        given = next(one for one in texts if one["id"] == row.id)
        if "reported params" in given["notes"]:
            reported = int(given["notes"].split("reported params ")[1].split(";")[0])
            assert row.shape.num_params == pytest.approx(reported, rel=0.01)


def test_tokens_a_second_become_a_step(texts):
    texts = dict(by_model(texts, "llama3-70b", framework="MaxText"))
    row = rows.to_row(Columns(texts))
    tokens = float(row.choice.global_batch) * row.shape.seq_len
    rate = tokens / row.step_seconds / float(row.choice.num_devices)
    texts |= {"step_time_s": "", "tok_s_dev": str(rate)}
    assert rows.to_row(Columns(texts)).step_seconds == pytest.approx(row.step_seconds)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": "", "model": "a secret"}, "dimensions of a secret are not given"),
        ({"seq": ""}, "no sequence length"),
        ({"framework": "abacus"}, "abacus is not in planner/software.py"),
        ({"hardware": "H101"}, "no device 'H101'; did you mean"),
        ({"TP": "4096"}, "needs more than the"),
        ({"global_batch": ""}, "no global batch is given"),
    ],
)
def test_what_a_row_lacks_is_said(texts, changes, reason):
    texts = {**texts[0], **by_model(texts, "gpt-vtrain-3.6b"), **changes}
    with pytest.raises(UnhandledError, match=reason):
        rows.to_row(Columns(texts))


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column 'hardware'; it is no file of measured runs"):
        rows.read(path)


def test_what_is_not_said_to_be_made_again_follows_from_memory(texts):
    row = rows.to_row(Columns(by_model(texts, "llama3-70b", framework="MaxText")))
    assert row.choice.remat != "none"  # 70B on 80 GB each, 16,384 tokens on a device
    said = {**by_model(texts, "llama3-70b", framework="MaxText"), "recompute": "none"}
    assert rows.to_row(Columns(said)).choice.remat == "none"


def test_energy_of_a_run_is_read_from_its_notes():
    bills = {bill.source: bill for bill in rows.read(PATH).bills}
    assert bills["GLaM (2112.06905)"].device_hours == 1024 * 574
    assert bills["GLaM (2112.06905)"].overhead == 1.11
    assert bills["LLaMA Table 15"].joules == pytest.approx(475 * 3.6e9)
