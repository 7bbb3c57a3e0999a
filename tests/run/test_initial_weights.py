"""Which settings a run may change of the model whose weights it starts from, or resumes with."""

import dataclasses
import json
import pathlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxscale.config import from_dict, to_dict
from jaxscale.config.model import ModelConfig
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.run import pretrained
from jaxscale.run.initial_weights import RunWeights, _say_type, _warn_of_rate, check_settings
from jaxscale.run.setup.resume import Found, check_same_model, with_stored_type
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


def check(settings, changes, seq_len=64):
    model = ModelConfig(**{"family": "tests.models.experts:make", **settings})
    weights = RunWeights(pathlib.Path("there"), model, 64, 0, False, {})
    changed = dataclasses.replace(model, **changes)
    check_settings(changed, weights, "model.init_from = 'there'", seq_len)


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


YARN = {"rope_scaling": "yarn", "rope_factor": 2.0, "rope_original_context": 64}


@pytest.mark.parametrize(("scaling", "usual"), [("llama3", (1.0, 4.0)), ("yarn", (1.0, 32.0))])
def test_the_usual_turns_are_those_that_hugging_face_writes(scaling, usual):
    """As `llama32_1b.py`, which leaves them out, starts from the model's folder."""
    settings = {"family": "llama", "rope_scaling": scaling, "rope_factor": 2.0}
    low, high = usual
    check(settings, {"rope_low_turns": low, "rope_high_turns": high})
    with pytest.raises(ValueError, match=rf"rope_high_turns = 5.0 here, {high} there"):
        check(settings, {"rope_high_turns": 5.0})


def test_rotary_positions_may_differ_where_the_context_is_extended(caplog):
    plain = {"family": "llama", "rope_theta": 1e4}
    for changes in ({"rope_theta": 1e6}, YARN):
        with pytest.raises(ValueError, match=r"may differ if data.seq_len is above 64\)"):
            check(plain, changes)
        with caplog.at_level("INFO", "jaxscale"):
            check(plain, changes, seq_len=65)
        assert (
            "RoPE settings may differ, since data.seq_len = 65 is above the weights' context of 64"
            in caplog.text
        )
        caplog.clear()
    with pytest.raises(ValueError, match=r"settings:\n  model.d_ff = 3 here, \d* there$"):
        check(plain, {"rope_theta": 1e6, "d_ff": 3}, seq_len=65)
    check(plain, {}, seq_len=65)
    assert not caplog.text


def resume(settings, changes):
    config = from_dict({"model": settings})
    found = Found(5, json.loads(json.dumps({"config": to_dict(config)})))
    check_same_model(found, from_dict({"model": {**settings, **changes}}).model)


@pytest.mark.proof
def test_logits_of_a_run_s_model_drop_no_token_that_training_may_drop(monkeypatch):
    """So a text's logits depend neither on other texts of its row nor on padding."""
    config = ModelConfig(family="m6_t", num_layers=2, capacity_factor=0.5, param_dtype="float64")
    model = Decoder(config, plain_kernels())
    weights = SimpleNamespace(
        config=config,
        dtype="float64",
        read=lambda axes, shapes: jax.jit(model.init)(jax.random.key(0)),
    )
    monkeypatch.setattr(pretrained, "open_weights", lambda folder: weights)
    read = pretrained.from_pretrained("run", compute_dtype="float64")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24))
    tokens[1, :12] = tokens[0, 12:]
    segments = np.repeat([[1, 2], [1, 0]], 12, axis=1)
    packed, alone = np.asarray(read(tokens, segments=segments))
    np.testing.assert_allclose(packed[12:], alone[:12], rtol=0, atol=1e-6)


LONGROPE = {
    "family": "phi3",
    "head_dim": 8,
    "rope_scaling": "longrope",
    "rope_short_factors": (1.0, 1.0, 2.0, 3.0),
    "rope_long_factors": (1.0, 2.0, 3.0, 4.0),
}


