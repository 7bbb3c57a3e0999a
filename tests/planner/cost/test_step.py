"""Seconds of a step: what adds up, what arrays give, and in which direction terms move."""

import time
from dataclasses import replace

import numpy as np
import pytest

from jaxscale.config import load
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.cost.collectives import axis_levels
from jaxscale.planner.cost.communication import local_params, state_traffic
from jaxscale.planner.cost.kernels import memory_seconds
from jaxscale.planner.cost.state import offloaded_bytes
from jaxscale.planner.cost.step import step_cost
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.model.shape import ModelShape
from jaxscale.planner.search.trainable_model import TrainableModel
from jaxscale.planner.tables.state_ticks import TickCollectives, state_ticks
from jaxscale.planner.tables.table_makespan import TableSpec

LLAMA = TrainableModel(load("llama2_70b")).work
SMALL = TrainableModel(load("llama2_7b")).work
SHAPE = ModelShape(32, 4096, 32, 32, 128, 11008, gated=True, vocab=32000, tied=False, seq_len=4096)
MOE = replace(SHAPE, experts=64, top_k=4, expert_ff=2048).work
H100 = make_cluster("h100", 512)
V5P = make_cluster("v5p", 512)


def seconds(work, machine, **parallelism):
    return step_cost(work, machine, Parallelism(**parallelism)).step_seconds


@pytest.mark.parametrize("machine", [H100, V5P], ids=["h100", "v5p"])
@pytest.mark.parametrize(
    "parallelism",
    [
        {"fsdp": 512, "remat": "full"},
        {"fsdp": 64, "tensor": 8, "microbatches": 4},
        {"fsdp": 32, "tensor": 4, "context": 4, "microbatches": 2},
        {"pipeline": 4, "fsdp": 16, "tensor": 8, "microbatches": 16, "zero_stage": 1},
        {"fsdp": 64, "tensor": 8, "microbatches": 4, "accumulation": "layered"},
        {"fsdp": 512, "offload": "optimizer,activations", "remat": "full"},
    ],
)
def test_terms_add_up_and_never_beat_the_peak(machine, parallelism):
    work, found = LLAMA, step_cost(LLAMA, machine, Parallelism(**parallelism))
    assert sum(map(float, found.terms.values())) == pytest.approx(found.step_seconds)
    assert all(float(value) >= 0 for value in found.terms.values())
    assert all(np.all(np.asarray(value) >= 0) for value in found.hidden.values())
    tokens = float(Parallelism(**parallelism).global_batch) * work.seq_len
    mfu = (
        3
        * work.sequence_flops
        / work.seq_len
        * tokens
        / found.step_seconds
        / 512
        / machine.peak_flops()
    )
    assert 0.03 < mfu < 0.75


def test_arrays_give_what_single_layouts_give():
    tensor, pipeline = np.array([1, 2, 4, 8]), np.array([8, 4, 2, 1])
    many = step_cost(
        LLAMA,
        H100,
        Parallelism(
            tensor=tensor, pipeline=pipeline, fsdp=64, zero_stage=1, microbatches=16, remat="full"
        ),
    )
    for n in range(4):
        one = step_cost(
            LLAMA,
            H100,
            Parallelism(
                tensor=int(tensor[n]),
                pipeline=int(pipeline[n]),
                fsdp=64,
                zero_stage=1,
                microbatches=16,
                remat="full",
            ),
        )
        assert many.step_seconds[n] == pytest.approx(one.step_seconds)
        for name, value in one.terms.items():
            together = np.broadcast_to(many.terms[name], (4,))[n]
            assert together == pytest.approx(float(value)), name


@pytest.mark.proof
def test_a_hundred_thousand_layouts_take_seconds():
    count, random = 100_000, np.random.default_rng(0)
    parallelism = Parallelism(
        fsdp=2 ** random.integers(0, 7, count),
        tensor=2 ** random.integers(0, 4, count),
        context=2 ** random.integers(0, 2, count),
        microbatches=2 ** random.integers(0, 5, count),
        zero_stage=random.integers(0, 4, count),
    )
    start = time.process_time()
    assert step_cost(LLAMA, H100, parallelism).step_seconds.shape == (count,)
    assert time.process_time() - start < 10


