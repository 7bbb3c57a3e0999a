"""The FLOPs of Muon's update against those of compiled steps."""

import dataclasses

import pytest

from jaxscale.config import Config, load
from jaxscale.config.layout import Layout
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.cost.communication import local_params
from jaxscale.planner.cost.kernels import memory_seconds
from jaxscale.planner.cost.state import OPTIMIZER_BYTES, optimizer_seconds, update_flops
from jaxscale.planner.search.muon_matrices import muon_matrices
from jaxscale.planner.search.trainable_model import TrainableModel
from tests.invariants.layouts import LLAMA, compile_step, make_config, open_engine
from tests.invariants.test_optimizers import optimizer_flops


def with_muon(name: str) -> Config:
    config = load(name)
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name="muon"))


@pytest.mark.proof
def test_a_rank_computes_the_layers_that_it_is_assigned():
    """Two of four; `tests.invariants.test_optimizers` has a layout with tensor."""
    engine = open_engine(make_config(LLAMA, {"data": 2, "zero_stage": 0}, name="muon"))
    counted = optimizer_flops(compile_step(engine))
    parallelism = TrainableModel(engine.config).parallelism(engine.config.layout)
    assert counted > 0
    assert counted == update_flops(parallelism)


def test_steps_of_newton_schulz_take_seconds_that_adamw_does_not():
    config, layout = with_muon("llama2_7b"), Layout(data=1, fsdp=64)
    model, machine = TrainableModel(config), make_cluster("h100", 64)
    # Five steps of each matrix: 2 s s l twice, and 2 s s s; 32 layers over 64 ranks are one each.
    wide, narrow = 4 * (4096**2 * 4096), 3 * (4096**2 * 11008)
    flops = 5 * (4 * (wide + narrow) + 2 * 7 * 4096**3)
    parallelism = model.parallelism(layout)
    assert update_flops(parallelism) == flops
    seconds = optimizer_seconds(local_params(model.work, parallelism), machine, parallelism)
    adamw = TrainableModel(load("llama2_7b")).parallelism(layout)
    rest = optimizer_seconds(local_params(model.work, adamw), machine, adamw)
    assert rest == pytest.approx(
        memory_seconds(machine, OPTIMIZER_BYTES * model.num_params / 64), rel=0.01
    )
    # TF32 has half of the rate of bfloat16.
    assert seconds - rest == pytest.approx(2 * flops / (989.4e12 * 0.803))


def test_ranks_of_expert_have_matrices_of_their_own():
    config = with_muon("mixtral_8x7b")
    routed = [one for one in muon_matrices(config.model, ()) if one.of_experts]
    assert len(routed) == 3
    one, two, eight = (
        update_flops(TrainableModel(config).parallelism(Layout(data=1, fsdp=8, expert=experts)))
        for experts in (1, 2, 8)
    )
    rows = 32 // 8
    own = rows * sum(matrix.shared_flops + matrix.repeated_flops for matrix in routed)
    # The others' layers are over expert, too, but 32 are not over 64 ranks.
    assert two == pytest.approx(one / 2)
    assert one - eight == pytest.approx(own * 7 / 8)
