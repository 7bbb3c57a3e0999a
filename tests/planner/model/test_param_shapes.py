"""The planner's shapes are the model's."""

import jax
import pytest

from jaxscale.config.model import ModelConfig
from jaxscale.model_families.shipped import PLANNED
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.encoder_decoder import EncoderDecoder
from jaxscale.planner.model.param_shapes import parameters, stack_sizes
from jaxscale.sharding.resolve import is_axes, leaf_name

MODELS = {
    "llama": ModelConfig(num_kv_heads=2),
    "qk_norm": ModelConfig(qk_norm=True, vocab_size=300),
    "tied": ModelConfig(tied_embeddings=True),
    "gpt": ModelConfig(family="gpt", max_seq_len=24),
    "biases": ModelConfig(attention_bias="all", mlp_bias=True),
} | {
    family.name: ModelConfig(family=family.name, num_kv_heads=2)
    for family in PLANNED
    if family.name not in ("llama", "gpt")
}
MODELS |= {
    "adapters": ModelConfig(num_kv_heads=2, lora_rank=6, lora_tokens="7,40-42"),
    "adapters of a few weights": ModelConfig(family="gpt", lora_rank=6, lora_targets="v,up,down"),
    "adapters beside experts": ModelConfig(family="mixtral", num_experts=4, lora_rank=6),
    "adapters of both stacks": ModelConfig(
        family="mt5", num_encoder_layers=2, lora_rank=6, lora_tokens="3"
    ),
}
MODELS |= {
    family: ModelConfig(family=family, num_layers=3, num_encoder_layers=2)
    for family in ("mt5", "umt5")
}
LATENT = {
    "num_kv_heads": 4,
    "num_layers": 3,
    "dense_layers": 1,
    "num_experts": 8,
    "experts_per_token": 2,
    "router_groups": 1,
    "router_groups_kept": 1,
    "kv_rank": 24,
    "query_rank": 40,
    "rope_head_dim": 4,
    "value_head_dim": 12,
    "expert_d_ff": 48,
    "shared_d_ff": 32,
}
MODELS |= {
    "mixtral": ModelConfig(family="mixtral", num_experts=4),
    "qwen3_moe": ModelConfig(
        family="qwen3_moe", num_layers=3, dense_layers=1, num_experts=16, expert_d_ff=24
    ),
    "qwen3_moe, every second layer": ModelConfig(
        family="qwen3_moe", num_layers=5, dense_layers=1, num_experts=16, expert_pattern="DE"
    ),
    "deepseek_v3": ModelConfig(family="deepseek_v3", **LATENT),
    "deepseek_v3 with two modules": ModelConfig(family="deepseek_v3", prediction_depth=2, **LATENT),
    "deepseek_v3 without a rank of queries": ModelConfig(
        family="deepseek_v3", **LATENT | {"query_rank": 0}
    ),
}


@pytest.mark.proof(but=("qk_norm", "gemma2", "esm"))
@pytest.mark.parametrize("name", MODELS)
def test_names_shapes_and_axes_are_the_models(name):
    config = MODELS[name]
    kind = EncoderDecoder if config.num_encoder_layers else Decoder
    model = kind(config, plain_kernels())
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    axes = jax.tree.leaves(model.axes, is_leaf=is_axes)
    expected = {}
    for (path, leaf), names in zip(jax.tree_util.tree_leaves_with_path(shapes), axes):
        skip = 1 if names[0] == "layers" else 0
        expected[leaf_name(path)] = names[skip:], leaf.shape[skip:]
    found = {
        f"{array.part}/{array.name}": (array.axes, array.shape) for array in parameters(config)
    }
    assert found == expected


@pytest.mark.parametrize("name", MODELS)
def test_their_sizes_add_up(name):
    config = MODELS[name]
    layers = dict(stack_sizes(config))
    total = sum(array.size * layers.get(array.part, 1) for array in parameters(config))
    assert total == config.num_params
