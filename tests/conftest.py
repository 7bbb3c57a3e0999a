"""Eight virtual CPU devices and float64 for every test, set before JAX is imported.

Programs here run for milliseconds and compile for seconds, so LLVM and ptxas optimise nothing:
XLA's own passes, and with them memory and collectives, are as always. Eight devices share two
cores, so that a collective may wait long for its last rank.
"""

import collections
import contextlib
import ctypes
import gc
import hashlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_ENABLE_X64"] = "1"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # of operations in programs: 4 % of the suite
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_gpu_disable_gpuasm_optimizations=true",
        "--xla_cpu_collective_call_terminate_timeout_seconds=300",
    )
)

TIERS = {"proof": "-m proof -n 2 --dist worksteal", "slow": "-m slow -n 2"}
"""Markers of tests that run only when pytest is asked for them, and its arguments then."""

LEFT_OUT = collections.Counter[str]()
"""Tests that this session has left to each tier."""

PROCESSOR_SECONDS = [0.0]
"""Of xdist's workers, and of what their tests have started."""

MADE = list[str]()
"""Folders that this process has made, and removes."""

# Where Python keeps no bytecode, each of the hundred processes that tests start would parse JAX and
# what it needs anew, for 3 s. They keep theirs in a folder, and xdist's workers are among them.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    os.environ["PYTHONPYCACHEPREFIX"] = tempfile.mkdtemp(prefix="jaxscale_bytecode_")
    MADE.append(os.environ["PYTHONPYCACHEPREFIX"])

# Commands of tests keep compiled programs in a folder of the suite's own.
if "JAXSCALE_CACHE" not in os.environ:
    os.environ["JAXSCALE_CACHE"] = tempfile.mkdtemp(prefix="jaxscale_compiled_")
    MADE.append(os.environ["JAXSCALE_CACHE"])

PROGRAMS = "JAXSCALE_TEST_CACHE"
"""The environment variable that names the folder of compiled programs instead of the user's; empty
keeps none."""
MOST_BYTES = 2**30
"""Of kept programs; the least recently read ones are removed first."""
SHORTEST_SECONDS = 0.1
"""What compiles in less is not kept."""

# Their compilers hold many megabytes each, on pages of 2 MB where Linux has them.
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")

# Compilers allocate millions of small objects, and here many processes' worth of them in one.
gc.set_threshold(100_000, 50, 100)
if sys.platform == "linux":
    M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
    for option, num_bytes in (
        (M_TRIM_THRESHOLD, 2**30),
        (M_TOP_PAD, 2**26),
        (M_MMAP_THRESHOLD, 2**30),
    ):
        ctypes.CDLL(None).mallopt(option, num_bytes)

MAPS = pathlib.Path("/proc/self/maps")
MOST_MAPS = 20_000
"""Of 65,530 that Linux gives a process: each compiled program has a few, and a process that has
used them up dies in the next compile."""
COUNT_EVERY_SECONDS = 5
"""Of processor time, in which a process compiles hundreds of programs at most; to count many maps
takes milliseconds, and most tests none."""
COUNTED = [0.0]


@pytest.fixture(autouse=True)
def few_compiled_programs() -> Iterator[None]:
    """Drops compiled programs when there are many."""
    yield
    if time.process_time() < COUNTED[0] + COUNT_EVERY_SECONDS:
        return
    COUNTED[0] = time.process_time()
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        import jax  # noqa: PLC0415 - after the environment is set, and not in tests without it

        jax.clear_caches()
        gc.collect()


def folder_of_programs() -> pathlib.Path | None:
    """Of this kind of processor, whose features programs use; None where none are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = os.environ.get(PROGRAMS, f"{cache}/jaxscale/tests")
    if not name:
        return None
    cpu = pathlib.Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return pathlib.Path(name).expanduser() / hashlib.sha256(features.encode()).hexdigest()[:12]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keeps the programs of one device that this process compiles, and reads what was kept.

    Those of several devices hang now and then when they are read (jaxlib 0.12), and
    `run/compilation_cache.py` keeps none either.
    """
    folder = folder_of_programs()
    if not folder or not session.items or "jax" not in sys.modules:
        return
    import jax  # noqa: PLC0415 - after the environment is set, and not in tests without it
    from jax._src import compiler  # noqa: PLC0415

    if not hasattr(compiler, "_get_cache_key"):  # JAX has no setting for this
        return

    def key(options: Any, backend: Any, computation: Any, devices: Any, *more: Any, **named: Any):
        if devices.size == 1:
            return key_of_one(options, backend, computation, devices, *more, **named)
        return None

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written to
        return
    key_of_one, compiler._get_cache_key = compiler._get_cache_key, key
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST_SECONDS)


