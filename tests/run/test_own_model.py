"""Runs of a custom model: another run starts from its weights, on another layout, and it is
evaluated where its code is trusted."""

import json

import jax
import numpy as np
import optax
import pytest

from jaxscale import evaluate
from jaxscale.checkpoints.tiers import Checkpoints
from jaxscale.config import from_dict
from jaxscale.run import trainer, training_loop
from jaxscale.run.initial_weights import open_weights
from tests.models import mixer

FAMILY = "tests.models.mixer:make"


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("the quick brown fox jumps over it\n\n" * 99)
    return path


def train(texts, workdir, layout: dict, *, steps=1, own=None, keep_state=False, **changes):
    """The parameters after so many steps.

    Args:
      own: a custom optimizer.
      changes: to the model's settings; a run with any learns nothing.
    """
    sections = {
        "model": {"family": FAMILY, "width": 8, "compute_dtype": "float32", **changes},
        "data": {
            "source": [{"path": str(texts), "boundary": "paragraph"}],
            "tokenizer": "bytes",
            "seq_len": 16,
            "global_batch_size": 8,
            "heldout": 0.5,
        },
        "optimizer": {"learning_rate": 0.0 if changes else 0.1, "keep_state": keep_state},
        "layout": layout,
        "run": {"steps": steps, "eval_batches": 1},
    }
    ready = trainer.open_trainer(from_dict(sections), workdir, optimizer=own)
    assert ready
    state, _ = training_loop.fit(ready, trackers=())
    return jax.device_get(state.params)


@pytest.mark.proof
def test_a_run_starts_from_a_run_of_the_same_model_and_is_evaluated(texts, tmp_path, capsys):
    first = train(texts, tmp_path / "first", {"data": 8})
    init = {"init_from": str(tmp_path / "first")}
    second = train(texts, tmp_path / "second", {"data": 2, "fsdp": 2, "tensor": 2}, **init)
    jax.tree.map(np.testing.assert_array_equal, second, first)

    asked = ["--workdir", str(tmp_path / "second"), "--max_batches", "1"]
    with pytest.raises(SystemExit) as refused:
        evaluate.main(asked)
    assert refused.value.code == 2
    assert f"model.family = '{FAMILY}'" in capsys.readouterr().err
    out = tmp_path / "out.json"
    assert evaluate.main([*asked, "--trust_family", "--json", str(out)]) == 0
    lines = (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()
    logged = [line["eval_loss"] for line in map(json.loads, lines) if "eval_loss" in line]
    assert logged == [pytest.approx(json.loads(out.read_text())["eval_loss"], rel=1e-6)]

    with pytest.raises(ValueError, match=r"first has a model of code from outside the package"):
        open_weights(tmp_path / "first", "docs.my_model:MyModel")


def test_a_head_of_labels_is_not_trained_on_text(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(mixer.Mixer, "num_classes", 3)
    with pytest.raises(ValueError, match=r"3 classes .* the 257 tokens of .* engine\.shard"):
        train(texts, tmp_path, {"data": 8})


@pytest.mark.proof
def test_a_run_keeps_to_an_optimizer_of_ones_own(texts, tmp_path, caplog, monkeypatch):
    """Its state can have the very arrays of the shipped one's."""
    own, layout = optax.adamw(optax.constant_schedule(0.1)), {"data": 8}
    caplog.set_level("INFO", "jaxscale")
    train(texts, tmp_path / "own", layout, own=own)
    train(texts, tmp_path / "shipped", layout)
    first, second = (line for line in caplog.messages if line.startswith("step 1/1 | loss"))
    assert [" | lr " in line for line in (first, second)] == [False, True]
    assert " |  | " not in first
    init = {"init_from": str(tmp_path / "own"), "keep_state": True}
    for folder, given, message in (
        ("own", {}, "a custom optimizer, given in Python, and this run has optimizer.name ="),
        ("shipped", {"own": own}, "optimizer.name = 'adamw', and this run has a custom optimizer"),
        ("new", init, "of another optimizer: an optimizer given in Python there only; set the"),
        ("new", {"own": optax.sgd(0.1), **init}, "another optimizer, such as .*; pass the same op"),
    ):
        with pytest.raises(ValueError, match=message):
            train(texts, tmp_path / folder, layout, steps=2, **given)
    train(texts, tmp_path / "own", layout, steps=2, own=own)
    # A checkpoint of before it was recorded may be of either.
    recorded = Checkpoints.metadata
    monkeypatch.setattr(
        Checkpoints,
        "metadata",
        lambda self, step: {**recorded(self, step), "own_optimizer": None},
    )
    train(texts, tmp_path / "earlier", layout, own=own, **init)
