"""Learning-rate schedules, and what becomes of them when a run is resumed."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import train
from jaxscale.config import from_dict, to_dict
from jaxscale.config.optimizer import SCHEDULES
from jaxscale.training import learning_rate
from jaxscale.training.learning_rate import early_end, rate_change, schedule_of, with_schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_ends(name: str) -> None:
    rate = learning_rate.schedule(name, learning_rate=3e-4, final=0.1, warmup_steps=10, steps=110)
    rates = np.asarray(jax.jit(jax.vmap(rate))(jnp.arange(130)))
    np.testing.assert_allclose(rates[:10], 3e-4 * np.arange(1, 11) / 10, rtol=1e-15)
    assert rates[10] == 3e-4
    last = 3e-4 if name == "constant" else 3e-4 * 0.1
    assert (rates[110:] == last).all()
    assert (np.diff(rates[10:]) <= 0).all()
    middle = {"cosine": 0.55, "linear": 0.55, "wsd": 1.0, "constant": 1.0}[name]
    np.testing.assert_allclose(rates[60], 3e-4 * middle, rtol=1e-14)


def test_wsd_decays_in_the_last_fifth() -> None:
    rate = learning_rate.schedule("wsd", learning_rate=1.0, final=0.0, warmup_steps=5, steps=100)
    assert rate(80) == 1.0
    np.testing.assert_allclose(rate(85), 0.5, rtol=1e-15)
    assert rate(81) < 1.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_is_the_same_on_host_and_device(name: str) -> None:
    rate = learning_rate.schedule(name, learning_rate=3e-4, final=0.1, warmup_steps=7, steps=1000)
    steps = [0, 6, 7, 333, 801, 999, 1000]
    with jax.transfer_guard("disallow"):
        host = np.asarray([rate(step) for step in steps])
    np.testing.assert_array_max_ulp(jax.jit(jax.vmap(rate))(jnp.asarray(steps)), host, 2)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.schedule = 'step'.*wsd"):
        learning_rate.schedule("step", learning_rate=1.0, final=0.1, warmup_steps=0, steps=1)


def saved(**optimizer):
    """The config of a checkpoint of a run of 100 steps."""
    return to_dict(from_dict({"optimizer": optimizer, "run": {"steps": 100}}))


def resumed(before, **optimizer):
    config = from_dict({"optimizer": optimizer, "run": {"steps": 200}})
    return with_schedule(config, before)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_training_on_leaves_the_past_and_stays_at_the_final_rate(schedule):
    before = saved(schedule=schedule, warmup_steps=10)
    config = resumed(before, schedule=schedule, warmup_steps=10)
    assert config.optimizer.schedule_steps == 100
    assert rate_change(before, config.optimizer, 200, 100) == ""
    past = schedule_of(from_dict(before).optimizer, 100)
    now = schedule_of(config.optimizer, config.schedule_steps)
    assert [now(step) for step in range(100)] == [past(step) for step in range(100)]
    assert {float(now(step)) for step in range(100, 200)} == {1e-3 * 0.1}


def test_a_checkpoint_from_before_the_setting_has_the_schedule_of_its_steps():
    before = saved()
    del before["optimizer"]["schedule_steps"]
    config = resumed(before)
    assert config.optimizer.schedule_steps == 100
    assert rate_change(before, config.optimizer, 200, 60) == ""


def test_the_setting_survives_a_second_resume():
    once = resumed(saved())
    assert resumed(to_dict(once)).optimizer.schedule_steps == 100


def test_a_new_run_is_told_that_its_schedule_ends_before_it_does():
    """As with the config.json of a shorter run."""
    shorter, run = {"schedule_steps": 5}, {"steps": 12}
    said = early_end(with_schedule(from_dict({"optimizer": shorter, "run": run}), {}).optimizer, 12)
    assert said.startswith("optimizer.schedule_steps = 5 is below run.steps = 12: from step 6 on")
    assert "the learning rate is 0.0001. If" in said
    assert "--config.optimizer.schedule_steps=None spreads" in said
    for optimizer in ({}, {"schedule_steps": 12}, shorter | {"schedule": "constant"}):
        assert not early_end(
            with_schedule(from_dict({"optimizer": optimizer, "run": run}), {}).optimizer, 12
        )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"schedule_steps": 200},
            "0.0001 at step 100, 0.00055 at step 101, where it would have been 0.0001",
        ),
        (
            {"learning_rate": 2e-3},
            "0.0001 at step 100, 0.0002 at step 101, where it would have been 0.0001",
        ),
        ({"schedule": "constant"}, "0.0001 at step 100, 0.001 at step 101, where"),
    ],
)
def test_a_changed_schedule_says_what_the_next_step_gets(change, line):
    before = saved()
    assert f"learning rate: {line}" in rate_change(
        before, resumed(before, **change).optimizer, 200, 100
    )


def test_the_hint_trains_longer_without_a_jump():
    """What it says for a constant rate keeps the rate, and ends in a decay."""
    constant = from_dict({"optimizer": {"schedule": "constant"}, "run": {"steps": 100}})
    hint = train._how_to_train_longer(constant.run.steps, constant.optimizer)
    settings = dict(re.findall(r"--config\.(\S+)=(\w+)", hint))
    assert settings == {
        "run.steps": "200",
        "optimizer.schedule": "wsd",
        "optimizer.schedule_steps": "200",
    }
    before = saved(schedule="constant")
    config = resumed(before, schedule="wsd", schedule_steps=200)
    assert "0.001 at step 101, where it would have been 0.001" in (
        rate_change(before, config.optimizer, 200, 100)
    )
    assert schedule_of(config.optimizer, 200)(200) == 1e-4
    cosine = dataclasses.replace(constant, optimizer=from_dict(saved()).optimizer)
    hint = train._how_to_train_longer(cosine.run.steps, cosine.optimizer)
    assert "--config.run.steps=200; the learning rate continues from 0.0001" in hint
    assert "schedule_steps" not in hint
