"""B and then W are the backward pass, for blocks that know nothing of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.config.remat_policy import parse_remat
from jaxscale.models.decoder import Decoder
from jaxscale.models.kernels import Kernels
from jaxscale.ops.attention.attention import attention
from jaxscale.pipeline.backward_split import split
from jaxscale.training.remat import rematerialised, rematerialised_attention

SEQ_LEN = 16
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
MODELS = {
    "llama": {"num_kv_heads": 2, "qk_norm": True},
    "gpt": {"num_kv_heads": 4, "family": "gpt", "tied_embeddings": True, "max_seq_len": SEQ_LEN},
}


def make_model(family: str, implementation: str, d_model: int = 32) -> Decoder:
    config = ModelConfig(
        num_layers=1,
        d_model=d_model,
        num_heads=4,
        head_dim=d_model // 4,
        d_ff=3 * d_model,
        vocab_size=64,
        param_dtype="float64",
        compute_dtype="float64",
        **MODELS[family],
    )
    return Decoder(config, Kernels(functools.partial(attention, implementation=implementation)))


def arguments(model: Decoder, batch_size: int = 2, seq_len: int = SEQ_LEN):
    """A layer's weights, none of them as it was made; an input; a batch of packed documents."""
    layers = model.init(jax.random.key(0))["layers"]
    leaves, structure = jax.tree.flatten(jax.tree.map(lambda x: x[0], layers))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [x + 0.1 * jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves)]
    x = jax.random.normal(
        jax.random.key(2), (batch_size, seq_len, model.settings.d_model), "float64"
    )
    place = np.broadcast_to(np.arange(seq_len, dtype=np.int32), (batch_size, seq_len))
    batch = Batch(place, place, 1 + place // 7, place % 7, np.ones_like(place, np.float32))
    return jax.tree.unflatten(structure, leaves), x, batch


def as_layer(function):
    """A function of weights, an array and a context as a layer without sums."""
    return lambda weights, x, shared, context: ((function(weights, x, context), None), {})


def assert_split_is_whole(function, weights, x, context, tolerance=1e-13):
    """Every gradient, by a forward pass, B and W, each compiled for itself."""
    parts = split(as_layer(function), weights, x, {}, context)
    dy = jnp.cos(x)
    (y, _), _, residuals_b, residuals_w = jit(parts.forward)(weights, x, {}, context)
    dx, _, saved = jit(parts.input_gradient)(weights, {}, context, residuals_b, residuals_w, dy)
    dweights = jit(parts.weight_gradient)({}, context, residuals_w, saved)

    @jit
    def whole(weights, x, context):
        y, pullback = jax.vjp(lambda weights, x: function(weights, x, context), weights, x)
        dweights, dx = pullback(dy)
        return y, dx, dweights

    for got, expected in zip(
        jax.tree.leaves((y, dx, dweights)),
        jax.tree.leaves(whole(weights, x, context)),
        strict=True,
    ):
        assert got.dtype == expected.dtype
        scale = max(np.max(np.abs(expected)), 1e-3)
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * scale)
    shapes = [(leaf.shape, leaf.dtype) for leaf in (*residuals_b, *residuals_w, *saved)]
    lists = parts.residuals_b, parts.residuals_w, parts.saved
    assert shapes == [(s.shape, s.dtype) for values in lists for s in values]
    return parts


@pytest.mark.proof
@pytest.mark.parametrize(
    ("family", "implementation", "remat"),
    [
        ("llama", "blockwise", "none"),
        ("gpt", "reference", "none"),
        ("llama", "reference", "save:query,attention,mlp_up"),
        ("gpt", "blockwise", "save_all_but_attention"),
    ],
)
def test_a_layer(family, implementation, remat):
    policy, model = parse_remat(remat), make_model(family, implementation)
    kernels = rematerialised_attention(model.kernels, policy)
    layer = rematerialised(as_layer(dataclasses.replace(model, kernels=kernels).block), policy)
    assert_split_is_whole(
        lambda weights, x, batch: layer(weights, x, {}, batch)[0][0], *arguments(model)
    )


@pytest.mark.proof
def test_weights_that_w_would_need():
    """The gradient of a normalised weight needs the weight; B has it, W does not."""

    def function(weights, x, context):
        return jnp.tanh(x @ (weights / jnp.linalg.norm(weights)) + context)

    keys = jax.random.split(jax.random.key(0))
    weights, x = (jax.random.normal(key, (8, 8), "float64") for key in keys)
    assert_split_is_whole(function, weights, x, jnp.ones(8))


@pytest.mark.proof
def test_a_loop_that_makes_both_gradients_is_cut():
    """The backward pass of a loop over parts of the input sums the weights' gradient on the way."""

    def function(weights, x, context):
        return jax.lax.map(lambda part: jnp.sin(part @ weights), x)

    weights = jax.random.normal(jax.random.key(0), (8, 8), "float64")
    parts = assert_split_is_whole(function, weights, jnp.ones((3, 4, 8)), None)
    products = jax.make_jaxpr(parts.weight_gradient)({}, None, parts.residuals_w, parts.saved)
    assert "dot_general" in str(products)


def num_bytes(shapes) -> int:
    return sum(s.size * s.dtype.itemsize for s in shapes)


@pytest.mark.proof
@pytest.mark.parametrize("family", MODELS)
def test_nothing_that_is_kept_is_a_weight_or_the_same_for_every_input(family):
    """Twice the batch, twice the bytes, to the byte; what B saves also has sums for
    scales and biases."""
    model, kept, saved = make_model(family, "blockwise"), [], []
    for batch_size in (3, 6):
        weights, x, batch = arguments(model, batch_size)
        parts = split(as_layer(model.block), weights, x, {}, batch)
        kept.append(num_bytes(parts.residuals_b) + num_bytes(parts.residuals_w))
        saved.append(num_bytes(s for s in parts.saved if s.shape[0] == batch_size))
    assert kept[1] == 2 * kept[0]
    assert saved[1] == 2 * saved[0]


@pytest.mark.compiles
@pytest.mark.proof
def test_both_halves_are_about_as_long_as_the_forward_pass():
    model = make_model("llama", "reference", d_model=128)
    weights, x, batch = jax.eval_shape(lambda: arguments(model, seq_len=64))
    parts = split(as_layer(model.block), weights, x, {}, batch)
    forward, b, w = (
        dict(jax.jit(run).lower(*args).compile().cost_analysis() or {})["flops"]
        for run, args in (
            (parts.forward, (weights, x, {}, batch)),
            (parts.input_gradient, (weights, {}, batch, parts.residuals_b, parts.residuals_w, x)),
            (parts.weight_gradient, ({}, batch, parts.residuals_w, parts.saved)),
        )
    )
    assert b == pytest.approx(forward, rel=0.25)
    assert w == pytest.approx(forward, rel=0.25)
