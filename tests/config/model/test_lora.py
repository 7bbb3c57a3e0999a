"""The settings of low-rank adapters, and which parameters they freeze."""

import dataclasses
import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config import Config
from jaxscale.config.model import ModelConfig
from jaxscale.config.optimizer import OptimizerConfig, ParamGroup
from jaxscale.config.read_config import read_settings
from jaxscale.models.adapters.lora import (
    is_adapter,
    merge_adapters,
    with_token_rows,
    without_adapters,
)
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.planner.memory.at_rest import check_param_groups
from jaxscale.run.pretrained import Pretrained
from jaxscale.sharding.resolve import leaf_name
from jaxscale.training.optimizer import frozen_params

EXPERTS = {"family": "mixtral", "num_experts": 4}
LATENT = {"family": "deepseek_v3", "kv_rank": 8, "rope_head_dim": 4, "num_experts": 0}
LATENT |= {"dense_layers": 0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": -1}, "model.lora_rank = -1 is too small; at least 0"),
        ({"lora_rank": 4, "lora_alpha": 0.0}, "model.lora_alpha = 0.0 must be above 0"),
        ({"lora_targets": "q"}, "with model.lora_rank = 0 (no adapters); set model.lora_r"),
        ({"lora_tokens": "3"}, "model.lora_tokens = '3' with model.lora_rank = 0 (no adapters)"),
        ({"lora_rank": 4, "lora_tokens": "250-257"}, "names token 257; at most 256"),
        ({"lora_rank": 4, "lora_tokens": "9-7"}, "'9-7' is not a token's id or a range of ids"),
        ({"lora_rank": 4, "lora_tokens": "7,5-8"}, "model.lora_tokens = '7,5-8' names a token tw"),
        ({"lora_rank": 4, "lora_targets": "q,q_proj"}, "model.lora_targets = 'q_proj'"),
        ({"lora_rank": 4, "lora_targets": "q,v,q"}, "'q,v,q' names a weight twice"),
        ({"lora_rank": 4, "lora_targets": "gate", "family": "gpt"}, "model.lora_targets = 'gate'"),
        (
            {"lora_rank": 4, "lora_targets": "v,q", **LATENT},
            "model.lora_targets = 'q' is not known; it can be q_plain, q_turned, kv_down, ",
        ),
        (
            {"lora_rank": 4, "lora_targets": "q_down", **LATENT},  # not compressed
            "model.lora_targets = 'q_down' is not known; it can be q_plain, q_turned, kv_down",
        ),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "q k v out up gate down"),
        ({"family": "gpt"}, "q k v out up down"),
        (EXPERTS, "q k v out"),
        ({"lora_targets": "down,q,up", **EXPERTS}, "q up down"),
        (LATENT, "q_plain q_turned kv_down k_turned k_plain v out up gate down"),
        ({"lora_targets": "v,q_down", "query_rank": 8, **LATENT}, "q_down v"),
        ({"lora_targets": "v, q,down"}, "q v down"),
        ({"lora_rank": 0}, ""),
    ],
)
def test_what_has_an_adapter(settings, expected):
    assert ModelConfig(**{"lora_rank": 4, **settings}).adapted_weights == tuple(expected.split())


@pytest.mark.proof
def test_a_model_has_the_weights_that_it_has_without_adapters_and_freezes_them():
    """And so does one whose routers would be balanced."""
    settings = {"num_experts": 4, "dense_layers": 1, "num_layers": 3, "num_kv_heads": 2}
    for router in ({}, {"router_bias": True, "balance_rate": 0.1}):
        given = {"family": "tests.models.experts:make", **settings, **router}
        plain, adapted = (
            Decoder(ModelConfig(**given, lora_rank=rank, param_dtype="float32"), plain_kernels())
            for rank in (0, 4)
        )
        params, more = (jax.jit(one.init)(jax.random.key(0)) for one in (plain, adapted))
        jax.tree.map(np.testing.assert_array_equal, without_adapters(more), params)
        names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(more)]
        assert {*adapted.frozen} == {name for name in names if not is_adapter(name)}
        assert sum(map(is_adapter, names)) == 2 * 2 * 4  # of two stacks
        assert adapted.adjust is None


def test_groups_of_the_optimizer_are_for_adapters():
    """For the planner as for the engine."""
    model = ModelConfig(lora_rank=4)
    decoder = Decoder(model, plain_kernels())
    for pattern, refused in (("layers/mlp/up", True), ("layers/mlp/*", False), ("*_lora/b", False)):
        groups = (ParamGroup(pattern, learning_rate_scale=16.0),)
        config = Config(model=model, optimizer=OptimizerConfig(groups=groups))
        with pytest.raises(ValueError, match="updates or freezes") if refused else nullcontext():
            check_param_groups(config.model, config.optimizer.groups)
        with pytest.raises(ValueError, match="updates or freezes") if refused else nullcontext():
            frozen_params(groups, decoder.axes, decoder.frozen)


@pytest.mark.proof
def test_adapters_are_not_narrower_than_float32_and_frozen_weights_as_narrow_as_matmuls():
    config = ModelConfig(lora_rank=4, lora_tokens="3")
    assert read_settings(config)["param_dtype"] == config.param_dtype == "bfloat16"
    assert (
        read_settings(ModelConfig(lora_rank=4, param_dtype="float32"))["param_dtype"] == "float32"
    )
    assert read_settings(ModelConfig(param_dtype="bfloat16"))["param_dtype"] == "bfloat16"
    assert "param_dtype" not in read_settings(ModelConfig())  # which adapters may change
    model = Decoder(config, plain_kernels())
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        assert leaf.dtype == ("float32" if is_adapter(leaf_name(path)) else "bfloat16")


@pytest.mark.proof
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_tokens_are_added_wherever_a_table_is_read(tied):
    """Moved from the frozen tables or merged into them they compute the same."""
    settings = {"lora_rank": 4, "lora_tokens": "9,3-4", "tied_embeddings": tied}
    config = ModelConfig(**settings, vocab_size=128, compute_dtype="float32", num_layers=1)
    model, rng = Decoder(config, plain_kernels()), np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: 0.1 * jnp.asarray(rng.normal(size=x.shape), x.dtype),
        jax.eval_shape(model.init, jax.random.key(0)),
    )
    tokens = [[3, 5, 9, 4]]
    before = Pretrained(config, params, model)(tokens)
    moved = with_token_rows(config, jax.tree.map(jnp.copy, params))
    assert not moved["embed"]["tokens"][jnp.asarray([9, 3, 4])].any()
    plain = dataclasses.replace(config, lora_rank=0, lora_tokens="")
    merged = merge_adapters(config, jax.tree.map(jnp.copy, params))
    whole = Pretrained(plain, merged, Decoder(plain, plain_kernels()))(tokens)
    np.testing.assert_allclose(Pretrained(config, moved, model)(tokens), before, atol=1e-5)
    np.testing.assert_allclose(whole, before, atol=1e-5)
    none = jax.tree.map(jnp.zeros_like, params["embed"]["tokens_lora"])
    bare = {**params, "embed": {**params["embed"], "tokens_lora": none}}
    changed = Pretrained(config, bare, model)(tokens) - before
    assert np.abs(changed[0, 0, [3, 4, 9]]).min() > 1e-3
