"""Every model gives the same losses and gradients in every kind of layout."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.config import Config, from_dict
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.step import make_engine
from tests.models import two_stacks

BATCH, SEQ_LEN, TARGET_LEN, STEPS = 8, 16, 8, 3
RULES = {"own": ("tensor",), "distances": ()}
WIDE = {"compute_dtype": "float64", "param_dtype": "float64"}
T5 = {
    "family": "t5",
    "num_layers": 4,
    "num_encoder_layers": 4,
    "d_model": 16,
    "num_heads": 4,
    "head_dim": 8,
    "d_ff": 32,
    "vocab_size": 64,
    "relative_buckets": 8,
    "relative_max_distance": 12,
}
MODELS: dict[str, dict[str, Any]] = {
    "t5": T5,
    "umt5": {**T5, "family": "umt5", "tied_embeddings": True, "scaled_head": True},
}


def make_config(name: str, **layout) -> Config:
    data: dict[str, Any] = {"global_batch_size": BATCH, "seq_len": SEQ_LEN}
    if name in MODELS:
        data |= {"target_len": TARGET_LEN, "objective": "span_corruption"}
    config = from_dict(
        {
            "data": data,
            "model": {**MODELS[name], **WIDE} if name in MODELS else {},
            "optimizer": {
                "accumulation_dtype": "float64",
                "moment_dtype": "float64",
                "second_moment_dtype": "float64",
            },
            "layout": {"data": 1, **layout},
        }
    )
    if name in MODELS:
        return config
    settings = two_stacks.TwoStacksSettings(**two_stacks.SETTINGS, **WIDE)
    return dataclasses.replace(config, model=settings)


def batches(name: str) -> list[Batch]:
    """Two documents a row, and a place of padding in the encoder's."""
    random, found = np.random.default_rng(0), []
    length = TARGET_LEN if name in MODELS else SEQ_LEN
    for _ in range(STEPS):
        tokens = random.integers(0, 64, (BATCH, length), np.int32)
        place = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
        weights = (random.random(tokens.shape) < 0.8).astype(np.float32)
        source = random.integers(0, 64, (BATCH, two_stacks.SOURCE_LEN), np.int32)
        extras = {"source": source}
        if name in MODELS:
            at = np.broadcast_to(np.arange(SEQ_LEN, dtype=np.int32), source.shape)
            segments = np.where(at == SEQ_LEN - 1, 0, 1 + at // 6 % 2).astype(np.int32)
            extras = {
                "encoder_tokens": source,
                "encoder_segments": segments,
                "encoder_positions": at % 6,
            }
        cut = length // 2 + 1
        found.append(
            Batch(tokens, np.roll(tokens, -1), 1 + place // cut, place % cut, weights, extras)
        )
    return found


def run(name: str, **layout):
    """Metrics of some steps, and the last parameters in canonical form."""
    config = make_config(name, **layout)
    mesh = make_mesh(config.layout, jax.devices()[: config.layout.num_devices])
    own: Any = {} if name in MODELS else {"model": two_stacks.make, "rules": RULES}
    engine = make_engine(config, mesh, **own)
    canonical = jax.jit(engine.model.init)(jax.random.key(0))
    state = engine.init(jax.random.key(0))
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get(engine.placement.part("params").to_canonical(state.params)),
        jax.device_get(canonical),
    )
    found = []
    for batch in batches(name):
        state, metrics = engine.step(state, engine.shard(batch))
        found.append(jax.device_get(metrics))
    params = engine.placement.part("params").to_canonical(state.params)
    sums = engine.evaluate(state.params, engine.shard(batches(name)[0]), np.ones(64, np.float32))
    return found, jax.device_get(params), jax.device_get(sums)


@functools.cache
def one_device(name: str):
    return run(name)


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
OF_FAMILIES = [
    (
        "t5",
        {
            "data": 2,
            "fsdp": 2,
            "zero_stage": 3,
            "accumulation": "layered",
            "microbatches": 2,
        },
    ),
    ("t5", {"tensor": 2, "context": 2, "fsdp": 2, "zero_stage": 3}),
    ("t5", {**LAYOUTS[3], "data": 1, "tensor": 2}),
    ("umt5", LAYOUTS[4]),
]


@pytest.mark.parametrize(
    ("name", "layout"), [*(("own", layout) for layout in LAYOUTS), *OF_FAMILIES], ids=str
)
def test_a_model_of_two_stacks_is_one_device_in_float64(name, layout):
    (expected, params, sums), (found, others, evaluated) = one_device(name), run(name, **layout)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12),
        (found, others, tuple(evaluated)),
        (expected, params, tuple(sums)),
    )
