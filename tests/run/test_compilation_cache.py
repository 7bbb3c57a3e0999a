"""Compiled programs are kept between processes, where that is safe."""

import os
import subprocess
import sys

import jax
import pytest

from jaxscale.run import compilation_cache
from jaxscale.run.compilation_cache import MOST_DAYS, keep_compiled_programs


@pytest.fixture(autouse=True)
def without_the_suites():
    """Folder, which as a setting of JAX comes first."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", folder)


PROGRAM = """
import jax, numpy as np
from jaxscale.run import compilation_cache
compilation_cache.SHORTEST_SECONDS = 0.0
folder = compilation_cache.keep_compiled_programs()
step = jax.jit(lambda x: jax.lax.scan(lambda c, _: (np.sin(1) * c @ c, c.sum()), x, length=3))
found = step.lower(np.eye(3) + 0.1).compile()(np.eye(3) + 0.1)
print(compilation_cache.programs_read(), *(np.asarray(x).tobytes().hex() for x in found), folder)
"""


def run(folder) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1", "JAXSCALE_CACHE": str(folder)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.proof
def test_a_second_process_reads_what_the_first_has_compiled(tmp_path):
    count, *results, folder = run(tmp_path)
    assert count == "0"
    assert folder.startswith(f"{tmp_path}/compiled/")
    (kept,) = tmp_path.glob("compiled/*/jit*-cache")
    old = kept.with_name("jit_old-cache")
    old.touch()
    os.utime(old, (0, kept.stat().st_mtime - (MOST_DAYS + 1) * 24 * 3600))
    assert run(tmp_path) == ["1", *results, folder]
    assert not old.exists()
    assert run("") == ["0", *results, "None"]


def test_several_devices_of_a_cpu_keep_nothing():
    """Their programs, read from a file, wait for each other for ever."""
    assert keep_compiled_programs() is None


def test_a_user_without_a_home_keeps_nothing(monkeypatch):
    """As a container has that runs under any user id, without HOME."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.delenv(compilation_cache.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert keep_compiled_programs() is None


def test_several_processes_keep_only_where_the_user_says(tmp_path, monkeypatch):
    """A program that is read by one process alone leaves the others waiting for it."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.delenv(compilation_cache.VARIABLE, raising=False)
    assert keep_compiled_programs() is None
    unusable = tmp_path / "file"
    unusable.touch()
    monkeypatch.setenv(compilation_cache.VARIABLE, str(unusable))
    with pytest.raises(ValueError, match=f"JAXSCALE_CACHE = {unusable}: .*Not a directory.*empty"):
        keep_compiled_programs()
