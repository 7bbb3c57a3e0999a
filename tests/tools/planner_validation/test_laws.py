"""What papers found, out of the same model."""

from dataclasses import replace

import numpy as np
import pytest

from jaxscale.planner.cost import energy
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.model.shape import ModelShape
from tools.planner_validation.trainer_cost import trainer_cost
from tools.planner_validation.trainer_layout import TrainerLayout
from tools.planner_validation.trainer_memory import trainer_memory
from tools.planner_validation.trainers import MEGATRON_2021, MEGATRON_DEEPSPEED, TORCH_FSDP

FRONTIER = replace(MEGATRON_DEEPSPEED, attention="flash2", attention_seen=True)


def gpt(layers, d_model, heads, seq_len=2048):
    return ModelShape(
        layers,
        d_model,
        heads,
        heads,
        d_model // heads,
        4 * d_model,
        gated=False,
        vocab=50688,
        tied=True,
        seq_len=seq_len,
        biases=True,
        learned_positions=True,
    )


def test_tensor_parallelism_collapses_beyond_the_node():
    """1.4B on 32 dies of MI250X (arXiv 2312.12705): slower with every doubling, and the more so
    once a group leaves its node of eight."""
    found = [
        trainer_cost(
            gpt(24, 2112, 24).work,
            make_cluster("mi250x", 32),
            TrainerLayout(
                tensor=t,
                fsdp=32 // t,
                zero_stage=1,
                microbatch=4,
                microbatches=2 * t,
                remat="full",
                traits=FRONTIER,
            ),
        ).step_seconds
        for t in (1, 2, 4, 8, 16, 32)
    ]
    steps = np.array(found[1:]) / np.array(found[:-1])
    assert (steps > 1).all()
    assert found[2] / found[0] < 1.4
    assert found[5] / found[3] > 2


def throughput(p, microbatches):
    """Tokens a second and device of 175B."""
    found = trainer_cost(
        gpt(96, 12288, 96).work,
        make_cluster("mi250x", 8 * p),
        TrainerLayout(
            tensor=8, pipeline=p, microbatches=microbatches, remat="full", traits=FRONTIER
        ),
    )
    return microbatches * 2048 / found.step_seconds / (8 * p)


def test_throughput_is_flat_at_a_fixed_ratio_of_stages_to_microbatches():
    fixed_ratio = [throughput(p, 8 * p) for p in (4, 8, 16, 32)]
    assert min(fixed_ratio) > 0.85 * max(fixed_ratio)
    fixed_count = [throughput(p, 64) for p in (4, 8, 16, 32)]
    assert fixed_count == sorted(fixed_count, reverse=True)
    assert fixed_count[-1] < 0.7 * fixed_count[0]
    filled = [throughput(16, m) for m in (16, 32, 64, 128)]
    assert filled == sorted(filled)


@pytest.mark.parametrize(
    ("shape", "parallelism", "teraflops"),
    [
        (
            gpt(48, 6144, 48),
            TrainerLayout(
                pipeline=8, data=2, zero_stage=0, microbatches=320, remat="full", traits=FRONTIER
            ),
            73.5,
        ),
        (
            gpt(96, 12288, 96),
            TrainerLayout(
                tensor=4,
                pipeline=16,
                fsdp=2,
                zero_stage=1,
                microbatches=640,
                remat="full",
                traits=FRONTIER,
            ),
            69.2,
        ),
    ],
)
def test_frontiers_throughput(shape, parallelism, teraflops):
    """Operations of the hardware, with recomputation, by the authors' formula; to a tenth."""
    devices = int(parallelism.num_devices)
    seconds = trainer_cost(shape.work, make_cluster("mi250x", devices), parallelism).step_seconds
    d, layers, batch = shape.d_model, shape.layers, float(parallelism.global_batch)
    flops = 96 * batch * 2048 * layers * d**2 * (1 + 2048 / (6 * d) + 50688 / (16 * layers * d))
    assert flops / seconds / devices / 1e12 == pytest.approx(teraflops, rel=0.1)


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_mt5_xxl_is_faster_with_the_second_stage_than_with_the_third(nodes):
    """arXiv 2310.05350; sign only."""
    xxl = ModelShape(
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
        encoder_seq_len=1024,
    )
    traits = replace(
        MEGATRON_2021, overlap_gradients=True, overlap_parameters=True, reduce_each=True
    )
    second, third = (
        trainer_cost(
            xxl.work,
            make_cluster("a100-80", 8 * nodes),
            TrainerLayout(
                fsdp=8 * nodes,
                zero_stage=stage,
                microbatch=4,
                microbatches=8 // nodes,
                remat="full",
                traits=traits,
            ),
        ).step_seconds
        for stage in (2, 3)
    )
    assert second < third


LLAMA_7B = ModelShape(
    32, 4096, 32, 32, 128, 11008, gated=True, vocab=32000, tied=False, seq_len=4096
)
FAIR = TrainerLayout(
    microbatch=1,
    zero_stage=3,
    traits=replace(TORCH_FSDP, fused=True, keep_gathered=True, gradient_bytes=2),
)


def weak_scaling(**overrides):
    found = []
    for devices in (128, 2048):
        machine = make_cluster("h100", devices, **overrides)
        seconds = trainer_cost(LLAMA_7B.work, machine, replace(FAIR, fsdp=devices))
        found.append((seconds.step_seconds, float(energy.mean_watts(seconds, machine))))
    (small, small_watts), (large, large_watts) = found
    return 1 - small / large, 1 - large_watts / small_watts


def test_fully_sharded_weak_scaling_loses_a_third_and_keeps_its_power():
    """7B from 128 to 2,048 H100 (arXiv 2411.13055): 37 per cent less per device, 6 less power."""
    lost, saved = weak_scaling()
    assert lost == pytest.approx(0.3722, abs=0.05)
    assert saved == pytest.approx(0.0587, abs=0.02)


def test_bandwidth_alone_does_not_explain_it():
    lost, _ = weak_scaling(network_latency_seconds=0.0, node_latency_seconds=0.0)
    assert lost < 0.1


def test_layered_accumulation_with_modular_pipelines_halves_the_shortest_time():
    """1.26T parameters on A100 at the critical batch (arXiv 2106.02679), with as many devices as
    there are sequences times tensor ranks: plain pipelines and replicas against breadth first with
    sharded state."""
    shape, batch = gpt(160, 25600, 160, seq_len=2560), 2400
    traits = replace(
        MEGATRON_2021,
        overlap_gradients=True,
        overlap_parameters=True,
        overlap_pipeline=True,
        reduce_each=True,
        fused=True,
        attention="fused",
        attention_seen=True,
        eager=False,
        dropout=False,
        loss="fused",
    )
    ranks, counts = np.array(
        [
            (p, m)
            for p in (1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 80, 160)
            for m in (1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 80)
            if batch % m == 0
        ]
    ).T

    def shortest(**layout):
        parallelism = TrainerLayout(
            pipeline=ranks, microbatches=counts, tensor=8, remat="full", traits=traits, **layout
        )
        seconds = trainer_cost(shape.work, make_cluster("a100-80", 8), parallelism).step_seconds
        fits = trainer_memory(shape, parallelism).needed < 80e9
        return seconds[fits & (parallelism.num_devices <= 8 * batch)].min()

    plain = shortest(data=batch // counts, zero_stage=0)
    modular = shortest(
        fsdp=batch // counts, zero_stage=3, schedule="breadth_first", virtual_stages=160 // ranks
    )
    assert plain / modular == pytest.approx(2, rel=0.15)
