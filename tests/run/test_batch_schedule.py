"""A run with a growing batch that measures its noise scale, and stops and resumes on either side of
a switch."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

from jaxscale.config import load
from jaxscale.data.loader import batches
from jaxscale.run import trainer, training_loop
from jaxscale.run.setup import step_programs
from jaxscale.run.setup.step_programs import open_engines, smaller_config
from jaxscale.run.setup.text import open_text
from tests.invariants.layouts import GPT, make_config, open_engine

SETTINGS = (
    *("model.num_layers=1", "model.d_model=16", "model.d_ff=16", "model.num_heads=1"),
    *("model.num_kv_heads=1", "data.seq_len=32", "data.heldout=0", "layout.fsdp=8"),
    *("layout.data=1", "optimizer.schedule_steps=6", "run.noise_every=2"),
)
RAMP = (
    *("data.global_batch_size=32", "layout.microbatches=4"),
    "data.batch_schedule={0: 16, 3: 32}",
)


@pytest.fixture
def compiled_once(monkeypatch):
    """Compiles equal programs of several runs once."""
    made, compile_step = {}, step_programs.compile_step

    def compile_new(engine, lowered):
        text = lowered.as_text()
        made[text] = made.get(text) or compile_step(engine, lowered)
        return made[text]

    for module in (step_programs, trainer):
        monkeypatch.setattr(module, "compile_step", compile_new)
    return made


def train(workdir, *settings):
    """The records of a run's steps, and its last state."""
    ready = trainer.open_trainer(load("configs/tiny.py", [*SETTINGS, *settings]), workdir)
    assert ready
    state, _ = training_loop.fit(ready, trackers=())
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [one for one in records if "loss" in one], jax.tree.map(np.asarray, state)


@pytest.mark.proof
def test_a_resumed_ramp_is_bitwise_the_uninterrupted_one(tmp_path, compiled_once):
    """It stops before, at and after the switch; the averages of the noise scale continue. Without
    a schedule it resumes with one that gives the steps so far the same examples."""
    straight, expected = train(tmp_path / "straight", *RAMP, "run.steps=6")
    workdir = tmp_path / "stopped"
    train(workdir, "data.global_batch_size=16", "layout.microbatches=2", "run.steps=2")
    train(workdir, *RAMP, "run.steps=3")
    train(workdir, *RAMP, "run.steps=4")
    resumed, state = train(workdir, *RAMP, "run.steps=6")
    assert len(compiled_once) == 4
    same = "step", "loss", "grad_norm", "learning_rate", "tokens", "examples", "noise_scale"
    assert [[one.get(key) for key in same] for one in resumed] == [
        [one.get(key) for key in same] for one in straight
    ]
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert float(state.noise.gradient_variance) > 0
    assert [one["tokens"] for one in straight] == [512, 512, 512, 1024, 1024, 1024]
    assert [one["step"] for one in straight if "noise_scale" in one] == [2, 4, 6]
    examples = open_text(load("configs/tiny.py", [*SETTINGS, *RAMP]), workdir).train
    read = [range(a, b) for a, b in itertools.pairwise((0, 16, 32, 48, 80, 112, 144))]
    assert [one["examples"] for one in straight] == [examples.example_digest(one) for one in read]
    message = (
        r"checkpoint 6 was trained with .* and has read 144 examples, and this run has "
        r"data.global_batch_size = 16: 96 by then; restore it, set data.batch_schedule"
    )
    with pytest.raises(ValueError, match=message):
        train(workdir, "data.global_batch_size=16", "run.steps=7")


def test_batches_begin_after_those_of_earlier_sizes(tmp_path):
    config = load("configs/tiny.py", [*SETTINGS, *RAMP])
    train_set = open_text(config, tmp_path).train
    stream = batches(train_set, global_batch_size=32, start_step=3, first_example=48)
    for begin in (48, 80):
        expected = np.stack([train_set[i].tokens for i in range(begin, begin + 32)])
        np.testing.assert_array_equal(next(stream).tokens, expected)
    stream.close()


def test_smaller_batches_have_fewer_micro_batches():
    config = load("configs/tiny.py", [*SETTINGS, *RAMP])
    small = smaller_config(config, 16)
    assert (small.data.global_batch_size, small.layout.microbatches) == (16, 2)
    with pytest.raises(ValueError, match="batches of 3 sequences, and a micro-batch has"):
        smaller_config(config, 3)


def test_a_pipeline_that_would_move_layers_is_refused():
    config = make_config(GPT, {"pipeline": 2, "microbatches": 4})
    data = dataclasses.replace(config.data, batch_schedule={0: 8, 3: 16})
    engine = open_engine(dataclasses.replace(config, data=data))
    assert {size: one.layout.microbatches for size, one in open_engines(engine, {}).items()} == {
        8: 2,
        16: 4,
    }
    rows = engine.placement.layer_of_row["layers"]
    rows[:] = rows[::-1].copy()
    with pytest.raises(ValueError, match="the pipeline splits the layers in another way"):
        open_engines(engine, {})
