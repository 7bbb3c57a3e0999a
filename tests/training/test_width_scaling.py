"""muP: rates and initial values of table 3 of arXiv 2203.03466, from logical axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxscale
from jaxscale.config.model import ModelConfig
from jaxscale.config.optimizer import OPTIMIZERS, OptimizerConfig
from jaxscale.config.width_scaling import (
    check_growing_axes,
    initial_factor,
    rate_factor,
)
from jaxscale.models.decoder import plain_kernels
from jaxscale.models.weights import scale_initial
from jaxscale.sharding.resolve import is_axes, leaf_name
from jaxscale.training import optimizer as optim
from jaxscale.training.tracing.abstract_model import find_model
from tests.training.test_optimizer import SIZES

RATIO = 4.0
HIDDEN, OUTPUT, INPUT, VECTOR = (1 / 4, 1.0), (1 / 4, 1 / 2), (1.0, 2.0), (1.0, 1.0)
"""Factors of the rate and of the initial standard deviation at four times the base's width."""

LATENT = {
    "family": "deepseek_v3",
    "num_experts": 4,
    "experts_per_token": 2,
    "dense_layers": 1,
    "router_groups": 1,
    "router_groups_kept": 1,
    "query_rank": 16,
    "prediction_depth": 1,
}


@functools.cache
def make_model(width=64, **settings):
    config = ModelConfig(d_model=width, num_heads=width // 16, num_kv_heads=width // 16, **settings)
    return find_model(config)(config, plain_kernels())


def by_name(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_axes)
    return {leaf_name(path): leaf for path, leaf in leaves}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"family": "qwen2"},
            {
                "embed/tokens": INPUT,
                "layers/attention/q": HIDDEN,
                "layers/attention/k": HIDDEN,
                "layers/attention/q_bias": VECTOR,
                "layers/attention/out": HIDDEN,
                "layers/attention_norm/scale": VECTOR,
                "layers/mlp/up": HIDDEN,
                "layers/mlp/down": HIDDEN,
                "head/norm/scale": VECTOR,
                "head/output": OUTPUT,
            },
        ),
        (
            LATENT,
            {
                "expert_layers/attention/q_down": HIDDEN,
                "expert_layers/attention/q_scale": VECTOR,
                "expert_layers/attention/q_plain": HIDDEN,
                "expert_layers/attention/k_turned": OUTPUT,
                "expert_layers/attention/v": HIDDEN,
                "expert_layers/mlp/router": OUTPUT,
                "expert_layers/mlp/router_bias": VECTOR,
                "expert_layers/mlp/up": HIDDEN,
                "expert_layers/mlp/down": HIDDEN,
                "expert_layers/mlp/shared/down": HIDDEN,
                "prediction/merge/hidden": HIDDEN,
            },
        ),
        ({"family": "gpt", "tied_embeddings": False}, {"embed/positions": INPUT}),
    ],
    ids=["qwen2", "deepseek_v3", "gpt"],
)
def test_factors_follow_from_logical_axes(settings, expected):
    axes = by_name(make_model(**settings).axes)
    check_growing_axes(axes.items())
    for name, factors in expected.items():
        names = axes[name]
        assert (rate_factor(names, "adamw", RATIO), initial_factor(names, RATIO)) == factors, name


def test_initial_values_are_scaled_in_their_own_type_and_not_at_the_base():
    axes = {"embed": ("vocab", "embed"), "up": ("embed", "mlp"), "output": ("embed", "vocab")}
    drawn = {name: jnp.ones((2, 2), jnp.bfloat16) for name in axes}
    scaled = scale_initial(drawn, axes, RATIO)
    assert {name: (float(x[0, 0]), x.dtype) for name, x in scaled.items()} == {
        "embed": (2.0, jnp.bfloat16),
        "up": (1.0, jnp.bfloat16),
        "output": (0.5, jnp.bfloat16),
    }
    assert scale_initial(drawn, axes, 1.0) is drawn


SMALL = {
    "embed": {"tokens": ("vocab", "embed"), "positions": ("positions", "embed")},
    "layers": {"mlp": {"up": ("layers", "embed", "mlp"), "up_bias": ("layers", "mlp")}},
    "head": {"output": ("embed", "vocab")},
}


@pytest.mark.proof(but=("muon",))
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_a_step_has_the_factors_of_rates_and_decays_as_without(rule):
    """The update without its decay is the rule's times the factor; of Muon's matrices of the layers
    times its root."""
    params, gradients = (
        jax.tree.map(
            lambda names, seed=seed: jnp.asarray(
                np.random.default_rng(seed).normal(size=[SIZES[name] for name in names])
            ),
            SMALL,
            is_leaf=is_axes,
        )
        for seed in (0, 1)
    )

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def change(ratio, decay):
        settings = OptimizerConfig(rule, schedule="constant", weight_decay=decay)
        made = optim.make(settings, steps=3, axes=SMALL, width_ratio=ratio)
        return made.update(gradients, made.init(params), params)[0]

    plain, decayed, scaled = (
        by_name(change(*case)) for case in ((1.0, 0.0), (1.0, 0.5), (RATIO, 0.5))
    )
    root = {"layers/mlp/up": 1 / 2} if rule == "muon" else {}
    factors = {"layers/mlp/up": 1 / 4, "head/output": 1 / 4} | root
    for name in by_name(SMALL):
        expected = factors.get(name, 1.0) * plain[name] + (decayed[name] - plain[name])
        np.testing.assert_allclose(scaled[name], expected, rtol=1e-6, atol=1e-9, err_msg=name)


def open_engine(*overrides, **given):
    config = jaxscale.load("tiny", ["layout.data=1", *overrides])
    mesh = jaxscale.make_mesh(config.layout, jax.devices()[:1])
    return jaxscale.make_engine(config, mesh, **given)


def test_the_step_at_the_base_width_is_the_step_without():
    """Of `init` and `step`, to the operation."""
    texts = []
    for base in (0, 64, 32):
        engine = open_engine(f"optimizer.mup_base_width={base}")
        step = engine.step.lower(engine.abstract_state, engine.abstract_batch)
        texts.append((engine.init.lower(jax.random.key(0)).as_text(), step.as_text()))
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[2][0]
    assert texts[0][1] != texts[2][1]


def test_what_the_table_does_not_cover_is_refused():
    with pytest.raises(ValueError, match="head/output has the custom logical axis 'labels', which"):
        check_growing_axes([("head/norm", ("branches",)), ("head/output", ("embed", "labels"))])
    with pytest.raises(ValueError, match="mup_base_width = 32 scales the rates of conf"):
        open_engine("optimizer.mup_base_width=32", optimizer=optax.adam(1e-3))
