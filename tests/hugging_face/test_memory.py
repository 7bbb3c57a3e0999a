"""What the host holds while a checkpoint is read, and while one is written."""

import json
import os
import subprocess
import sys

import pytest

from tests.hugging_face import conversion_memory


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_host_holds_a_tensor_and_its_transposed_form_at_a_time(tmp_path):
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
    # A CPU is the device, too, which transposes: what it is given, and what becomes of that.
    assert 0 < found["read_peak_bytes"] <= 2 * found["largest_tensor_bytes"], found
    # Half as many bytes in bfloat16.
    assert 0 < found["write_peak_bytes"] <= 1.1 * found["largest_tensor_bytes"] / 2, found