def test_more_bandwidth_never_costs_time():
    layouts = [
        {"fsdp": 512},
        {"fsdp": 64, "tensor": 8},
        {"fsdp": 32, "tensor": 16},
        {"pipeline": 8, "tensor": 8, "fsdp": 8, "zero_stage": 1, "microbatches": 16},
    ]
    for layout in layouts:
        slow, fast = (
            seconds(LLAMA, make_cluster("h100", 512, network_bytes_per_second=rate), **layout)
            for rate in (25e9, 100e9)
        )
        assert fast <= slow


def test_recomputation_costs_in_order():
    found = [
        seconds(SMALL, make_cluster("h100", 8), fsdp=8, microbatch=2, remat=remat)
        for remat in ("none", "save_all_but_attention", "save:query,key,value", "full")
    ]
    assert found == sorted(found)
    # A third of the matmuls of the layers again, and no more.
    assert found[-1] / found[0] < 4 / 3 + 0.02


def test_layered_accumulation_gathers_once():
    layout = {"fsdp": 512, "microbatch": 1, "microbatches": 8, "zero_stage": 3}
    layered = step_cost(SMALL, H100, Parallelism(**layout, accumulation="layered"))
    sequential = step_cost(SMALL, H100, Parallelism(**layout))
    assert layered.fsdp < sequential.fsdp
    sent = [float(one.fsdp + one.hidden["fsdp"]) for one in (layered, sequential)]
    # What is hidden is longer than what it is hidden behind costs.
    assert sent[0] < sent[1] / 4


def in_pipeline(**changes):
    """Terms of a pipeline, and what its state's collectives take, each done once."""
    sizes = {"pipeline": 4, "fsdp": 16, "microbatches": 16, "zero_stage": 3, "remat": "full"}
    parallelism = Parallelism(**(sizes | changes))
    machine = make_cluster("v5p", 64)
    levels, params = axis_levels(machine, parallelism), local_params(SMALL, parallelism)
    state = state_traffic(SMALL, params, parallelism, levels)
    return step_cost(SMALL, machine, parallelism), state


def test_weights_are_cast_when_they_are_gathered_and_gradients_summed_where_they_are_reduced():
    """In a pass over memory of 10 bytes a parameter for each sum of a micro-batch, and 6 for each
    cast, forward and backward."""
    layers, outer = SMALL.block_params, SMALL.embedding_params + SMALL.head_params
    machine = make_cluster("h100", 8)

    def passes(elements, each):
        return memory_seconds(machine, each * elements)

    def weights(**parallelism):
        found = step_cost(SMALL, machine, Parallelism(microbatches=4, **parallelism))
        return float(found.weights)

    def same(expected):
        return pytest.approx(expected, rel=1e-12)

    casts, sums = passes(2 * layers + outer, 4 * 6), passes(layers + outer, 4 * 10)
    once = passes(layers + outer, 6)
    assert weights(zero_stage=0, data=8) == same(casts + sums)
    assert weights(zero_stage=1, fsdp=8) == same(once / 8 + sums)
    assert weights(zero_stage=2, fsdp=8) == same((once + sums) / 8)
    assert weights(zero_stage=3, fsdp=8) == same((casts + sums) / 8)
    assert weights(zero_stage=3, fsdp=8, accumulation="layered") == same(casts / 4 / 8 + sums)
    assert weights(zero_stage=3, fsdp=8, casts_weights=False) == same(sums / 8)
    by = {"pipeline": 2, "fsdp": 4, "zero_stage": 3}
    assert weights(**by, pipeline_gather="layer") < weights(**by)


def test_a_chunk_is_gathered_before_the_first_tick_and_reduced_after_the_last():
    """Without overlap: 31 of 37 ms of these are exposed by the compiler (docs/pipelines.md),
    which counts the gradients of embedding and head on a quarter of the ranks."""
    found, once = in_pipeline()
    ticks = state_ticks(TableSpec("1f1b", 4, 16, keep=0))
    assert 16 < ticks.ends <= 32
    around = once.gather + once.scatter_layers + once.gather_outer
    assert found.fsdp == pytest.approx(around + ticks.ends * once.scatter_outer)
    assert found.hidden["fsdp"] == 0
    assert 0.031 < around + 16 / 4 * 2 * once.scatter_outer < 0.041


