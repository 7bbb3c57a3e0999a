"""Which settings a run may change of the model whose weights it starts from."""

import dataclasses
import pathlib

import pytest

from jaxscale.model_config import ModelConfig
from jaxscale.run.initial_weights import RunWeights, check_settings
from tests.models import experts

TRAINING = {
    "balance": "microbatch",
    "balance_rate": 0.1,
    "balance_weight": 0.0,
    "capacity_factor": 2.0,
    "dropout": 0.1,
    "router_jitter": 0.01,
    "router_z_loss": 0.02,
}


def check(settings, changes):
    model = ModelConfig(family="tests.models.experts:make", **settings)
    weights = RunWeights(pathlib.Path("there"), model, 0, False, {})
    check_settings(dataclasses.replace(model, **changes), weights, "model.init_from = 'there'")


def test_settings_of_training_alone_may_differ():
    check(experts.EVERYTHING, TRAINING)


@pytest.mark.parametrize(
    ("settings", "changes", "line"),
    [
        (experts.EVERYTHING, {"router_scale": 1.0}, "router_scale = 1.0 here, 2.5 there"),
        (experts.EXPERT_CHOICE, {"capacity_factor": 2.0}, "capacity_factor = 2.0 here, 1.0 there"),
    ],
)
def test_what_the_weights_were_trained_for_may_not(settings, changes, line):
    with pytest.raises(ValueError, match=f"other settings:\n  model.{line}"):
        check(settings, changes)
