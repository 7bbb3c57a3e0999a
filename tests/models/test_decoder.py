"""The decoder: its parameters and operations as they are counted, documents kept apart."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.protocol import head_params
from jaxscale.models.weights import exact_normal
from jaxscale.sharding.resolve import is_axes
from jaxscale.training.tracing.trace_work import trace_work
from tests.training.tracing.test_trace_work import with_all_keys

CONFIGS = sorted(str(path) for path in pathlib.Path("configs").glob("*.py"))
SMALL = ModelConfig(num_kv_heads=2, compute_dtype="float64", param_dtype="float64")
GPT = ModelConfig(
    family="gpt", num_kv_heads=2, qk_norm=True, compute_dtype="float64", param_dtype="float64"
)


def make_batch(tokens, segments):
    positions = np.concatenate([np.arange(n) for n in np.bincount(segments[0])[1:]])[None]
    return Batch(tokens, np.roll(tokens, -1, 1), segments, positions, np.ones(tokens.shape))


@functools.cache
def first_params(config):
    return jax.jit(Decoder(config, plain_kernels()).init)(jax.random.key(0))


def forward(model, params, batch):
    x = model.embed(params["embed"], batch)
    x, _ = jax.lax.scan(lambda x, layer: (model.block(layer, x, batch), None), x, params["layers"])
    return x


@pytest.mark.parametrize("config", [SMALL, GPT], ids=["llama", "gpt"])
def test_every_dimension_has_a_name(config):
    model = Decoder(config, plain_kernels())
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    jax.tree.map(
        lambda axes, leaf: None if len(axes) == leaf.ndim else pytest.fail(f"{axes} {leaf.shape}"),
        model.axes,
        shapes,
        is_leaf=is_axes,
    )


@pytest.mark.proof
@pytest.mark.parametrize("config", [SMALL, GPT], ids=["llama", "gpt"])
def test_scores_may_be_scaled_where_heads_are_rotated(config):
    batch = make_batch(np.arange(20)[None], np.ones((1, 20), int))
    plain = Decoder(config, plain_kernels())
    other = Decoder(config, dataclasses.replace(plain.kernels, rotary_scales=True))
    layer = jax.tree.map(lambda x: np.asarray(x)[0], first_params(config)["layers"])
    x = np.random.default_rng(0).normal(size=(1, 20, 64))
    got, wanted = jax.jit(lambda *args: (other.block(*args), plain.block(*args)))(layer, x, batch)
    np.testing.assert_allclose(got, wanted, atol=1e-12)


@pytest.mark.proof
@pytest.mark.parametrize("config", [SMALL, GPT], ids=["llama", "gpt"])
def test_packed_documents_do_not_see_each_other(config):
    model = Decoder(config, plain_kernels())
    params = first_params(config)
    tokens = np.random.default_rng(0).integers(0, 257, (1, 20))
    segments = np.array([[1] * 8 + [2] * 12])
    run = jax.jit(functools.partial(forward, model))
    together = run(params, make_batch(tokens, segments))
    alone = run(params, make_batch(tokens[:, 8:], segments[:, 8:] - 1))
    np.testing.assert_allclose(together[:, 8:], alone, rtol=0, atol=1e-12)


@pytest.mark.proof
def test_rows_beyond_the_vocabulary_never_matter():
    model, params = Decoder(GPT, plain_kernels()), first_params(GPT)
    batch = make_batch(np.arange(12)[None], np.ones((1, 12), int))

    def loss(params):
        stream = {"x": forward(model, params, batch)}
        return model.loss(head_params(model, params), stream, batch)["loss"]

    value_and_grad = jax.jit(jax.value_and_grad(loss))
    value, grads = value_and_grad(params)
    tokens, changed = grads["embed"]["tokens"], np.array(params["embed"]["tokens"])
    assert not np.any(tokens[257:])
    changed[257:] = 1e3
    other, _ = value_and_grad({**params, "embed": {**params["embed"], "tokens": changed}})
    np.testing.assert_array_equal(other, value)


LATENT = {"num_kv_heads": 8, "kv_rank": 128, "query_rank": 192, "rope_head_dim": 16}
LATENT |= {"num_experts": 0, "dense_layers": 0}


@pytest.mark.compiles
@pytest.mark.proof
@pytest.mark.parametrize("family", ["llama", "gpt", "deepseek_v3"])
def test_operations_are_what_the_compiler_counts(family):
    """Within 3 %: the record leaves out norms, activations, the softmax and rotary positions."""
    config = ModelConfig(
        num_layers=1,
        d_model=512,
        num_heads=8,
        head_dim=64,
        d_ff=2048,
        vocab_size=4096,
        family=family,
        tied_embeddings=family == "gpt",
        compute_dtype="float32",
        **(LATENT if family == "deepseek_v3" else {"num_kv_heads": 4}),
    )
    model = Decoder(config, plain_kernels())
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    ints = jax.ShapeDtypeStruct((1, 128), np.int32)
    batch = Batch(ints, ints, ints, ints, jax.ShapeDtypeStruct((1, 128), np.float32))

    def logits(params, batch):
        layer = jax.tree.map(lambda x: x[0], params["layers"])
        x = model.block(layer, model.embed(params["embed"], batch), batch)
        return model.logits(head_params(model, params), x)

    analysis = jax.jit(logits).lower(shapes, batch).compile().cost_analysis()
    counted = analysis["flops"] / 128
    # The reference attention computes every score and masks half of them.
    work = trace_work(config, 128, 128)
    every = with_all_keys(work)
    assert every.sequence_flops / 128 == pytest.approx(counted, rel=0.03)
    assert work.sequence_flops < every.sequence_flops


@pytest.mark.proof
def test_draws_are_normal_enough():
    draws = np.asarray(exact_normal(jax.random.key(3), (1000, 1000), 0.02), np.float64) / 0.02
    assert abs(draws.mean()) < 3e-3
    assert draws.std() == pytest.approx(1, abs=3e-3)
    assert np.mean(np.abs(draws) < 1) == pytest.approx(0.6827, abs=0.015)
    assert np.mean(draws**4) == pytest.approx(2.7, abs=0.02), "1.2 / 4 below the normal's 3"
    assert jnp.abs(draws).max() < 3.47
