"""Compiled programs, kept on disk between runs: one that starts again does not compile again."""

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
"""What compiles in less is not worth a file."""

MOST_DAYS = 90
"""Older programs are removed."""

_hits = 0


def keep_compiled_programs() -> pathlib.Path | None:
    """Keeps what this process compiles from now on, and reads what one like it has compiled.

    The names of the files are digests of the program, its options, the versions of JAX and the
    compilers, and the kind of device (by JAX); their folder is that of the processor's kind, since
    programs for CPUs use what it offers. JAX's own settings, such as JAX_COMPILATION_CACHE_DIR,
    come first.

    Not on CPUs with several devices: there, ranks of a program that was read from a file begin its
    collectives in different orders, and wait for each other for ever (jaxlib 0.12.0). Nor on
    several processes, unless the environment names a folder, which all of them must see: XLA for
    GPUs divides the search for the fastest kernels over the processes, and one that read the
    program from a file of its own host would not take part.

    Returns:
      The folder; None where nothing is kept.

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
    except (OSError, RuntimeError) as error:  # the second is of a user without a home
        if name:
            raise ValueError(
                f"{VARIABLE} = {name}: compiled programs cannot be kept there "
                f"({getattr(error, 'strerror', None) or error}); name a folder that can be written "
                "to, or leave it empty to keep none"
            ) from None
        return None  # a home that cannot be written to
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST_SECONDS)
    jax.monitoring.register_event_listener(_listen)
    return folder


def programs_read() -> int:
    """How many programs this process has read in place of compiling them."""
    return _hits


def _listen(event: str, **_: object) -> None:
    global _hits
    _hits += event == "/jax/compilation_cache/cache_hits"


def _processor() -> str:
    """Its architecture, and a digest of its features, where Linux tells them."""
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
    # A clock that is ahead for a while makes no program old.
    newest = min(time.time(), max(ages.values(), default=0.0))
    for file, written in ages.items():
        with contextlib.suppress(OSError):
            if written < newest - MOST_DAYS * 24 * 3600:
                file.unlink()
