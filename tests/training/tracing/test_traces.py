"""Traces on disk."""

import subprocess
import sys

from jaxscale.config.model import ModelConfig
from jaxscale.training.tracing import traces

SETTINGS = ModelConfig(num_layers=2, d_model=32, num_heads=2, num_kv_heads=2, head_dim=16, d_ff=48)
FOUND = """
import sys
from tests.training.tracing.test_traces import SETTINGS, traces
assert "jax" not in sys.modules
work = traces.model_work(SETTINGS, 64, 64)
print(traces.model_trace(SETTINGS).num_params, work.stacks[0].flops, "jax" in sys.modules)
"""


def test_a_model_is_traced_once_and_then_read_without_jax(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path))
    traces._trace.cache_clear()
    made = traces.model_trace(SETTINGS)
    (file,) = tmp_path.glob("traces/*/*.json")
    work = traces.model_work(SETTINGS, 64, 64)
    traces._trace.cache_clear()
    assert traces.model_trace(SETTINGS) == made  # read: the same to every field
    assert traces.model_work(SETTINGS, 64, 64) == work
    printed = subprocess.check_output([sys.executable, "-c", FOUND], text=True)
    assert printed.split() == [str(made.num_params), str(work.stacks[0].flops), "False"]
    file.write_text(file.read_text()[:-9])
    traces._trace.cache_clear()
    assert traces.model_trace(SETTINGS) == made  # a damaged file is made anew
    traces._trace.cache_clear()
    assert traces.model_trace(SETTINGS) == made
    for n in range(traces.VERSIONS):
        monkeypatch.setattr(traces, "_sources", lambda n=n: f"{n}" * 16)
        traces._trace.cache_clear()
        assert traces.model_trace(SETTINGS) == made
    kept = {path.name for path in (tmp_path / "traces").iterdir()}
    assert kept == {f"{n}" * 16 for n in range(traces.VERSIONS)}  # the first version's are gone
    monkeypatch.setenv("JAXSCALE_CACHE", "")
    traces._trace.cache_clear()
    assert traces.model_trace(SETTINGS) == made
    assert not file.exists()
