"""Traces on disk."""

import subprocess
import sys

from jaxscale.config.model import ModelConfig
from jaxscale.planner.model import traces

SETTINGS = ModelConfig(num_layers=2, d_model=32, num_heads=2, num_kv_heads=2, head_dim=16, d_ff=48)
FOUND = """
import sys
from tests.planner.model.test_traces import SETTINGS, traces
assert "jax" not in sys.modules
print(traces.model_trace(SETTINGS).num_params, "jax" in sys.modules)
"""


def test_a_model_is_traced_once_and_then_read_without_jax(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path))
    traces.model_trace.cache_clear()
    made = traces.model_trace(SETTINGS)
    (file,) = tmp_path.glob("traces/*.json")
    traces.model_trace.cache_clear()
    assert traces.model_trace(SETTINGS) == made  # read: the same to every field
    printed = subprocess.check_output([sys.executable, "-c", FOUND], text=True)
    assert printed.split() == [str(made.num_params), "False"]
    file.write_text(file.read_text()[:-9])
    traces.model_trace.cache_clear()
    assert traces.model_trace(SETTINGS) == made  # a damaged file is made anew
    traces.model_trace.cache_clear()
    assert traces.model_trace(SETTINGS) == made
    monkeypatch.setenv("JAXSCALE_CACHE", "")
    traces.model_trace.cache_clear()
    file.unlink()
    assert traces.model_trace(SETTINGS) == made
    assert not list(tmp_path.glob("traces/*.json"))
