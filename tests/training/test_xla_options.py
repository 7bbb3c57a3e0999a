"""Options of the step: those of the device, without what this XLA does not know."""

import logging

import jax

from jaxscale import hardware
from jaxscale.layout import Layout
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.xla_options import step_options


def test_a_cpu_needs_none():
    assert step_options(make_mesh(Layout(data=8), jax.devices())) == {}


def test_an_option_that_this_xla_does_not_know_is_left_out_and_logged(monkeypatch, caplog):
    known = hardware.XlaFlag("xla_cpu_enable_fast_math", False, "an option that there is")
    unknown = hardware.XlaFlag("xla_cpu_no_such_option", True, "to see it refused")
    monkeypatch.setitem(hardware.XLA_FLAGS, "cpu", (unknown, known))
    monkeypatch.setattr(logging.getLogger("jaxscale"), "propagate", True)
    mesh = make_mesh(Layout(data=8), jax.devices())
    assert step_options(mesh) == {"xla_cpu_enable_fast_math": False}
    assert "xla_cpu_no_such_option" in caplog.text
