"""The gradient noise scale: of a quadratic with known noise, in every kind of layout, and where it
is refused."""

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.batch import Batch
from jaxscale.config import Config, from_dict
from jaxscale.config.model import ModelSettings
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.forward import forward
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import Model, Params, Rows, Stack, Stream, Sums, head_params
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine
from jaxscale.training.gradients import split_batch
from jaxscale.training.noise_scale import (
    DECAY,
    check_measurable,
    estimate_noise,
    init_averages,
    tokens_of_small_batches,
)
from tests.invariants.layouts import (
    EXPERTS,
    GPT,
    LLAMA,
    batches,
    initial_state,
    make_config,
    open_engine,
)

WIDTH, WORDS, ROWS, LENGTH = 32, 64, 16, 8
CENTRES = np.random.default_rng(0).normal(size=(WORDS, WIDTH)) + 0.5
"""The gradient of a token is the weight minus its centre."""


@dataclass(frozen=True)
class Quadratic(Model):
    """Half the squared distance of one weight to the centre of each token."""

    settings: ModelSettings
    kernels: Kernels

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return (Stack("layers", 1, self.enter, self.subtract),)

    @property
    def axes(self) -> Params:
        return {"embed": {}, "layers": {"weight": ("layers", "embed")}, "head": {}}

    def init(self, key: jax.Array, rows: Rows | None = None) -> Params:
        return {"embed": {}, "layers": {"weight": jnp.zeros((1, WIDTH))}, "head": {}}

    def enter(self, embed: Params, stream: Stream, batch: Batch) -> Stream:
        return {"x": jnp.asarray(CENTRES)[batch.tokens]}

    def subtract(self, weights: Params, stream: Stream, *_: Any) -> tuple[Stream, Sums]:
        return {"x": stream["x"] - weights["weight"]}, {}

    def loss(self, head: Params, stream: Stream, batch: Batch) -> Sums:
        half = jnp.sum(0.5 * jnp.sum(jnp.square(stream["x"]), -1) * batch.weights)
        return {"loss": half, "nll": half}


def random_batch(rng: np.random.Generator) -> Batch:
    """Rows of random tokens, of which some have no loss."""
    tokens = rng.integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32)
    lengths = rng.integers(1, LENGTH + 1, (ROWS, 1))
    place = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    weights = (place < lengths).astype(np.float32)
    return Batch(tokens, tokens, np.ones_like(tokens), np.array(place), weights)


def test_a_quadratic_has_its_known_noise_scale():
    """On four ranks, each with two micro-batches of different numbers of tokens. The mean of the
    ratios of steps would be off by more than the bound."""
    config = from_dict(
        {
            "model": {"vocab_size": WORDS, "compute_dtype": "float64", "param_dtype": "float64"},
            "data": {"global_batch_size": ROWS, "seq_len": LENGTH},
            "optimizer": {"accumulation_dtype": "float64"},
            "layout": {"data": 2, "fsdp": 2, "zero_stage": 2, "microbatches": 2},
            "run": {"noise_every": 1},
        }
    )
    mesh = make_mesh(config.layout, jax.devices()[:4])
    engine = make_engine(config, mesh, model=Quadratic, optimizer=optax.set_to_zero())
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), engine.abstract_state)
    state = jax.device_put(zeros, jax.tree.map(lambda x: x.sharding, engine.abstract_state))
    assert engine.measure
    rng, found, averages = np.random.default_rng(1), [], np.zeros(2)
    for _ in range(400):
        state, metrics = engine.measure(state, engine.shard(random_batch(rng)))
        found.append([float(metrics.others[name]) for name in state.noise._fields])
        averages = DECAY * averages + (1 - DECAY) * np.array(found[-1])
    np.testing.assert_allclose([float(x) for x in state.noise], averages, rtol=1e-12)
    ratio = averages[1] / averages[0]
    assert float(metrics.others["noise_scale"]) == pytest.approx(ratio, rel=1e-12)
    square, variance = np.mean(found, axis=0)
    mean = CENTRES.mean(axis=0)
    assert square == pytest.approx(np.sum(mean**2), rel=0.02)
    assert variance == pytest.approx(np.sum((CENTRES - mean) ** 2) / WORDS, rel=0.02)


def test_the_estimates_are_unbiased_for_unequal_batches_and_weights():
    """Gradients of tokens from a Gaussian of known mean and variance, with weights."""
    rng, mean, steps = np.random.default_rng(2), np.full(5, 0.3), 40_000
    weights = rng.choice([0.0, 0.5, 1.0], (steps, 3, 4))
    tokens = weights.sum(axis=2)
    weights, tokens = (one[np.count_nonzero(tokens, axis=1) > 1] for one in (weights, tokens))
    grads = mean + 2 * rng.normal(size=(len(weights), 3, 4, 5))
    sums = np.einsum("nbt,nbtd->nbd", weights, grads)
    small, big = np.sum(sums**2, axis=(1, 2)), np.sum(np.sum(sums, axis=1) ** 2, axis=1)
    squared = np.sum(weights**2, axis=(1, 2))
    estimates = jax.vmap(estimate_noise)(small, big, tokens, squared)
    square, variance = (float(jnp.mean(one)) for one in estimates)
    assert square == pytest.approx(5 * 0.3**2, rel=0.1)
    assert variance == pytest.approx(5 * 4, rel=0.02)


