"""The settings of side networks and prompts."""

import re

import pytest

from jaxscale.config import from_dict
from jaxscale.config.model import ModelConfig
from jaxscale.config.model.lora import is_adapter
from jaxscale.config.read_config import read_settings

T5 = {"family": "t5", "num_encoder_layers": 2}
MTP = {"family": "deepseek_v3", "prediction_depth": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"side_width": -1}, "model.side_width = -1 is too small; at least 0"),
        ({"prompt_tokens": -1}, "model.prompt_tokens = -1 is too small; at least 0"),
        (
            {"side_width": 8, "lora_rank": 4},
            "model.lora_rank = 4 and model.side_width = 8 are 2 kinds of adapters, and a model has "
            "one; set the others to 0",
        ),
        ({"side_width": 8, "prompt_tokens": 4}, "are 2 kinds of adapters"),
        (
            {"side_width": 8, **T5},
            "model.side_width = 8 is not available: an encoder's output enters every layer of its "
            "decoder; set model.side_width = 0",
        ),
        ({"prompt_tokens": 8, **T5}, "model.prompt_tokens = 8 is not available: an encoder's"),
        ({"side_width": 8, **MTP}, "read the frozen layers; set model.prediction_depth = 0"),
        (
            {"prompt_tokens": 4, "family": "bert"},
            "model.prompt_tokens = 4 is not available: attention is not causal",
        ),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig(**settings)


@pytest.mark.parametrize("adapter", ["side_width", "prompt_tokens"])
def test_an_adapter_is_written_and_frozen_weights_are_narrow(adapter):
    model = ModelConfig(**{adapter: 8})
    assert model.adapts
    assert model.param_dtype == model.compute_dtype
    assert read_settings(model)[adapter] == 8
    assert not ModelConfig().adapts
    assert adapter not in read_settings(ModelConfig())
    assert ModelConfig(family="bert", causal=False, side_width=8).adapts


def test_the_parameters_of_adapters():
    names = ("layers/side/up", "layers/attention/q_lora/a", "embed/prompt/rows", "layers/mlp/up")
    assert [is_adapter(name) for name in names] == [True, True, True, False]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"objective": "span_corruption"}, "set data.objective to causal or prefix"),
        ({"objective": "causal_across_documents"}, "has other rows; set data.objective to"),
    ],
)
def test_a_prompt_needs_rows_of_documents(data, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_dict({"model": {"prompt_tokens": 6}, "data": data})
