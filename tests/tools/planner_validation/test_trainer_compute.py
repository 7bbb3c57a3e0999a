"""Compute of other trainers: which habits cost time, and where they cost none."""

from dataclasses import replace

import pytest

from jaxscale.planner.cost import kernels
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.cost.layer import layer_compute
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.model.shape import ModelShape
from tools.planner_validation.trainer_compute import FLASH_1, FLASH_2, trainer_compute
from tools.planner_validation.trainer_layout import Trainer, TrainerLayout

SHAPE = ModelShape(32, 4096, 32, 32, 128, 11008, gated=True, vocab=32000, tied=False, seq_len=4096)
MOE = replace(SHAPE, experts=64, top_k=4, expert_ff=2048).work
H100 = make_cluster("h100", 64)
LAYOUT = {"tensor": 2, "expert": 4, "fsdp": 8}


def compute(work=MOE, layout=LAYOUT, **traits):
    return trainer_compute(work, H100, TrainerLayout(**layout, traits=Trainer(**traits)))


@pytest.mark.parametrize("remat", ["none", "save_all_but_attention", "save:query,key", "full"])
def test_a_trainer_without_other_habits_computes_as_ours_does(remat):
    layout = {**LAYOUT, "remat": remat}
    assert compute(layout=layout) == layer_compute(MOE, H100, Parallelism(**layout))


@pytest.mark.parametrize(
    ("term", "traits"),
    [
        ("attention", {"attention": "written"}),
        ("attention", {"attention_seen": False}),
        ("elementwise", {"fused": False}),
        ("elementwise", {"sequence_parallel": False}),
        ("elementwise", {"plain_experts": True}),
        ("elementwise", {"eager": True, "launch_seconds": 0.0}),
        ("elementwise", {"eager": True, "blocking": True}),
        ("matmul", {"grouped_experts": False}),
        ("matmul", {"masked_dispatch": True}),
    ],
    ids=str,
)
def test_each_habit_costs_time_in_its_term_alone(term, traits):
    ours, other = compute().forward, compute(**traits).forward
    assert getattr(other, term) > getattr(ours, term)
    assert replace(other, **{term: 0.0}) == replace(ours, **{term: 0.0})


def test_attention_kernels_come_in_order():
    seconds = [
        kernels.flash_seconds(H100, 1e12, 128, rates=rates)
        for rates in (kernels.FLASH, FLASH_2, FLASH_1)
    ]
    assert seconds == sorted(seconds)


def test_a_host_that_runs_ahead_is_waited_for_only_where_kernels_are_short():
    eager = {"eager": True, "launch_seconds": 32e-6}
    short, long = ({**LAYOUT, "microbatch": n} for n in (1, 64))
    plain = {"eager": True, "launch_seconds": 0.0}
    assert compute(layout=long, **eager) == compute(layout=long, **plain)
    assert (
        compute(layout=short, **eager).forward.seconds
        > compute(layout=short, **plain).forward.seconds
    )
    recorded = compute(layout=short, **eager, graph="step")
    assert recorded == compute(layout=short, **plain)


def test_experts_recomputed_alone_cost_less_than_a_layer():
    moe, whole = (
        compute(layout={**LAYOUT, "remat": remat}).recompute for remat in ("modules:moe", "full")
    )
    assert 0 < moe.matmul < whole.matmul
    assert 0 < moe.elementwise < whole.elementwise
    assert moe.attention == 0


def test_layers_in_16_bits_are_a_share_of_the_matmuls():
    fp4, half, bf16 = (
        compute(SHAPE.work, matmul=matmul, wide_layers=wide).forward.matmul
        for matmul, wide in (("fp8", 0), ("fp8", 16), ("bfloat16", 0))
    )
    assert half == pytest.approx((fp4 + bf16) / 2)


def test_a_plain_loss_moves_three_times_the_bytes():
    fused, plain = compute(loss="fused"), compute(loss="plain")
    assert plain.head_forward.elementwise == pytest.approx(3 * fused.head_forward.elementwise)
    assert plain.head_backward.elementwise == pytest.approx(
        14 / 6 * fused.head_backward.elementwise
    )