def test_one_small_batch_with_all_tokens_gives_no_estimate():
    for tokens in ([4.0, 0.0], [0.0, 0.0]):
        found = estimate_noise(3.0, 3.0, jnp.array(tokens), sum(tokens))
        assert [float(x) for x in found] == [0.0, 0.0]


def test_small_batches_are_the_micro_batches_of_ranks():
    weights = np.random.default_rng(3).normal(size=(24, 2))
    counted = tokens_of_small_batches(jnp.asarray(weights), 2, 3)
    batch = Batch(*(jnp.asarray(weights),) * 5)
    for rank, microbatch in itertools.product(range(2), range(3)):
        mine = jax.tree.map(lambda x, rank=rank: x[rank * 12 : rank * 12 + 12], batch)
        tokens = split_batch(mine, 3).weights[microbatch]
        assert float(counted[rank, microbatch]) == pytest.approx(float(jnp.sum(tokens)))


def measuring(config: Config, **run: Any) -> Config:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, noise_every=1, **run))


@functools.cache
def estimates_of_sequences(family: str) -> tuple[float, float]:
    """From the gradient of each sequence of a batch, by automatic differentiation of the model; of
    the parameters that are used in one place."""
    config = make_config({"llama": LLAMA, "gpt": GPT}[family], {})
    model = Decoder(config.model, plain_kernels())
    params, batch = initial_state(config).params, batches()[0]

    def loss(params: Params, row: Batch) -> jax.Array:
        stream = forward(model, params, row)
        return model.loss(head_params(model, params), stream, row)["loss"]

    def squares(grads: Params) -> jax.Array:
        leaves = jax.tree_util.tree_leaves_with_path(grads)
        borrowed = model.borrows.values()
        used_once = [x for path, x in leaves if tuple(key.key for key in path) not in borrowed]
        return jnp.sum(jnp.stack([jnp.sum(jnp.square(x)) for x in used_once]))

    rows = split_batch(batch, len(batch.tokens))
    gradient = jax.jit(jax.grad(loss))
    grads = [gradient(params, jax.tree.map(lambda x, i=i: x[i], rows)) for i in range(16)]
    small = sum(map(squares, grads))
    big = squares(jax.tree.map(lambda *parts: sum(parts), *grads))
    weights = batch.weights.astype(np.float64)
    found = estimate_noise(small, big, jnp.sum(jnp.asarray(weights), axis=1), np.sum(weights**2))
    return float(found[0]), float(found[1])


@pytest.mark.proof
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", {"microbatches": 16}),
        ("llama", {"fsdp": 8, "microbatches": 2, "remat": "full"}),
        pytest.param(
            *("llama", {"data": 2, "fsdp": 2, "tensor": 2, "zero_stage": 1, "microbatches": 4}),
            marks=pytest.mark.slow,
        ),
        (
            "llama",
            {
                **{"fsdp": 2, "context": 2, "tensor": 2, "zero_stage": 2},
                **{"microbatches": 8, "accumulation": "layered"},
            },
        ),
        ("llama", {"pipeline": 2, "fsdp": 2, "tensor": 2, "microbatches": 8}),
        pytest.param(
            *("llama", {"pipeline": 4, "data": 2, "schedule": "zb_h1", "microbatches": 8}),
            marks=pytest.mark.slow,
        ),
        ("gpt", {"data": 4, "tensor": 2, "tensor_rows": 2, "zero_stage": 0, "microbatches": 4}),
    ],
    ids=str,
)
def test_the_noise_scale_is_that_of_the_sequences_in_float64(family, layout):
    """Every rank's micro-batch has one sequence here."""
    config = make_config({"llama": LLAMA, "gpt": GPT}[family], layout)
    engine = open_engine(measuring(config))
    state = initial_state(make_config({"llama": LLAMA, "gpt": GPT}[family], {}))
    state = state._replace(noise=jax.tree.map(np.asarray, init_averages(np.float64)))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, engine.abstract_state)
    state = jax.device_put(engine.placement.from_canonical(state), shardings)
    assert engine.measure
    _, metrics = engine.measure(state, engine.shard(batches()[0]))
    got = [float(metrics.others[n]) for n in ("gradient_square", "gradient_variance")]
    np.testing.assert_allclose(got, estimates_of_sequences(family), rtol=1e-10)


@pytest.mark.parametrize(
    ("layout", "optimizer", "message"),
    [
        ({}, {}, "the step is one micro-batch of one rank; set layout.microbatches = 2"),
        ({"expert": 2}, {}, r"layout.expert = 2 is not available .* set layout.expert = 1"),
        (
            {"pipeline": 2, "microbatches": 4, "schedule": "seq1f1b", "sequence_chunks": 2},
            {},
            "layout.sequence_chunks = 2 is not available",
        ),
        (
            {"pipeline": 2, "microbatches": 4, "head": "sliced"},
            {},
            "layout.head = 'sliced' is not available",
        ),
        ({"data": 2}, {"sparsity": 0.5, "sparsity_steps": 4}, "pruned weights is not available"),
        (
            {"data": 2},
            {"accumulation_dtype": "bfloat16"},
            "gradients summed or sent in 16 bits is not available",
        ),
    ],
)
def test_a_run_without_a_measure_is_refused(layout, optimizer, message):
    config = measuring(make_config(EXPERTS if "expert" in layout else LLAMA, layout))
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, **optimizer)
    )
    with pytest.raises(ValueError, match=message):
        check_measurable(config, Decoder(config.model, plain_kernels()))
