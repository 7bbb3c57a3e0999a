"""Persistent compilation cache: compiled programs on disk, read by later runs."""

import contextlib
import hashlib
import os
import pathlib
import platform
import time

import jax

from jaxscale.distributed.initialize import num_devices
from jaxscale.storage.user_cache import VARIABLE, cache_folder, user_cache

SHORTEST_SECONDS = 0.3
"""Programs that compile faster are not stored."""

MOST_DAYS = 90
"""The age at which programs are removed."""

_hits = 0


def keep_compiled_programs() -> pathlib.Path | None:
    """Enables JAX's persistent compilation cache, in the user's cache folder.

    File names are digests of the program, its options, the versions of JAX and the compilers, and
    the device type (by JAX). Folders are by processor type, since CPU programs use its instruction
    set. JAX's settings, such as JAX_COMPILATION_CACHE_DIR, take precedence.

    Off for several CPU devices: ranks of a program read from a file start its collectives in
    different orders, and deadlock (jaxlib 0.12.0). Off for several processes, unless the
    environment names a folder that all of them see: XLA for GPUs divides autotuning over the
    processes, and a process that read the program from its host would not take part.

    Returns:
      The folder, or None if the cache is off.

    Raises:
      ValueError: the folder that the environment names cannot be written to.
    """
    name = os.environ.get(VARIABLE)
    several_cpus = num_devices() > 1 and jax.default_backend() == "cpu"
    unshared = jax.process_count() > 1 and name is None
    if name == "" or several_cpus or unshared or jax.config.jax_compilation_cache_dir:
        return None
    try:
        folder = (cache_folder() or user_cache()) / "compiled" / _processor()
        folder.mkdir(parents=True, exist_ok=True)
        _remove_old(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        if name:
            raise ValueError(
                f"{VARIABLE} = {name}: compiled programs cannot be stored there "
                f"({getattr(error, 'strerror', None) or error}); name a folder that can be written "
                "to, or leave it empty to disable the cache"
            ) from None
        return None  # a home that cannot be written to
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST_SECONDS)
    jax.monitoring.register_event_listener(_listen)
    return folder


def programs_read() -> int:
    """The number of programs that this process has read from the cache."""
    return _hits


def _listen(event: str, **_: object) -> None:
    global _hits
    _hits += event == "/jax/compilation_cache/cache_hits"


def _processor() -> str:
    """The processor's architecture, on Linux with a digest of its features."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return f"{platform.machine()}-{hashlib.sha256(line.encode()).hexdigest()[:12]}"
    return platform.machine()


def _remove_old(folder: pathlib.Path) -> None:
    ages = dict[pathlib.Path, float]()
    for file in folder.iterdir():
        with contextlib.suppress(OSError):  # another process may have removed it
            ages[file] = file.stat().st_mtime
    # Ages are relative to the newest file: a clock that is temporarily ahead removes nothing.
    newest = min(time.time(), max(ages.values(), default=0.0))
    for file, written in ages.items():
        with contextlib.suppress(OSError):
            if written < newest - MOST_DAYS * 24 * 3600:
                file.unlink()
