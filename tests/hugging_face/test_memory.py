"""What the host holds while a checkpoint is read, and while one is written."""

import json
import os
import subprocess
import sys

import pytest

from tests.hugging_face import conversion_memory


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_host_holds_one_tensor_at_a_time(tmp_path):
    conversion_memory.make_zeros(tmp_path / "model")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.hugging_face.conversion_memory",
            str(tmp_path / "model"),
            "2",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_ENABLE_X64": "0"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["params_bytes"] > 4 * found["largest_tensor_bytes"]
    assert 0 < found["read_peak_bytes"] <= 1.1 * found["largest_tensor_bytes"], found
    # Half as many bytes in bfloat16.
    assert 0 < found["write_peak_bytes"] <= 1.1 * found["largest_tensor_bytes"] / 2, found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_limited_save_holds_no_more_than_it_may(tmp_path):
    """2.1 GB of arrays, which a save copies as a whole unless it is limited to 1 GB."""
    peaks = {}
    for host_gb in (0, 1):
        command = [sys.executable, "-c", SAVE, str(tmp_path / str(host_gb)), str(host_gb)]
        environ = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
        assert done.returncode == 0, done.stderr
        peaks[host_gb] = int(done.stdout)
    assert peaks[1] < 1.1e9 < peaks[0], peaks


SAVE = """
import contextlib, sys
import jax
from jaxscale.training.checkpoint import Checkpoints
from tests.hugging_face.conversion_memory import memory, start_peak

arrays = {str(i): jax.random.normal(jax.random.key(i), 2**25, "float32") for i in range(16)}
jax.block_until_ready(arrays)
with contextlib.closing(Checkpoints(sys.argv[1], host_gb=int(sys.argv[2]), report=len)) as saving:
    begin = start_peak()
    saving.save(0, arrays, {})
    saving.wait()
    assert saving.outcome() == ""
print(memory("VmHWM") - begin)
"""
