"""Latent attention against its definition, and the two epsilons of a model with it."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.forward import forward
from jaxscale.models.protocol import head_params

CONFIG = ModelConfig(
    family="deepseek_v3",
    num_layers=2,
    d_model=16,
    num_heads=2,
    num_kv_heads=2,
    head_dim=10,
    d_ff=24,
    vocab_size=40,
    kv_rank=6,
    query_rank=8,
    rope_head_dim=4,
    value_head_dim=5,
    num_experts=0,
    dense_layers=0,
    compute_dtype="float64",
    param_dtype="float64",
)
TOKENS = np.random.default_rng(0).integers(0, 40, 7).astype(np.int32)


def norm(x, scale, eps):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * scale


def rotated(x):
    """Features [T, ..., R]; feature i of the first half is paired with i of the second."""
    half = CONFIG.rope_head_dim // 2
    frequencies = CONFIG.rope_theta ** (-np.arange(half) / half)
    angles = np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) * frequencies
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
    )


def attention(weights, x, inner_eps):
    """Of the tokens x [T, D], by arXiv 2405.04434, section 2.1, head by head."""
    queries = norm(x @ weights["q_down"], weights["q_scale"], inner_eps)
    keys = norm(x @ weights["kv_down"], weights["kv_scale"], inner_eps)
    shared = rotated(x @ weights["k_turned"].reshape(len(x[0]), -1))
    out = 0
    for n in range(CONFIG.num_heads):
        turned = rotated(queries @ weights["q_turned"][:, n].reshape(CONFIG.query_rank, -1))
        q = np.concatenate([queries @ weights["q_plain"][:, n], turned], -1)
        k = np.concatenate([keys @ weights["k_plain"][:, n], shared], -1)
        scores = np.where(np.tri(len(x)), q @ k.T / np.sqrt(CONFIG.head_dim), -np.inf)
        shares = np.exp(scores - scores.max(1, keepdims=True))
        values = keys @ weights["v"][:, n]
        out += shares / shares.sum(1, keepdims=True) @ values @ weights["out"][n]
    return out


def definition(params, eps, inner_eps):
    """The logits of `TOKENS`."""
    x = params["embed"]["tokens"][TOKENS]
    for i in range(CONFIG.num_layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        inputs = norm(x, layer["attention_norm"]["scale"], eps)
        x = x + attention(layer["attention"], inputs, inner_eps)
        mlp, inputs = layer["mlp"], norm(x, layer["mlp_norm"]["scale"], eps)
        gate = inputs @ mlp["gate"]
        x = x + gate / (1 + np.exp(-gate)) * (inputs @ mlp["up"]) @ mlp["down"]
    x = norm(x, params["head"]["norm"]["scale"], eps)
    return (x @ params["head"]["output"])[:, : CONFIG.vocab_size]


@functools.cache
def first_params():
    """Of any epsilon."""
    return jax.jit(Decoder(CONFIG, plain_kernels()).init)(jax.random.key(0))


@pytest.mark.proof(but=("1e-05",))
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_the_norms_inside_have_a_separate_epsilon(eps):
    """As in transformers, where Moonlight's rms_norm_eps = 1e-5 is not theirs. What is normed is so
    small that either epsilon is a part of the result."""
    config = dataclasses.replace(CONFIG, norm_eps=eps)
    model = Decoder(config, plain_kernels())
    params = jax.tree.map(np.array, first_params())
    params["embed"]["tokens"] *= 3e-3 / params["embed"]["tokens"].std()
    for name in ("q_down", "kv_down"):
        params["layers"]["attention"][name] *= 3e-3
    ones, places = np.ones((1, len(TOKENS)), np.int32), np.arange(len(TOKENS), dtype=np.int32)
    batch = Batch(TOKENS[None], TOKENS[None], ones, places[None], ones)

    @jax.jit
    def logits_of(params):
        return model.logits(head_params(model, params), forward(model, params, batch)["x"])

    logits = np.asarray(logits_of(params))[0, :, : CONFIG.vocab_size]
    np.testing.assert_allclose(logits, definition(params, eps, 1e-6), rtol=0, atol=1e-10)
    for other in ((10 * eps, 1e-6), (eps, 1e-5)):
        assert np.abs(logits - definition(params, *other)).max() > 1e-3
