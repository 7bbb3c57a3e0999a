"""Traces of models: their parameters, for the planner."""

import jax
import pytest

from jaxscale.config.model import ModelConfig
from jaxscale.models.decoder import plain_kernels
from jaxscale.sharding.resolve import is_axes, leaf_name
from jaxscale.training.tracing.abstract_model import find_model
from jaxscale.training.tracing.trace_model import trace_model
from tests.models.two_stacks import TwoStacksSettings

DEEPSEEK = ModelConfig(
    family="deepseek_v3",
    num_layers=3,
    num_kv_heads=4,
    dense_layers=1,
    num_experts=8,
    experts_per_token=2,
    router_groups=1,
    router_groups_kept=1,
    kv_rank=24,
    query_rank=40,
    rope_head_dim=4,
    value_head_dim=12,
    expert_d_ff=48,
    shared_d_ff=32,
    prediction_depth=2,
)
MODELS = {
    "adapters of both stacks": ModelConfig(
        family="mt5", num_encoder_layers=2, lora_rank=6, lora_tokens="3"
    ),
    "experts in every second layer": ModelConfig(
        family="qwen3_moe", num_layers=5, dense_layers=1, num_experts=16, expert_pattern="DE"
    ),
    "latent attention, experts, and modules for further tokens": DEEPSEEK,
    "a custom model": TwoStacksSettings(family="tests.models.two_stacks:TwoStacks"),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_models(name):
    model = find_model(MODELS[name])(MODELS[name], plain_kernels())
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    axes = jax.tree.leaves(model.axes, is_leaf=is_axes)
    trace, expected = trace_model(MODELS[name]), {}
    for (path, leaf), names in zip(jax.tree_util.tree_leaves_with_path(shapes), axes, strict=True):
        first = int(names[0] == "layers")
        expected[leaf_name(path)] = names[first:], leaf.shape[first:], str(leaf.dtype)
    assert {one.path: (one.axes, one.shape, one.dtype) for one in trace.parameters} == expected
    assert trace.num_params == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert trace.stack_layers == {one.name: one.num_layers for one in model.stacks}
    assert {one.path for one in trace.parameters if one.frozen} == set(model.frozen)


def test_layers_with_experts_are_found():
    alternating = trace_model(MODELS["experts in every second layer"])
    assert alternating.experts_of("dense_layers") == (False,)
    assert alternating.experts_of("expert_layers") == (False, True)
    assert trace_model(DEEPSEEK).experts_of("prediction") == (True,)


def test_axes_of_a_custom_model_are_sharded_by_its_rules():
    trace = trace_model(MODELS["a custom model"])
    found = {one.path: one for one in trace.parameters}
    assert trace.borrowed == ("embed/tokens",)
    assert not trace.adjusts
    assert found["writers/turn"].own_rules == (("own", ("tensor",)),)
