"""What commands do with a config before they have an engine."""

import dataclasses
import json
import logging

import jax

from jaxscale import config as configs
from jaxscale.run import setup


def test_a_layout_left_to_the_planner_is_taken_and_kept(tmp_path, caplog):
    config = configs.load("configs/tiny.py", ["layout=auto", "layout.tensor=2"])
    logging.getLogger("jaxscale").propagate = True
    with caplog.at_level(logging.INFO, logger="jaxscale"):
        taken = setup.planned(config, tmp_path)
    assert not taken.layout.auto
    assert (taken.layout.tensor, taken.layout.num_devices) == (2, jax.device_count())
    assert "layout = 'auto' takes" in caplog.text
    # A run that has begun goes on with the layout that it took, whatever would be taken today.
    other = dataclasses.replace(config, layout=configs.Layout(data=1, fsdp=8))
    (tmp_path / "config.json").write_text(json.dumps(configs.to_dict(other)))
    assert setup.planned(config, tmp_path) == other


def test_a_layout_that_is_said_stays():
    config = configs.load("configs/tiny.py")
    assert setup.planned(config) is config
