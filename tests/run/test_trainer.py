"""The training loop refuses transfers between host and devices that nobody asked for. Those that
are meant are in every run (`tests/test_train.py`)."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxscale import config as configs
from jaxscale.run import trainer
from jaxscale.training.checkpoint import Checkpoints
from jaxscale.training.step import StepMetrics

SETTINGS = ["layout.fsdp=2", "model.num_layers=1", "data.seq_len=32", "run.steps=1"]


@jax.jit
def count(state, batch):
    """A step that compiles at once: what crosses is around a step."""
    tokens = batch.weights.sum()
    return state._replace(step=state.step + 1), StepMetrics(tokens, tokens, tokens)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "compile_step", lambda engine: count)
        config = configs.load("configs/tiny.py", SETTINGS)
        ready = trainer.open_trainer(config, tmp_path_factory.mktemp("run"))
    assert ready
    return ready


@pytest.mark.parametrize(
    ("transfer", "refused"),
    [
        # What every device holds whole a CPU reads in place, unnoticed: so the array is sharded.
        (lambda batch: np.asarray(batch.tokens), "device-to-host"),
        (lambda batch: batch.weights * np.ones(32), "host-to-device"),
    ],
)
def test_a_transfer_in_the_loop_is_refused(opened, tmp_path, transfer, refused):
    def step(state, batch):
        transfer(batch)
        return count(state, batch)

    checkpoints = Checkpoints(tmp_path / "checkpoints", report=lambda line: None)
    ready = dataclasses.replace(opened, workdir=tmp_path, checkpoints=checkpoints, step=step)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"Disallowed {refused} transfer"):
        trainer.fit(ready, trackers=())
