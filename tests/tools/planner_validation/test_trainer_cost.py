"""Steps of other trainers: terms that are ours in part."""

import pytest

from jaxscale.config import load
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.search.trainable_model import TrainableModel
from tools.planner_validation.trainer_cost import EAGER_END_SECONDS, trainer_cost
from tools.planner_validation.trainer_layout import Trainer, TrainerLayout

WORK = TrainableModel(load("llama2_7b")).work
H100 = make_cluster("h100", 8)


def cost(machine=H100, **layout):
    return trainer_cost(WORK, machine, TrainerLayout(fsdp=8, microbatch=4, **layout))


def test_half_of_the_layers_cost_half_of_their_recompute():
    none, half, full = (
        cost(remat="full", remat_share=share).recompute for share in (0.0, 0.5, 1.0)
    )
    assert none == 0 < half
    assert half == pytest.approx(full / 2)


def test_half_of_the_layers_wait_half_as_long_for_the_host():
    slow = make_cluster("h100", 8, host_bytes_per_second=1e9)
    half, whole = (
        cost(slow, remat="full", offload="activations", offload_share=share).offload
        for share in (0.5, 1.0)
    )
    assert 0 < half == pytest.approx(whole / 2)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_whole_gradients_are_summed_at_every_stage(zero_stage):
    found = cost(zero_stage=zero_stage, microbatches=4)
    assert found.weights == cost(zero_stage=0, microbatches=4).weights > 0


def test_eager_trainers_synchronise_at_the_end_unless_a_graph_is_recorded():
    assert cost(traits=Trainer(eager=True)).end == EAGER_END_SECONDS > cost().end
    assert cost(traits=Trainer(eager=True, graph="step")).end == cost().end
