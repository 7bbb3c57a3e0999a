"""What other trainers send, and over which groups."""

from dataclasses import replace

import numpy as np
import pytest

from jaxscale.planner.cost import collectives
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.cost.communication import expert_traffic, local_params
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.model.shape import ModelShape
from tools.planner_validation.trainer_cost import trainer_cost
from tools.planner_validation.trainer_layout import Trainer, TrainerLayout
from tools.planner_validation.trainer_traffic import (
    merged_levels,
    trainer_expert_traffic,
    trainer_levels,
    trainer_params,
    trainer_tensor_traffic,
)
from tools.planner_validation.trainers import MEGATRON_CORE

SHAPE = ModelShape(32, 4096, 32, 32, 128, 11008, gated=True, vocab=32000, tied=False, seq_len=4096)
MOE = replace(SHAPE, experts=64, top_k=4, expert_ff=2048).work
H100 = make_cluster("h100", 64)


def test_an_exchange_that_merges_copies_sends_less_between_nodes():
    group = collectives.axis_levels(H100, Parallelism(expert=64))["expert"]
    plain = collectives.exchange_seconds(group, 1e9)
    merged = collectives.exchange_seconds(merged_levels(group, 8), 1e9)
    assert merged < plain
    # At most one copy for each of the seven other nodes.
    sent = 1e9 * 7 * (1 - (7 / 8) ** 8) / 8
    assert merged >= sent / H100.tiers[-1].bytes_per_second
    alone = collectives.axis_levels(H100, Parallelism())["expert"]
    assert collectives.exchange_seconds(merged_levels(alone, 8), 1e9) == 0


def test_folded_experts_are_the_ranks_of_tensor_and_data():
    folded = TrainerLayout(fsdp=8, tensor=8, expert=64, traits=MEGATRON_CORE)
    assert folded.num_devices == 64
    assert folded.batch_shards == 8
    group = trainer_levels(H100, folded)["expert"]
    assert float(collectives.group_size(group)) == 64


def test_folded_experts_are_whole():
    """Of 64 experts on 8 ranks a device has 8; of ours over 2 ranks of tensor the halves."""
    folded = TrainerLayout(
        fsdp=8, tensor=2, expert=8, pipeline=np.array([1, 4]), traits=MEGATRON_CORE
    )
    ours = local_params(MOE, folded).layers
    assert trainer_params(MOE, folded).layers - ours == pytest.approx(
        MOE.routed_params / 8 / 2 / np.array([1, 4])
    )


def test_experts_of_other_trainers_send_fewer_tokens():
    tokens, (stack,) = 4096.0, MOE.stacks
    layout = TrainerLayout(tensor=2, expert=32, traits=Trainer())
    levels = trainer_levels(H100, layout)["expert"]
    assert trainer_expert_traffic(stack, layout, levels, tokens) == expert_traffic(
        stack, Parallelism(tensor=2, expert=32), levels, tokens
    )
    less = [
        trainer_expert_traffic(stack, replace(layout, traits=traits), levels, tokens)
        for traits in (Trainer(), Trainer(folded_experts=True), MEGATRON_CORE)
    ]
    assert less == sorted(less, reverse=True)
    far = trainer_cost(MOE, H100, TrainerLayout(expert=64, traits=Trainer()))
    merged = trainer_cost(MOE, H100, TrainerLayout(expert=64, traits=MEGATRON_CORE))
    assert merged.expert < far.expert


def test_a_forward_pass_that_is_recomputed_is_sent_again():
    (stack,) = SHAPE.work.stacks
    half = TrainerLayout(tensor=8, remat="full", remat_share=0.5)
    sent = trainer_tensor_traffic(SHAPE.work, stack, half, trainer_levels(H100, half), 1e8)
    assert sent.recompute == sent.forward / 2 > 0
    none = replace(half, remat="none")
    assert (
        trainer_tensor_traffic(SHAPE.work, stack, none, trainer_levels(H100, none), 1e8).recompute
        == 0
    )
