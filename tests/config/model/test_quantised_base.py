"""The settings of frozen weights that are stored quantised."""

import re

import pytest

from jaxscale.config import from_dict
from jaxscale.config.model import ModelConfig
from jaxscale.config.read_config import read_settings
from jaxscale.planner.search.trainable_model import check_parameters

MIXED = {"d_model": 128, "head_dim": 64, "num_heads": 2, "num_kv_heads": 2, "lora_rank": 4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_dtype": "int4"}, "model.base_dtype = 'int4' is not known; it can be '', nf4,"),
        ({"base_dtype": "nf4"}, "without adapters all weights are trained; set model.lora_rank"),
        ({"base_targets": "q"}, "with model.base_dtype = '' (no quantised weights); set"),
        (
            {"base_dtype": "nf4", "base_targets": "w", "lora_rank": 4},
            "model.base_targets = 'w' is not known; it can be q, k, v, out, up, gate, down",
        ),
        (
            {"base_dtype": "nf4", "lora_rank": 4, "family": "t5", "num_encoder_layers": 2},
            "is not available for encoder-decoders; set model.base_dtype = ''",
        ),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig(**settings)


def test_the_settings_are_those_of_adapters():
    model = ModelConfig(lora_rank=4, base_dtype="nf4", base_targets="q, up")
    assert [name for name in ("q", "k", "up") if model.is_stored(name)] == ["q", "up"]
    assert read_settings(model)["base_dtype"] == "nf4"
    assert "base_dtype" not in read_settings(ModelConfig())
    assert not ModelConfig(lora_rank=4).is_stored("q")
    assert ModelConfig(side_width=4, base_dtype="mxfp4").is_stored("q")


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (
            {"base_dtype": "nf4", "head_dim": 32},
            {},
            "has blocks of 64 inputs, and layers/attention/out has 32; leave out out of "
            "model.base_targets",
        ),
        (
            {"base_dtype": "nf4"},
            {"fsdp": 4},
            "layout.fsdp = 4 ranks shard the 128 of layers/attention/k into 32 each: a block would "
            "be on two ranks; use fewer ranks, or leave k out of model.base_targets",
        ),
        (
            {"base_dtype": "mxfp4", "base_targets": "down", "d_ff": 96},
            {"tensor": 2},
            "layout.tensor = 2 ranks shard the 96 of layers/mlp/down into 48 each",
        ),
    ],
)
def test_a_block_is_on_one_rank(model, layout, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_parameters(from_dict({"model": {**MIXED, **model}, "layout": {"data": 1, **layout}}))
