"""Commands in processes that cannot import JAX, which takes seconds: what they say comes before."""

import subprocess
import sys

PROGRAM = """
import runpy, sys
sys.modules["jax"] = None
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def without_jax(command: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m jaxscale.COMMAND WORDS...`."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, f"jaxscale.{command}", *words],
        capture_output=True,
        text=True,
        timeout=300,
    )
