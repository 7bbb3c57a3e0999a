"""Parameters and operations against published counts, and against the model's own."""

import dataclasses

import pytest

from jaxscale.config import Config, DataConfig, load
from jaxscale.config.model import ModelConfig
from jaxscale.model_families.shipped import PLANNED
from jaxscale.planner.model.named_models import NAMED, published_shape
from jaxscale.planner.model.shape import LatentAttention, ModelShape
from jaxscale.planner.model.traces import model_trace


@pytest.mark.parametrize("name", ["llama2_7b", "llama2_70b", "llama3_8b", "gpt_22b", "gpt_175b"])
def test_counts_are_those_of_the_model(name):
    config = load(f"configs/{name}.py")
    shape = ModelShape.of(config)
    # A model learns max_seq_len positions; a shape has those of its sequences.
    extra = config.model.max_seq_len - shape.seq_len
    learned = extra * shape.d_model if shape.learned_positions else 0
    assert shape.num_params + learned == model_trace(config.model).num_params
    assert shape.flops_per_token == pytest.approx(
        config.model.flops_per_token(config.data.seq_len), rel=1e-3
    )


@pytest.mark.parametrize("family", PLANNED, ids=lambda family: family.name)
def test_counts_are_those_of_every_decoder(family):
    sizes = {"num_layers": 8, "d_model": 256, "sliding_window": 64, "d_ff": 512, "vocab_size": 384}
    if "sliding_window" not in family.settings:
        del sizes["sliding_window"]
    model = ModelConfig(family=family.name, **sizes, max_seq_len=128)
    objective = "causal" if model.causal else "masked"
    config = Config(model=model, data=DataConfig(objective=objective))
    shape = ModelShape.of(config)
    assert shape.num_params == model_trace(config.model).num_params
    assert shape.flops_per_token == pytest.approx(config.model.flops_per_token(128), rel=1e-2)


def test_turns_count_the_layers_with_experts():
    config = load("qwen3_30b_a3b", ["model.num_layers=12", "model.expert_pattern=DDE"])
    shape = ModelShape.of(config)
    assert shape.expert_layers == 4
    assert shape.num_params == model_trace(config.model).num_params
    assert shape.active_params == model_trace(config.model).num_active_params(
        config.model.experts_per_token
    )
    flops = config.model.flops_per_token(config.data.seq_len)
    assert shape.flops_per_token == pytest.approx(flops, rel=1e-3)


@pytest.mark.parametrize("name", ["mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3"])
def test_counts_are_those_of_a_model_with_experts(name):
    config = load(f"configs/{name}.py")
    shape, length = ModelShape.of(config), config.data.seq_len
    assert shape.num_params == model_trace(config.model).num_params
    assert shape.active_params == model_trace(config.model).num_active_params(
        config.model.experts_per_token
    )
    assert shape.flops_per_token == pytest.approx(config.model.flops_per_token(length), rel=1e-3)
    # Their published sizes; ours count the features that are rotated as a head's, and d_ff always.
    named = dataclasses.replace(
        NAMED[name.replace("_", "-")],
        seq_len=length,
        d_ff=config.model.d_ff,
        head_dim=config.model.head_dim,
        shared_ff=config.model.shared_d_ff,
        windowed_share=0.0,
        extra_params=shape.extra_params,
        extra_head_params=shape.extra_head_params,
    )
    assert shape == named


def mt5(d_model, d_ff, heads, layers):
    return ModelShape(
        layers,
        d_model,
        heads,
        heads,
        64,
        d_ff,
        gated=True,
        vocab=250112,
        tied=False,
        seq_len=512,
        causal=False,
        encoder_layers=layers,
        encoder_seq_len=512,
    )


@pytest.mark.parametrize(
    ("sizes", "params"),
    [
        ((512, 1024, 6, 8), 3.00e8),
        ((768, 2048, 12, 12), 5.82e8),
        ((1024, 2816, 16, 24), 1.230e9),
        ((2048, 5120, 32, 24), 3.743e9),
        ((4096, 10240, 64, 24), 1.2921e10),
    ],
)
def test_encoder_and_decoder_count_as_mt5(sizes, params):
    assert mt5(*sizes).num_params == pytest.approx(params, rel=1e-3)


DEEPSEEK_V3 = ModelShape(
    61,
    7168,
    128,
    128,
    128,
    18432,
    gated=True,
    vocab=129280,
    tied=False,
    seq_len=4096,
    experts=256,
    top_k=8,
    expert_ff=2048,
    shared_experts=1,
    dense_layers=3,
    latent=LatentAttention(1536, 512, 128, 64, 128),
)


@pytest.mark.parametrize(
    ("shape", "total", "active"),
    [
        (DEEPSEEK_V3, 671e9, 37e9),  # arXiv 2412.19437
        (NAMED["nemotron-3-nano"], 31.6e9, 3.6e9),  # model card
        (NAMED["nemotron-3-super"], 120.6e9, 12.7e9),  # model card
        (NAMED["llama3-70b"], 70.6e9, 70.6e9),
    ],
)
def test_experts_count_all_and_active(shape, total, active):
    assert shape.num_params == pytest.approx(total, rel=0.005)
    assert shape.active_params == pytest.approx(active, rel=0.02)


def test_gpt_is_twelve_squares_a_layer():
    shape = ModelShape(
        96,
        12288,
        96,
        96,
        128,
        49152,
        gated=False,
        vocab=51200,
        tied=True,
        seq_len=2048,
        biases=True,
        learned_positions=True,
    )
    layers, d, vocab, seq = 96, 12288, 51200, 2048
    formula = 12 * layers * d**2 * (1 + 13 / (12 * d) + (vocab + seq) / (12 * layers * d))
    assert shape.num_params == pytest.approx(formula, rel=1e-6)


def test_a_window_sees_fewer_keys():
    full = NAMED["llama3-70b"]
    window = dataclasses.replace(full, window=1024)
    half = dataclasses.replace(full, window=1024, windowed_share=0.5)
    assert window.mean_keys == pytest.approx(1024 * (1 - 1024 / (2 * 8192)))
    assert window.mean_keys < half.mean_keys < full.mean_keys == 4096
    assert dataclasses.replace(full, window=8192).mean_keys == full.mean_keys


def test_cross_attention_costs_only_where_there_is_an_encoder():
    with_encoder = mt5(512, 1024, 6, 8)
    without = dataclasses.replace(with_encoder, encoder_layers=0, encoder_seq_len=0)
    ratio = with_encoder.block_flops / without.block_flops
    assert 2 < ratio < 3.5  # a layer more, and a second attention


def test_models_are_found_by_name():
    assert published_shape("Nemotron_3_Nano", 4096) == dataclasses.replace(
        NAMED["nemotron-3-nano"], seq_len=4096
    )
    assert published_shape("llama3-70b LoRA", 8192) == NAMED["llama3-70b"]
    assert published_shape("nobody's model", 8192) is None