@pytest.hookimpl(tryfirst=True)  # before fixtures that compile
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that is marked `compiles` finds no compiled program on disk, and leaves none."""
    kept = not item.get_closest_marker("compiles")
    if (jax := sys.modules.get("jax")) and jax.config.jax_enable_compilation_cache != kept:
        from jax.experimental.compilation_cache import compilation_cache  # noqa: PLC0415

        jax.config.update("jax_enable_compilation_cache", kept)
        compilation_cache.reset_cache()


def case_of(item: pytest.Function) -> str:
    return item.callspec.id if hasattr(item, "callspec") else ""


def check_cases(items: list[pytest.Function]) -> None:
    """The cases that proofs name are there.

    Raises:
      UsageError: one is not.
    """
    cases = collections.defaultdict[Any, set[str]](set)
    for item in items:
        cases[item.function].add(case_of(item))
    for function, found in cases.items():
        for mark in getattr(function, "pytestmark", ()):
            for case in mark.kwargs.get("but", ()) if mark.name == "proof" else ():
                if case not in found:
                    name = function.__name__
                    raise pytest.UsageError(f"{name} is a proof except {case!r}, no case of it")


def settle_tier(item: pytest.Function) -> str:
    """The test's tier, which is then its only one: a slow one is no proof, and cases that a proof
    names (`but`) are in the first tier. Returns "" for that."""
    proof = item.get_closest_marker("proof")
    first = proof.kwargs.get("but", ()) if proof else ()
    if case_of(item) in first or item.get_closest_marker("slow"):
        item.own_markers = [mark for mark in item.own_markers if mark.name != "proof"]
    found = [tier for tier in TIERS if item.get_closest_marker(tier)]
    if len(found) > 1:
        raise pytest.UsageError(f"{item.nodeid} is marked {' and '.join(found)}; one is allowed")
    return "".join(found)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Leaves out the tiers of `TIERS`, unless there is a -m or a test is named by its node id."""
    tiers = [settle_tier(item) for item in items]
    one_by_one = any("::" in argument for argument in config.args)
    if not one_by_one:
        check_cases(items)
    if config.option.markexpr or one_by_one:
        return
    LEFT_OUT.update(filter(None, tiers))
    items[:] = [item for item, tier in zip(items, tiers) if not tier]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (to_controller := getattr(session.config, "workeroutput", None)) is not None:
        to_controller["left_out"] = dict(LEFT_OUT)
        to_controller["processor_seconds"] = sum(os.times()[:4])


@pytest.hookimpl(optionalhook=True)  # of xdist: each worker collects all tests
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    PROCESSOR_SECONDS[0] += output.get("processor_seconds", 0.0)
    for tier, count in output.get("left_out", {}).items():
        LEFT_OUT[tier] = count


def pytest_unconfigure(config: pytest.Config) -> None:
    for folder in MADE:
        shutil.rmtree(folder, ignore_errors=True)
    if hasattr(config, "workeroutput"):
        return
    remove_old_programs()
    seconds = PROCESSOR_SECONDS[0] or sum(os.times()[:4])
    print(f"processor time: {seconds / 60:.1f} min")
    for tier, arguments in TIERS.items():
        if count := LEFT_OUT[tier]:
            print(f"left to the tier {tier} (pytest {arguments}): {count}")


def remove_old_programs() -> None:
    """Keeps `MOST_BYTES` of what was read last. Another session may remove the same files."""
    folder, found = folder_of_programs(), list[tuple[float, int, pathlib.Path]]()
    for file in folder.iterdir() if folder and folder.exists() else ():
        with contextlib.suppress(OSError):
            status = file.stat()
            found.append((max(status.st_atime, status.st_mtime), status.st_size, file))
    kept = 0
    for _, size, file in sorted(found, reverse=True):
        kept += size
        if kept > MOST_BYTES:
            file.unlink(missing_ok=True)


SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of a local server, which fsspec finds in the environment; it has an empty bucket."""
    pytest.importorskip("moto", reason="moto, of the extra dev, is the server that speaks S3")
    pytest.importorskip("s3fs", reason="s3fs, of the extra s3, is its client")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    with process, pytest.MonkeyPatch.context() as patch:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_ACCESS_KEY_ID", "anybody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").mkdir("bucket")
        yield url
        process.send_signal(signal.SIGKILL)
