"""A run that stops and goes on is the run that never stopped, also while it prunes."""

import contextlib
import itertools

import jax
import numpy as np
import pytest

from jaxscale.checkpoints.restore import restore
from jaxscale.checkpoints.retention import Retention
from jaxscale.checkpoints.save import CheckpointWriter
from jaxscale.checkpoints.tiers import Checkpoints
from jaxscale.config import load
from jaxscale.run.evaluation import device_batches
from jaxscale.run.setup.layout import open_engine
from jaxscale.run.setup.text import open_text

STEPS = 5


def make(*overrides):
    return open_engine(
        load(
            "configs/tiny.py",
            [
                "model.compute_dtype=float64",
                "model.param_dtype=float64",
                "model.num_kv_heads=4",
                "optimizer.moment_dtype=float64",
                "optimizer.second_moment_dtype=float64",
                "optimizer.accumulation_dtype=float64",
                "optimizer.sparsity=0.5",
                "optimizer.sparsity_steps=4",
                "data.seq_len=32",
                *overrides,
            ],
        )
    )


def advance(engine, text, state, begin, end=STEPS, seen=lambda step, state: None):
    """Losses of the steps after `begin`, and the state at the end."""
    losses, batch_size = [], 8
    stream = device_batches(engine, text.train, batch_size, start_step=begin)
    with contextlib.closing(stream):
        for step, batch in enumerate(itertools.islice(stream, end - begin), begin + 1):
            state, metrics = engine.step(state, batch)
            losses.append(float(metrics.loss))
            seen(step, state)
    return losses, state


@pytest.fixture(scope="session")
def straight(tmp_path_factory):
    """An uninterrupted run with a checkpoint at every step."""
    directory = tmp_path_factory.mktemp("straight")
    config, engine = make("layout.data=2", "layout.fsdp=2", "layout.tensor=2")
    text = open_text(config, directory)
    with contextlib.closing(
        CheckpointWriter(directory / "checkpoints", Retention(9))
    ) as checkpoints:
        fresh = engine.init(jax.random.key(config.run.seed))
        losses, state = advance(
            engine, text, fresh, 0, seen=lambda step, state: checkpoints.save(step, state, {})
        )
    return engine, text, directory / "checkpoints", losses, jax.tree.map(np.asarray, state)


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_continuing_after_any_step_is_bitwise_the_same(straight, stop):
    engine, text, directory, losses, expected = straight
    state = restore(Checkpoints(directory), stop, engine.abstract_state)
    again, state = advance(engine, text, state, stop)
    assert again == losses[stop:]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), expected)


@pytest.mark.proof
@pytest.mark.parametrize(
    "layout",
    [
        ("layout.data=1", "layout.fsdp=8", "layout.zero_stage=1"),
        ("layout.data=4", "layout.tensor=2", "layout.microbatches=2"),
        ("layout.data=2", "layout.context=4"),
    ],
    ids="-".join,
)
def test_another_layout_goes_on_with_the_same_examples_and_losses(straight, layout):
    _, text, directory, losses, expected = straight
    config, engine = make(*layout)
    other = open_text(config, directory.parent)
    assert other.train.fingerprint == text.train.fingerprint
    state = restore(Checkpoints(directory), 2, engine.abstract_state)
    again, state = advance(engine, other, state, 2)
    np.testing.assert_allclose(again, losses[2:], rtol=1e-10, atol=0)
    for got, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params)):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10 * np.max(np.abs(wanted)))
