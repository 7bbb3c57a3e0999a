"""Masked models: one device in every kind of layout, and resumed bitwise, in another layout too."""

import contextlib
import functools

import jax
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.config import Config
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.checkpoint import Checkpoints
from jaxscale.training.step import make_engine
from tests.invariants.test_models import SEQ_LEN, SIZES, Case, make_batches, make_config

MASKED = {
    "bert": {"family": "bert", "max_seq_len": SEQ_LEN},
    "esm": {"family": "esm", "dropped_token": 3, "embedding_norm": True},
}


def masked_config(family: str, **layout) -> Config:
    sizes = SIZES | {"num_layers": 4, "num_kv_heads": 4}
    return make_config(Case(MASKED[family] | sizes, objective="masked"), **layout)


def masked_batches() -> list[Batch]:
    """Whole texts beside each other; a seventh of the tokens is the one that ESM-2 drops."""
    random, found = np.random.default_rng(0), []
    for batch in make_batches({}):
        tokens = np.where(random.random(batch.tokens.shape) < 1 / 7, 3, batch.tokens)
        found.append(batch._replace(tokens=tokens.astype(np.int32), targets=batch.tokens))
    return found


@functools.cache
def masked_engine(family: str, layout: tuple = ()):
    config = masked_config(family, **dict(layout))
    return make_engine(config, make_mesh(config.layout, jax.devices()[: config.layout.num_devices]))


def run_masked(engine, state, begin: int = 0):
    """Metrics of the steps after `begin`, of two, and the canonical state after each."""
    found, states = [], []
    for batch in masked_batches()[begin:2]:
        state, metrics = engine.step(state, engine.shard(batch))
        found.append(jax.device_get(metrics))
        states.append(jax.device_get(engine.placement.to_canonical(state)))
    return found, states


@functools.cache
def masked_run(family: str, layout: tuple = ()):
    engine = masked_engine(family, layout)
    return run_masked(engine, on_ranks(engine, first_state(family)))


@functools.cache
def first_state(family: str):
    return jax.device_get(masked_engine(family).init(jax.random.key(0)))


def on_ranks(engine, state):
    placed = jax.tree.map(
        lambda x, leaf: jax.device_put(x, leaf.sharding), state, engine.placement.canonical
    )
    return engine.placement.from_canonical(placed)


near = functools.partial(
    jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)
)
same = functools.partial(jax.tree.map, np.testing.assert_array_equal)

SEQUENCE = {"fsdp": 2, "tensor": 2, "context": 2, "zero_stage": 3, "microbatches": 2}
STAGES = {"pipeline": 2, "fsdp": 2, "context": 2, "zero_stage": 2, "microbatches": 4}
STAGES |= {"schedule": "zb_v", "remat": "full", "context_method": "gather"}
MASKED_LAYOUTS = [("esm", tuple(SEQUENCE.items())), ("bert", tuple(STAGES.items()))]


@pytest.mark.parametrize(("family", "layout"), MASKED_LAYOUTS, ids=str)
def test_a_masked_model_is_one_device_in_float64(family, layout):
    (found, states), (expected, last) = masked_run(family, layout), masked_run(family)
    near((found, states[-1].params), (expected, last[-1].params))


def test_a_masked_run_resumes_bitwise_and_in_another_layout(tmp_path):
    sequence = MASKED_LAYOUTS[0]
    found, states = masked_run(*sequence)
    engine, other = masked_engine(*sequence), masked_engine("esm")
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, states[0], {})
        checkpoints.wait()
        again = run_masked(engine, checkpoints.restore(1, engine.placement.canonical), 1)
        restored = checkpoints.restore(1, other.placement.canonical)
    same(again, (found[1:], states[1:]))
    same(jax.device_get(restored), states[0])
    resumed, ends = run_masked(other, restored, 1)
    near((resumed, ends[-1].params), (found[1:], states[-1].params))