def test_a_run_resumes_with_lists_of_numbers_that_its_checkpoint_has():
    """A custom model has every setting of a decoder, including lists."""
    resume({"family": "tests.models.experts:make"}, {})
    resume(LONGROPE, {})
    with pytest.raises(
        ValueError, match=r"5 is .* other settings; .*\n  model.rope_long_factors = "
    ):
        resume(LONGROPE, {"rope_long_factors": (1.0, 2.0, 3.0, 5.0)})


def test_how_many_tokens_experts_choose_is_kept_when_a_run_resumes():
    settings = {"family": "tests.models.experts:make", **experts.EXPERT_CHOICE}
    with pytest.raises(ValueError, match=r"other settings; .*\n  model.capacity_factor = 2.0 here"):
        resume(settings, {"capacity_factor": 2.0})
    top_k = {**settings, "router": "top_k"}
    resume(top_k, {"capacity_factor": 2.0})


def test_new_tokens_that_adapters_would_freeze_are_refused(caplog):
    weights = RunWeights(pathlib.Path("there"), ModelConfig(vocab_size=257), 64, 0, False, {})
    grown = {"vocab_size": 260, "lora_rank": 4}
    with caplog.at_level("INFO", "jaxscale"):
        check_settings(
            ModelConfig(**grown, lora_tokens="7,257-259"), weights, "why", 64, may_grow=True
        )
    assert "the rows of 3 new tokens start as the mean" in caplog.text
    with pytest.raises(ValueError, match=r"260 is 3 more .* set model.lora_tokens = '7,257-259'$"):
        check_settings(ModelConfig(**grown, lora_tokens="257,7"), weights, "why", 64, may_grow=True)


@pytest.mark.parametrize(
    ("optimizer", "model", "warns"),
    [
        ({"learning_rate": 3e-4}, {}, True),
        ({"learning_rate": 1e-4}, {}, False),
        ({"learning_rate": 3e-4}, {"lora_rank": 4}, False),
        ({"learning_rate": 3e-4, "groups": ({"params": "embed/*", "frozen": True},)}, {}, False),
    ],
)
def test_a_rate_of_training_from_scratch_is_said_of_trained_weights(
    optimizer, model, warns, caplog
):
    config = from_dict({"optimizer": optimizer, "model": {"init_from": "there", **model}})
    _warn_of_rate(config.optimizer, config.model.lora_rank, "model.init_from = 'there'")
    assert ("warning: optimizer.learning_rate = 0.0003 is high" in caplog.text) is warns


def test_that_trained_weights_have_no_initial_values_of_mup_is_said(caplog):
    config = from_dict({"optimizer": {"mup_base_width": 32, "learning_rate": 1e-5}})
    with caplog.at_level("INFO", "jaxscale"):
        _warn_of_rate(config.optimizer, False, "model.init_from = 'there'")
    assert "= 32 scales learning rates, and no initial values: those are of model" in caplog.text


@pytest.mark.parametrize(
    ("source", "stored", "said"),
    [
        ("bfloat16", "", "stored in bfloat16, exactly as in there"),
        (
            "float32",
            "",
            "rounded from the float32 of there; for exact weights set model.param_dtype=float32",
        ),
        ("float32", "float32", "stored in float32, exactly as in there"),
    ],
)
def test_how_frozen_weights_are_stored_is_said(source, stored, said, caplog):
    theirs = ModelConfig(param_dtype=source)
    weights = RunWeights(pathlib.Path("there"), theirs, 64, 0, False, {})
    with caplog.at_level("INFO", "jaxscale"):
        _say_type(ModelConfig(lora_rank=4, param_dtype=stored), weights)
    assert said in caplog.text


def test_a_run_that_has_begun_keeps_the_type_of_its_frozen_weights():
    config = from_dict({"model": {"lora_rank": 4}})
    new = config.model
    begun = {"model": {"lora_rank": 4, "param_dtype": "float32"}}
    assert with_stored_type(new, begun).param_dtype == "float32"
    assert with_stored_type(new, {}) is new
    assert with_stored_type(new, to_dict(config)) is new