def test_chunks_are_gathered_and_reduced_one_by_one():
    found, once = in_pipeline(schedule="zb_v", virtual_stages=2)
    ticks = state_ticks(TableSpec("zb_v", 4, 16, 2, keep=0))
    gather, reduce = once.gather / 2, once.scatter_layers / 2
    in_ticks = ticks.seconds(TickCollectives(gather, reduce, once.scatter_outer))
    assert in_ticks > 40 * gather + 40 * reduce
    assert found.fsdp == pytest.approx(in_ticks + once.gather_outer)
    # Layer by layer more is sent, overlapping with matmuls.
    layers, _ = in_pipeline(schedule="zb_v", virtual_stages=2, pipeline_gather="layer")
    assert layers.hidden["fsdp"] > found.fsdp / 2 > layers.fsdp


def test_a_pipelines_reductions_of_whole_gradients_come_after_its_ticks():
    for stage, name in ((0, "whole"), (1, "scatter")):
        found, once = in_pipeline(zero_stage=stage)
        assert found.fsdp == 0
        assert found.data == pytest.approx(getattr(once, name) + stage * once.update + once.ends)
        assert found.hidden["data"] == 0


def test_stages_of_zero_send_more_in_order():
    found = [
        step_cost(SMALL, H100, Parallelism(fsdp=512, zero_stage=stage, microbatches=4))
        for stage in range(4)
    ]
    sent = [
        float(one.fsdp + one.data + sum(one.hidden[n] for n in ("fsdp", "data"))) for one in found
    ]
    assert sent[1] <= sent[2] <= sent[3]


def test_experts_send_tokens_to_each_other():
    dense = step_cost(SMALL, H100, Parallelism(fsdp=64, expert=8))
    assert dense.expert == 0
    near = step_cost(MOE, H100, Parallelism(fsdp=64, expert=8))
    far = step_cost(MOE, H100, Parallelism(fsdp=8, expert=64))
    assert 0 < near.expert < far.expert


def test_half_of_an_exchange_hides_behind_matmuls():
    """At most, and its kernels slow them down on a GPU."""
    layout = Parallelism(fsdp=64, expert=8, microbatch=2)
    whole = step_cost(MOE, H100, layout)
    halves = step_cost(MOE, H100, replace(layout, overlap_experts=True))
    assert 0.5 * whole.expert < halves.expert < 0.7 * whole.expert
    assert whole.hidden["expert"] == 0 < halves.hidden["expert"]


def test_chunks_of_tensor_hide_behind_matmuls():
    """All but the first of eight, at most; on TPUs the compiler is counted to do so anyway."""
    layout = Parallelism(fsdp=8, tensor=8)
    whole, chunks = (
        step_cost(SMALL, H100, replace(layout, overlap_tensor=chosen)) for chosen in (False, True)
    )
    assert whole.tensor / 8 <= chunks.tensor < 0.5 * whole.tensor
    assert whole.hidden["tensor"] == 0 < chunks.hidden["tensor"]


def test_keys_that_go_round_hide_behind_attention_within_a_node():
    long = replace(SHAPE, seq_len=131072).work
    ring, gather = (
        step_cost(long, H100, Parallelism(fsdp=64, context=8, context_method=method))
        for method in ("ring", "gather")
    )
    assert ring.context < gather.context
    assert ring.hidden["context"] > 0
    # All-to-alls move less, and none of it overlaps with attention.
    heads = step_cost(long, H100, Parallelism(fsdp=64, context=8, context_method="ulysses"))
    assert ring.context < heads.context < gather.context
    assert heads.hidden["context"] == 0
    # Round several nodes one member of each sends over its own link to the network.
    far = step_cost(long, H100, Parallelism(fsdp=16, context=32, context_method="ring"))
    assert far.context > ring.context


def test_a_fast_host_hides_what_waits_in_it():
    layout = {"fsdp": 8, "microbatch": 4, "remat": "full", "offload": "activations"}
    slow = step_cost(
        SMALL, make_cluster("h100", 8, host_bytes_per_second=1e9), Parallelism(**layout)
    )
    fast = step_cost(
        SMALL, make_cluster("h100", 8, host_bytes_per_second=1e12), Parallelism(**layout)
    )
    assert slow.offload > fast.offload == 0


def test_a_recomputed_pass_of_a_pipeline_offloads_what_it_saves():
    everything = offloaded_bytes(SMALL, "none")
    assert offloaded_bytes(SMALL, "keep:2") == everything > offloaded_bytes(SMALL, "full")
