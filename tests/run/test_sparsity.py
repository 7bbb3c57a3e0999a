"""A sparse run, its resumption from a dense one, and its export."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxscale import convert
from jaxscale.config import load
from jaxscale.run import trainer, training_loop
from jaxscale.run.setup.layout_report import describe_layout

SETTINGS = ("optimizer.sparsity=0.5", "optimizer.sparsity_steps=4", "run.metrics_by_layer=True")


def train(workdir, *settings):
    """The records of a run's steps, and what it prints of its layout."""
    ready = trainer.open_trainer(load("configs/tiny.py", ["data.seq_len=32", *settings]), workdir)
    assert ready
    training_loop.fit(ready, trackers=())
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line], describe_layout(ready.engine)


@pytest.mark.proof
def test_a_dense_run_goes_on_sparse_and_its_export_has_the_pattern(tmp_path):
    workdir = tmp_path / "run"
    train(workdir, "run.steps=2", "optimizer.schedule_steps=6")
    sparse = ("optimizer.sparsity_begin=2", "optimizer.sparsity_pattern=2:4", "run.steps=6")
    last, layout = train(workdir, *SETTINGS, *sparse)
    assert [line["step"] for line in last] == [1, 2, 3, 4, 5, 6]
    assert last[-1]["sparsity"] == 0.5
    assert last[-1]["sparsity_by_layer"] == [0.5, 0.5]
    assert 0 < last[2]["sparsity"] < last[3]["sparsity"] < 0.5

    convert.main(["--to_hf", "--workdir", str(workdir), "--output", str(tmp_path / "hf")])
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    found = {name: x for name, x in tensors.items() if name.endswith("proj.weight")}
    assert len(found) == 14
    live = sum(np.count_nonzero(np.asarray(x, np.float32)) for x in found.values())
    assert f", {live:,} remain" in layout  # the law's number of weights
    for name, x in found.items():
        live = (np.asarray(x, np.float32) != 0).reshape(-1, 4).sum(axis=1)
        np.testing.assert_array_equal(live, 2, err_msg=name)
    for name in tensors.keys() - found.keys():  # of initial weights 1 in 100,000 is zero
        assert np.mean(np.asarray(tensors[name], np.float32) == 0) < 1e-3, name
