"""Modules that predict further tokens against their definition, document by document, in float64;
and what is left of them outside a step: nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.forward import forward
from jaxscale.models.prediction import with_further_targets
from jaxscale.models.protocol import head_params
from jaxscale.training.tracing.traces import model_trace

SIZES = {"num_layers": 1, "d_model": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
SIZES |= {"d_ff": 24, "vocab_size": 40}
FLOAT64 = {"compute_dtype": "float64", "param_dtype": "float64"}
DEPTH, WEIGHT = 2, 0.7
WITHOUT = ModelConfig(family="tests.models.experts:make", z_loss=1e-2, **SIZES, **FLOAT64)
CONFIG = dataclasses.replace(WITHOUT, prediction_depth=DEPTH, prediction_weight=WEIGHT)
DOCUMENTS = [(0, 0, 7), (0, 7, 12), (1, 0, 2), (1, 2, 9)]
"""Row, begin, end; the second row ends with padding."""
EQUAL = [(0, 0, 6), (0, 6, 12), (1, 0, 6)]


def make_batch(documents: list[tuple[int, int, int]]) -> Batch:
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, SIZES["vocab_size"], (2, 2, 12), np.int32)
    segments, positions = np.zeros((2, 2, 12), np.int32)
    weights = np.zeros((2, 12), np.float32)
    for number, (row, begin, end) in enumerate(documents, 1):
        here = row, slice(begin, end)
        segments[here], positions[here] = number, np.arange(end - begin)
        targets[row, begin : end - 1] = tokens[row, begin + 1 : end]
        weights[here] = rng.integers(0, 2, end - begin)
    return Batch(tokens, targets, segments, positions, weights)


def norm(x, scale):
    eps = CONFIG.norm_eps
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * scale["scale"]


def definition(params, text, weights):
    """Of one document, the losses of arXiv 2412.19437, section 2.2, by its formulas 21 to 25.

    Args:
      text: its tokens, and the one that follows them.
      weights: of each token's successor.
    """
    model, length = Decoder(WITHOUT, plain_kernels()), len(text) - 1
    embed, losses = params["embed"], []

    def block(weights, x):
        ones = np.ones((1, len(x)), np.int32)
        one = Batch(ones, ones, ones, np.arange(len(x), dtype=np.int32)[None], ones)
        return model.block(weights, x[None], one)[0]

    def add_loss(h, targets, weights):
        scores = h @ params["head"]["output"][:, : CONFIG.vocab_size]
        log_z = jax.nn.logsumexp(scores, axis=-1)
        nll = log_z - jnp.take_along_axis(scores, targets[:, None], axis=1)[:, 0]
        losses.append(jnp.stack([nll + CONFIG.z_loss * log_z**2, nll]) @ weights)

    h = block(jax.tree.map(lambda x: x[0], params["layers"]), embed["tokens"][text[:-1]])
    h = norm(h, embed["final_norm"])
    add_loss(h, text[1:], weights)
    for k in range(1, 1 + DEPTH):
        module = jax.tree.map(lambda x, k=k: x[k - 1], params["prediction"])
        merge = module.pop("merge")
        inputs = norm(h[: length - k], merge["hidden_norm"])
        ahead = norm(embed["tokens"][text[k:length]], merge["embedding_norm"])
        both = jnp.concatenate([inputs, ahead], axis=-1)
        h = block(module, both @ jnp.concatenate([merge["hidden"], merge["embedding"]]))
        h = norm(h, merge["output_norm"])
        add_loss(h, text[k + 1 :], weights[k:])
    return jnp.stack(losses)


@pytest.mark.proof
def test_losses_and_gradients_are_their_definition():
    model = Decoder(CONFIG, plain_kernels())
    batch = make_batch(EQUAL)
    prepared = with_further_targets(batch, DEPTH)
    shapes, rng = jax.eval_shape(model.init, jax.random.key(0)), np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: 0.3 * rng.normal(size=leaf.shape), shapes)

    def ours(params):
        stream = forward(model, params, prepared)
        losses = model.loss(head_params(model, params), stream, prepared)
        return losses.pop("loss"), losses

    def theirs(params):
        texts = [
            np.append(batch.tokens[row, begin:end], batch.targets[row, end - 1])
            for row, begin, end in EQUAL
        ]
        weights = [batch.weights[row, begin:end] for row, begin, end in EQUAL]
        each = jax.vmap(definition, (None, 0, 0))(params, np.stack(texts), np.stack(weights))
        (loss, nll), *modules = each.sum(axis=0)
        others = {f"prediction_loss_{k}": nll for k, (_, nll) in enumerate(modules, 1)}
        loss += WEIGHT / DEPTH * sum(one for one, _ in modules)
        return loss, {"nll": nll, **others}

    each = [jax.value_and_grad(one, has_aux=True) for one in (ours, theirs)]
    got, wanted = jax.jit(lambda params: [one(params) for one in each])(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), got, wanted)
    assert np.abs(got[1]["embed"]["final_norm"]["scale"]).min() > 0


def test_no_target_is_of_another_document():
    batch = with_further_targets(make_batch(DOCUMENTS), DEPTH)
    for row, begin, end in DOCUMENTS:
        for k in range(1, 1 + DEPTH):
            last = max(end - k, begin)
            here, there = (row, slice(begin, last)), (row, slice(begin + k, end))
            if last > begin:
                np.testing.assert_array_equal(
                    batch.extras[f"targets_{k}"][here], batch.targets[there]
                )
                np.testing.assert_array_equal(
                    batch.extras[f"weights_{k}"][here], batch.weights[there]
                )
            assert not batch.extras[f"weights_{k}"][row, last:end].any()


@pytest.mark.proof
def test_it_begins_and_is_evaluated_as_the_model_without_modules():
    """Also in the rows of a pipeline as in its layers, and with alternating MoE layers."""
    alternating = {"num_experts": 2, "expert_pattern": "DE", "num_layers": 4, "d_ff": 8}
    small, large = (
        Decoder(dataclasses.replace(config, **alternating), plain_kernels())
        for config in (WITHOUT, CONFIG)
    )
    rows = {"layers": np.array([1, -1, 0]), "prediction": np.array([-1, 1, 0])}
    makes = (small.init, large.init, lambda key: large.init(key, rows))
    made = jax.jit(lambda key: [make(key) for make in makes])(jax.random.key(0))
    without, params, placed = jax.device_get(made)

    for name, chosen in rows.items():
        for found, wanted in zip(jax.tree.leaves(placed[name]), jax.tree.leaves(params[name])):
            assert not np.any(found[chosen < 0])
            np.testing.assert_array_equal(found[chosen >= 0], wanted[chosen[chosen >= 0]])
    up = params["layers"]["layer_1"]["mlp"]["up"]
    assert up.shape == (2, 2, 16, 8)
    queries = [params["layers"][f"layer_{i}"]["attention"]["q"] for i in (0, 1)]
    assert np.abs(queries[0] - queries[1]).min() > 0

    final = without["head"]["norm"]["scale"] = np.linspace(0.5, 2, 16)
    params["embed"]["final_norm"]["scale"] = final
    own = {**params, "embed": {"tokens": params["embed"]["tokens"]}}
    assert own.pop("prediction")["merge"]["hidden"].shape == (DEPTH, 16, 16)
    own["head"] = {**params["head"], "norm": {"scale": final}}
    jax.tree.map(np.testing.assert_array_equal, own, without)

    def logits(model, params):
        stream = forward(model, params, make_batch(DOCUMENTS))
        return model.logits(head_params(model, params), stream["x"])

    found = jax.jit(lambda *p: (logits(large.evaluated, p[0]), logits(small, p[1])))
    np.testing.assert_array_equal(*found(params, without))
    assert large.evaluated.metrics == small.metrics == ()


@pytest.mark.proof
def test_parameters_are_counted():
    """Of the published model, with a module of 11.6 billion parameters."""
    sizes = {"num_layers": 61, "d_model": 7168, "num_heads": 128, "num_kv_heads": 128}
    sizes |= {"head_dim": 192, "d_ff": 18432, "vocab_size": 129280, "kv_rank": 512}
    sizes |= {"query_rank": 1536, "rope_head_dim": 64, "value_head_dim": 128, "dense_layers": 3}
    sizes |= {"expert_d_ff": 2048, "shared_d_ff": 2048, "prediction_depth": 1}
    published = ModelConfig(family="deepseek_v3", **sizes)
    assert model_trace(published).num_params - 671_026_419_200 == 11_610_068_224
