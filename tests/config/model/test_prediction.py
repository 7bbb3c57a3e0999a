"""Modules that predict further tokens are refused where they are not defined, with the setting to
change."""

import re

import pytest

from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelConfig
from jaxscale.sharding.layout_checks import check_tensor_rows

OWN = {"family": "tests.models.experts:make", "prediction_depth": 1}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prediction_depth": 1}, "model.prediction_depth is not a setting of model.family = 'lla"),
        (OWN | {"prediction_depth": -1}, "model.prediction_depth = -1 is too small"),
        (OWN | {"prediction_weight": -0.1}, "model.prediction_weight = -0.1 is too small"),
        (
            OWN | {"causal": False},
            "so a token sees the tokens to predict; set model.",
        ),
        (OWN | {"positions": "learned"}, "model.positions = 'learned' has no row for later tokens"),
        (
            OWN | {"layer_pattern": "LG", "sliding_window": 4},
            "model.layer_pattern = 'LG' does not define a module's layer; set model.prediction",
        ),
    ],
)
def test_a_model_that_they_are_not_defined_for(settings, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        ModelConfig(**settings)


def test_rows_of_tensor_are_refused():
    with pytest.raises(ValueError, match=r"model.prediction_depth = 1 is not available in this"):
        check_tensor_rows(Layout(tensor=4, tensor_rows=2), ModelConfig(**OWN))
