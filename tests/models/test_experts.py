"""Layers with experts against their definition: loads, auxiliary losses, biases, padding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.experts import Experts, expert_metrics
from jaxscale.models.protocol import Layer
from jaxscale.models.weights import Weights, module_of
from jaxscale.ops.experts.dispatch import Dispatch
from tests.models import experts

SIZES = {"d_model": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "d_ff": 8}
FLOAT64 = {"compute_dtype": "float64", "param_dtype": "float64", "vocab_size": 32}
CONFIG = ModelConfig(family="tests.models.experts:make", **SIZES, **FLOAT64, **experts.EVERYTHING)
B, T = 2, 12


@functools.cache
def model_and_params():
    model = Decoder(CONFIG, plain_kernels())
    return model, jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0)))


@functools.cache
def layer():
    """One of the layers with experts, an input with padding, and what the layer gives; and the
    function of parameters and input that gives it."""
    model, params = model_and_params()
    params = jax.tree.map(lambda x: x[1], params["expert_layers"])
    rng = np.random.default_rng(0)
    segments = np.ones((B, T), np.int32)
    segments[0, 7:] = 0
    tokens, places = np.zeros((B, T), np.int32), np.tile(np.arange(T, dtype=np.int32), (B, 1))
    weights = rng.integers(0, 2, (B, T)).astype(np.float32) * (segments != 0)
    batch = Batch(tokens, tokens, segments, places, weights)
    x, block = rng.normal(size=(B, T, CONFIG.d_model)), model.stacks[1].block
    run = jax.jit(lambda params, x: block(params, {"x": x}, batch, Layer(1, 0)))
    out, sums = run(params, x)
    return params, x, batch, out["x"], sums, run


def silu(x):
    return x / (1 + np.exp(-x))


def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + CONFIG.norm_eps) * scale


@pytest.mark.proof
def test_a_layer_is_its_definition():
    """Token by token, in NumPy: the experts chosen, what they add, the loads and the losses."""
    params, x, batch, out, sums, _ = layer()
    mlp, router = jax.tree.map(np.asarray, params["mlp"]), np.asarray(params["mlp"]["router"])
    # What enters the experts: the stream after attention, which the layer adds to.
    wanted, load = np.zeros(out.shape), np.zeros(CONFIG.num_experts)
    after = after_attention(params, x)
    inputs = norm(after, np.asarray(params["mlp_norm"]["scale"]))
    loss = 0.0
    for row in range(B):
        share, scores_sum, valid = np.zeros(CONFIG.num_experts), 0.0, batch.segments[row] != 0
        for token in range(T):
            logits = inputs[row, token] @ router
            scores = 1 / (1 + np.exp(-logits))
            ranked = scores + mlp["router_bias"]
            groups = ranked.reshape(CONFIG.router_groups, -1)
            best = np.argsort(-np.sort(groups, 1)[:, -2:].sum(1), kind="stable")
            kept = np.repeat(np.isin(np.arange(CONFIG.router_groups), best[:3]), 2)
            chosen = np.argsort(-np.where(kept, ranked, -np.inf), kind="stable")[:3]
            gates = scores[chosen] / scores[chosen].sum() * CONFIG.router_scale
            h = inputs[row, token]
            shared = mlp["shared"]
            added = (silu(h @ shared["gate"]) * (h @ shared["up"])) @ shared["down"]
            if valid[token]:
                load[chosen] += 1
                # What is balanced are the best scores, whatever bias and groups let it choose.
                share[np.argsort(-scores, kind="stable")[:3]] += 1
                scores_sum += scores / scores.sum()
                z = np.log(np.exp(logits).sum()) ** 2
                loss += CONFIG.router_z_loss * z * batch.weights[row, token]
                for expert, gate in zip(chosen, gates):
                    hidden = silu(h @ mlp["gate"][expert]) * (h @ mlp["up"][expert])
                    added = added + gate * (hidden @ mlp["down"][expert])
            wanted[row, token] = after[row, token] + added
        uneven = CONFIG.num_experts * np.sum(share / share.sum() * scores_sum / valid.sum())
        loss += CONFIG.balance_weight * uneven * batch.weights[row].sum()
    np.testing.assert_allclose(out, wanted, atol=1e-12)
    np.testing.assert_array_equal(sums["load"], load)
    np.testing.assert_allclose(sums["loss"], loss, rtol=1e-6)  # counts are float32


def after_attention(params, x):
    """The stream with the layer's attention: that of the layer with experts that add nothing."""
    *_, run = layer()
    silent = jax.tree.map(np.zeros_like, params["mlp"])
    return np.asarray(run({**params, "mlp": silent}, x)[0]["x"])


@pytest.mark.proof
def test_halves_of_a_micro_batch_are_the_whole():
    """Of three sequences of each of two ranks, with padding: every result and every gradient."""
    rng = np.random.default_rng(1)
    rows, params = 3 * 2, layer()[0]["mlp"]
    x, weights = rng.normal(size=(rows, T, CONFIG.d_model)), rng.random((rows, T))
    segments = np.ones((rows, T), np.int32)
    segments[1, 5:] = 0
    batch = Batch(segments, segments, segments, segments, weights)

    def grads(halves, params, x, batch):
        kernels = dataclasses.replace(plain_kernels(), dispatch=Dispatch(2, halves=halves))

        def loss(params, x):
            experts = module_of(lambda *args: Experts(CONFIG, Weights(*args)), CONFIG, params)
            out, sums = experts.feed(x, batch, kernels)
            return jnp.sum(jnp.sin(out)) + sums["loss"], (out, sums)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)

    def local(*arguments):
        both = grads(True, *arguments), grads(False, *arguments)
        return jax.tree.map(lambda leaf: leaf[None], both)

    mine, everybodys = PartitionSpec("expert"), PartitionSpec()
    specs = dict.fromkeys(params, everybodys) | dict.fromkeys(("up", "gate", "down"), mine)
    run = jax.shard_map(
        local,
        mesh=Mesh(jax.devices()[:2], ("expert",)),
        in_specs=(specs, mine, mine),
        out_specs=mine,
        check_vma=False,
    )
    split, together = jax.jit(run)(params, x, batch)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12), split, together)


@pytest.mark.proof
def test_a_bias_falls_where_more_tokens_came_than_the_mean():
    model, params = model_and_params()
    load = jnp.tile(jnp.array([6.0, 2.0, 4, 4, 4, 4, 4, 4]), (4, 1))
    sums = {"expert_layers/load": load}
    before = params["expert_layers"]["mlp"]["router_bias"]
    after = model.adjust(params, sums)["expert_layers"]["mlp"]["router_bias"]
    moved = np.asarray(after - before)[0]
    np.testing.assert_allclose(moved, [-0.01, 0.01, 0, 0, 0, 0, 0, 0], atol=1e-12)
    assert model.frozen == ("expert_layers/mlp/router_bias",)


def test_metrics_of_a_layer():
    sums = {"layers/load": jnp.array([[2.0, 2, 2, 2], [8, 0, 0, 0]])}
    sums["layers/dropped"] = jnp.array([0.0, 6.0])
    found = expert_metrics(sums)
    np.testing.assert_allclose(found["expert_load_cv"], [0, np.sqrt(3)], rtol=1e-6)
    np.testing.assert_allclose(found["dead_experts"], [0, 0.75])
    np.testing.assert_allclose(found["dropped_choices"], [0, 0.75])
