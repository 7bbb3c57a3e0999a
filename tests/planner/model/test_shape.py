"""Parameters and operations against published counts, and against the model's own."""

import dataclasses

import pytest

from jaxscale.planner.model.named_models import NAMED, published_shape
from jaxscale.planner.model.shape import LatentAttention, ModelShape


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
    ratio = with_encoder.work.layer_flops / without.work.layer_flops
    assert 2 < ratio < 3.5  # a layer more, and a second attention


def test_models_are_found_by_name():
    assert published_shape("Nemotron_3_Nano", 4096) == dataclasses.replace(
        NAMED["nemotron-3-nano"], seq_len=4096
    )
    assert published_shape("llama3-70b LoRA", 8192) == NAMED["llama3-70b"]
    assert published_shape("nobody's model", 8192) is None
