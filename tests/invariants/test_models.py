"""Every model gives the same losses and gradients in every kind of layout."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.config import Config, from_dict
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.step import make_engine
from tests.models import two_stacks

BATCH, SEQ_LEN, STEPS = 8, 16, 3
RULES = {"buckets": ()}


def make_config(**layout) -> Config:
    config = from_dict(
        {
            "data": {"global_batch_size": BATCH, "seq_len": SEQ_LEN},
            "optimizer": {
                "accumulation_dtype": "float64",
                "moment_dtype": "float64",
                "second_moment_dtype": "float64",
            },
            "layout": {"data": 1, **layout},
        }
    )
    settings = two_stacks.TwoStacksSettings(
        **two_stacks.SETTINGS, compute_dtype="float64", param_dtype="float64"
    )
    return dataclasses.replace(config, model=settings)


def batches() -> list[Batch]:
    random, found = np.random.default_rng(0), []
    for _ in range(STEPS):
        tokens = random.integers(0, 64, (BATCH, SEQ_LEN), np.int32)
        place = np.broadcast_to(np.arange(SEQ_LEN, dtype=np.int32), tokens.shape)
        weights = (random.random(tokens.shape) < 0.8).astype(np.float32)
        source = random.integers(0, 64, (BATCH, two_stacks.SOURCE_LEN), np.int32)
        found.append(
            Batch(
                tokens, np.roll(tokens, -1), 1 + place // 9, place % 9, weights, {"source": source}
            )
        )
    return found


def run(**layout):
    """Metrics of some steps, and the last parameters in canonical form."""
    config = make_config(**layout)
    mesh = make_mesh(config.layout, jax.devices()[: config.layout.num_devices])
    engine = make_engine(config, mesh, model=two_stacks.make, rules=RULES)
    canonical = jax.jit(engine.model.init)(jax.random.key(0))
    state = engine.init(jax.random.key(0))
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get(engine.placement.part("params").to_canonical(state.params)),
        jax.device_get(canonical),
    )
    found = []
    for batch in batches():
        state, metrics = engine.step(state, engine.shard(batch))
        found.append(jax.device_get(metrics))
    params = engine.placement.part("params").to_canonical(state.params)
    sums = engine.evaluate(state.params, engine.shard(batches()[0]), np.ones(64, np.float32))
    return found, jax.device_get(params), jax.device_get(sums)


@functools.cache
def one_device():
    return run()


LAYOUTS = [
    {
        "data": 2,
        "fsdp": 2,
        "tensor": 2,
        "zero_stage": 3,
        "accumulation": "layered",
        "microbatches": 2,
    },
    {"fsdp": 4, "context": 2, "zero_stage": 2, "microbatches": 2, "remat": "full"},
    {"pipeline": 2, "fsdp": 2, "tensor": 2, "microbatches": 4, "schedule": "1f1b", "zero_stage": 3},
    {"pipeline": 2, "data": 2, "microbatches": 4, "schedule": "interleaved", "virtual_stages": 2},
    {"pipeline": 2, "data": 2, "microbatches": 4, "schedule": "zb_v", "remat": "full"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_model_of_two_stacks_is_one_device_in_float64(layout):
    (expected, params, sums), (found, others, evaluated) = one_device(), run(**layout)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12),
        (found, others, tuple(evaluated)),
        (expected, params, tuple(sums)),
    )
