"""Every model gives the same losses and gradients in every kind of layout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.batch import Batch
from jaxscale.config import Config, from_dict
from jaxscale.models.decoder import plain_kernels
from jaxscale.models.protocol import Layer
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.step import make_engine
from tests.models import two_stacks

BATCH, SEQ_LEN, STEPS = 8, 16, 3
RULES = {"own": ("tensor",), "buckets": ()}


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
        **two_stacks.SETTINGS,
        readers=3,  # one more than stages, and one layer more than whole periods
        writers=5,
        compute_dtype="float64",
        param_dtype="float64",
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


@functools.cache
def fresh_params():
    """In canonical form, from the seed of the runs."""
    model = two_stacks.make(make_config().model, plain_kernels())
    return jax.device_get(jax.jit(model.init)(jax.random.key(0)))


def run(**layout):
    """Metrics of some steps, and the last parameters in canonical form."""
    config = make_config(**layout)
    mesh = make_mesh(config.layout, jax.devices()[: config.layout.num_devices])
    engine = make_engine(config, mesh, model=two_stacks.make, rules=RULES)
    state = engine.init(jax.random.key(0))
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get(engine.placement.part("params").to_canonical(state.params)),
        fresh_params(),
    )
    turn = state.params["writers"]["turn"]  # along an axis of the model's own
    assert turn.sharding.shard_shape(turn.shape)[-1] * config.layout.tensor == turn.shape[-1]
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
        "remat": "full",
    },
    {"fsdp": 4, "context": 2, "zero_stage": 2, "microbatches": 2},
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


def test_one_device_is_a_few_lines_of_plain_jax():
    """What all layouts agree on is the model: its loss, the gradient of that with auxiliary losses
    and a borrowed parameter, and its sums."""
    settings, batch = make_config().model, batches()[0]
    model = two_stacks.make(settings, plain_kernels())
    count = batch.weights.sum(dtype=np.float64)

    def mean_loss(params):
        def layer(name, index):
            return jax.tree.map(lambda x: x[index], params[name])

        embed, sums = params["embed"], []
        stream = model.enter_readers(embed, {}, batch)
        for index in range(settings.readers):
            stream, _ = model.read(layer("readers", index), stream, batch, Layer(index, 0))
        stream = model.enter_writers(embed, stream, batch)
        for index in range(settings.writers):
            place = Layer(index, index % 2)
            x, found = model.write(layer("writers", index), stream, batch, place)
            stream, sums = {**stream, **x}, [*sums, found]
        losses = model.loss({**params["head"], "tied": embed["tokens"]}, stream, batch)
        loss = losses["loss"] + sum(one["loss"] for one in sums)
        return loss / count, (losses, jnp.stack([one["size"] for one in sums]))

    gradient = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))
    (_, (losses, sizes)), grads = gradient(fresh_params())
    expected = {
        "loss": losses["nll"] / count,
        "grad_norm": optax.tree.norm(grads),
        "others": {"confident": losses["confident"] / count, "writers/size": sizes},
    }
    found = one_device()[0][0]._asdict()
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-10),
        {name: found[name] for name in expected},
        expected,
    )
