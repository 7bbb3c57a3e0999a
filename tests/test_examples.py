"""Each script of examples/ runs, in this process, which has eight devices and JAX imported."""

import importlib.util
import os
import pathlib
import re
import runpy
import sys
from collections.abc import Callable
from unittest import mock

import jax
import numpy as np
import pytest

import jaxscale
from jaxscale.run import metrics

SCRIPTS = sorted(pathlib.Path("examples").glob("*.py"))


@pytest.fixture
def main_of(monkeypatch) -> Callable[[str], Callable]:
    """The `main` of a script by its name; the script's changes of the environment are undone."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(metrics, "plot", lambda *arguments: None)
    with mock.patch.dict(os.environ), jax.enable_x64(False):
        yield lambda name: runpy.run_path(f"examples/{name}.py")["main"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_states_its_command_and_uses_public_names(path):
    text = path.read_text(encoding="utf-8")
    assert f"    python {path}" in text
    assert re.search(r"about\s\d+ s on two cores", text)
    assert set(re.findall(r"\bjaxscale\.(\w+)\(", text)) <= set(jaxscale.__all__)
    assert len([line for line in text.splitlines() if line.strip()]) <= 60


def test_a_missing_compiler_is_named_with_its_extra(main_of, tmp_path, monkeypatch):
    main = main_of("plan_and_compile")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="--extra aot"):
        main([], tmp_path)


@pytest.mark.proof
def test_a_model_is_trained_from_text(main_of, tmp_path, capsys):
    main = main_of("train_from_text")
    short = ["model.num_layers=1", "run.steps=2", "optimizer.warmup_steps=1", "run.eval_batches=1"]
    main(short, tmp_path)
    assert "a sample:\ndef " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="is complete"):
        main(short, tmp_path)


@pytest.mark.proof
def test_a_hugging_face_model_is_fine_tuned(main_of, tmp_path, capsys):
    main = main_of("finetune_hugging_face")
    main("tests/goldens/llama_chat", tmp_path)
    assert "logits (1, 5, 300)" in capsys.readouterr().out
    assert (tmp_path / "finetune_exported" / "model.safetensors").exists()
    with pytest.raises(SystemExit, match="to start again"):
        main("tests/goldens/llama_chat", tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("name", ["custom_model_pipeline", "resume_on_another_mesh"])
def test_two_layouts_give_the_same_losses(name, main_of, tmp_path, capsys):
    main_of(name)(tmp_path)
    (worst,) = re.findall(r"largest difference (\S+),", capsys.readouterr().out)
    assert float(worst) < 1e-5


@pytest.mark.proof
@pytest.mark.compiles
def test_a_plan_is_compiled_for_absent_tpus(main_of, tmp_path, capfd):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("no compiler for TPUs: uv sync --inexact --extra aot")
    main = main_of("plan_and_compile")
    main.__globals__["CONFIG"] = "tiny"
    main(["model.attention=reference", "model.num_layers=1"], tmp_path)
    assert "planned, " in capfd.readouterr().out


@pytest.mark.proof
def test_a_click_model_without_staleness_is_plain_jax_on_one_device(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(".")
    with mock.patch.dict(os.environ), jax.enable_x64(False):
        train = importlib.import_module("examples.click_model.train")
        file = tmp_path / "clicks.tsv"
        train.write_synthetic(file, 1024)
        clicks = train.read(file, train.NUM_ROWS)
        assert 0.1 < clicks.labels.mean() < 0.6
        assert (clicks.ids == -1).mean() == pytest.approx(0.03, abs=0.01)
        *_, (_, params, rows) = train.with_tables(clicks, 0)
        *_, (_, wanted_params, wanted_rows) = train.synchronous(clicks)
    np.testing.assert_allclose(rows, wanted_rows, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, wanted_params)
    assert train.area_under_curve(np.array([0, 1, 0, 1]), np.array([0.1, 0.9, 0.5, 0.4])) == 0.75


def test_lines_of_criteo_are_read_with_missing_and_negative_values(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(".")
    criteo = importlib.import_module("examples.click_model.criteo")
    file = tmp_path / "clicks.tsv"
    counts, names = ["-2", "", "7", *["0"] * 10], ["68fd1e64", "68fd1e64", "", *["a8cd5504"] * 23]
    file.write_text("\t".join(["1", *counts, *names]) + "\n")
    clicks = criteo.read(file, 1000)
    np.testing.assert_allclose(clicks.counts[0, :3], [0, 0, np.log(8)], rtol=1e-6)
    first, second, missing, *rest = clicks.ids[0]
    assert clicks.labels.tolist() == [1]
    assert missing == -1
    assert first != second, "a category is hashed with its field"
    assert all(0 <= one < 1000 for one in (first, second, *rest))
    file.write_text("\t".join(["1", *counts]) + "\n")
    with pytest.raises(ValueError, match="line 1 has 14 columns; Criteo's format has 40"):
        criteo.read(file, 1000)
