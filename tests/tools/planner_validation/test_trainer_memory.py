"""Memory of other trainers against the figures of papers and logs."""

from dataclasses import replace

import pytest

from jaxscale.planner.model.shape import ModelShape
from tools.planner_validation.trainer_activations import trainer_layer_bytes
from tools.planner_validation.trainer_layout import TrainerLayout
from tools.planner_validation.trainer_memory import passes_in_flight, published_size, trainer_memory
from tools.planner_validation.trainers import BY_FRAMEWORK, MEGATRON_2021, MEGATRON_DEEPSPEED


def gpt(layers, d_model, heads):
    return ModelShape(
        layers,
        d_model,
        heads,
        heads,
        d_model // heads,
        4 * d_model,
        gated=False,
        vocab=51200,
        tied=True,
        seq_len=2048,
        biases=True,
        learned_positions=True,
    )


KORTHIKANTI = [
    # layers, d_model, heads, pipeline, chunks, micro-batch; GiB of activations with nothing made
    # again, and with sequence parallelism and the core made again (arXiv 2205.05198)
    (48, 6144, 64, 1, 1, 4, 59.25, 9.56),
    (96, 12288, 96, 8, 3, 1, 66.84, 12.35),
    (105, 20480, 128, 35, 3, 1, 114.02, 23.08),
    (128, 25600, 160, 64, 1, 1, 131.25, 26.56),
]


@pytest.mark.parametrize("row", KORTHIKANTI, ids=lambda row: f"{row[1]}")
def test_korthikantis_eight_sizes_to_a_thousandth(row):
    layers, d_model, heads, p, v, micro, plain, selective = row
    parallelism = TrainerLayout(
        pipeline=p,
        tensor=8,
        virtual_stages=v,
        microbatch=micro,
        microbatches=10**4,
        traits=MEGATRON_2021,
    )
    shape = gpt(layers, d_model, heads)
    for name, gib in (("activations", plain), ("selective", selective)):
        assert published_size(shape, parallelism, name) / 2**30 == pytest.approx(gib, rel=1e-3)


def test_frontiers_stages_to_a_hundredth():
    """175B on Frontier: 26,935 MiB and 300 more for each micro-batch in flight (job 405287)."""
    shape = replace(gpt(96, 12288, 96), vocab=50688)
    traits = replace(MEGATRON_DEEPSPEED, attention="flash2", bucket_bytes=0.0)
    parallelism = TrainerLayout(
        pipeline=16, tensor=4, fsdp=2, zero_stage=1, microbatches=640, remat="full", traits=traits
    )
    for stage in range(1, 15):
        found = trainer_memory(shape, parallelism, stage=stage)
        allocated = found.needed - found.context - found.fragments
        assert allocated / 2**20 == pytest.approx(26935.49 + 300 * (16 - stage), rel=0.01)
    first, second = (trainer_memory(shape, parallelism, stage=n).activations for n in (1, 2))
    assert (first - second) / 2**20 == pytest.approx(300)


def test_states_by_stage_are_zeros():
    """13B in 16 bytes a parameter: 206.7, 71.1, 48.5 and 25.8 GB on eight devices."""
    shape = ModelShape(
        24,
        4096,
        64,
        64,
        64,
        10240,
        gated=True,
        vocab=250112,
        tied=False,
        seq_len=512,
        causal=False,
        encoder_layers=24,
        encoder_seq_len=512,
    )
    for stage, gigabytes in enumerate((206.7, 71.1, 48.5, 25.8)):
        found = trainer_memory(
            shape, TrainerLayout(fsdp=8, zero_stage=stage, traits=replace(MEGATRON_2021))
        )
        state = found.weights + found.gradients + found.optimizer
        assert float(state) / 1e9 == pytest.approx(gigabytes, rel=2e-3)


def test_a_schedule_keeps_what_is_in_flight():
    one = TrainerLayout(pipeline=8, microbatches=64)
    assert passes_in_flight(one) == 8
    assert passes_in_flight(one, 7) == 1
    assert passes_in_flight(replace(one, microbatches=4)) == 4
    assert passes_in_flight(replace(one, schedule="gpipe")) == 64
    looped = replace(one, schedule="interleaved", virtual_stages=4)
    assert passes_in_flight(looped) == pytest.approx(8 * (1 + 7 / 32))


def test_every_remedy_takes_less():
    shape = gpt(48, 6144, 64)
    parallelism = TrainerLayout(tensor=8, microbatch=4, traits=MEGATRON_2021)
    shared = replace(parallelism, traits=replace(MEGATRON_2021, sequence_parallel=True))
    core = "save_all_but_attention"
    kept = [
        trainer_layer_bytes(shape, parallelism, "none"),
        trainer_layer_bytes(shape, parallelism, core),
        trainer_layer_bytes(shape, shared, core),
        trainer_layer_bytes(shape, shared, "full"),
    ]
    assert kept == sorted(kept, reverse=True)
    half = trainer_memory(shape, replace(parallelism, remat="full", remat_share=0.5))
    full = trainer_memory(shape, replace(parallelism, remat="full"))
    none = trainer_memory(shape, parallelism)
    assert full.activations < half.activations < none.activations


def test_modules_are_gathered_for_less_than_layers():
    """DeepSpeed's third stage holds a matrix and 1e9 parameters, not two layers of 5e9."""
    shape = gpt(105, 20480, 128)
    modules = TrainerLayout(
        fsdp=640, zero_stage=3, microbatch=4, remat="full", traits=BY_FRAMEWORK["deepspeed"]
    )
    layers = replace(modules, traits=replace(modules.traits, gather_params=0.0))
    assert trainer_memory(shape, layers).gathered > 20e9
    assert trainer_memory(shape, modules).gathered == pytest.approx(
        2 * (1e9 + 4 * 20480**2), rel=1e-3
    )


def test_a_sum_in_32_bits_costs_a_copy_of_the_largest_gradient():
    shape = gpt(70, 14336, 112)
    half = TrainerLayout(
        tensor=4, pipeline=10, fsdp=8, zero_stage=1, remat="full", traits=MEGATRON_DEEPSPEED
    )
    full = replace(half, traits=replace(MEGATRON_DEEPSPEED, gradient_bytes=4))
    more = [
        float(trainer_memory(shape, full, stage=stage).working)
        - float(trainer_memory(shape, half, stage=stage).working)
        for stage in (0, 5)
    ]
    table = 4 * max(shape.embedding_params, 4 * 14336**2) / 4
    assert more == pytest.approx([table, 4 * 14336**2])
