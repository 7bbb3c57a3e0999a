"""Options of the step: those of the device, without what this XLA does not know."""

import logging

import jax
import pytest

from jaxscale.layout import Layout
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training import xla_options
from jaxscale.training.xla_options import step_options


def test_a_cpu_needs_none():
    assert step_options(make_mesh(Layout(data=8), jax.devices())) == {}


def test_an_option_that_this_xla_does_not_know_is_left_out_and_logged(monkeypatch, caplog):
    known = xla_options.XlaFlag("xla_cpu_enable_fast_math", False, "an option that there is")
    unknown = xla_options.XlaFlag("xla_cpu_no_such_option", True, "to see it refused")
    monkeypatch.setitem(xla_options.XLA_FLAGS, "cpu", (unknown, known))
    monkeypatch.setattr(logging.getLogger("jaxscale"), "propagate", True)
    mesh = make_mesh(Layout(data=8), jax.devices())
    assert step_options(mesh) == {"xla_cpu_enable_fast_math": False}
    assert "xla_cpu_no_such_option" in caplog.text


def test_an_option_with_a_wrong_value_is_an_error(monkeypatch):
    wrong = xla_options.XlaFlag("xla_backend_optimization_level", True, "a number, not a truth")
    monkeypatch.setitem(xla_options.XLA_FLAGS, "cpu", (wrong,))
    with pytest.raises(RuntimeError, match="xla_backend_optimization_level of xla_options"):
        step_options(make_mesh(Layout(data=8), jax.devices()))


def test_this_xla_takes_the_flags_for_gpus():
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert xla_options.refusals(xla_options.XLA_FLAGS["gpu"], one) == {}


def test_every_flag_has_a_reason():
    for flags in xla_options.XLA_FLAGS.values():
        assert all(flag.name.startswith("xla_") and len(flag.reason) > 20 for flag in flags)
