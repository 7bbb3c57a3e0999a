"""Eight virtual CPU devices and float64 for every test, set before JAX is imported.

Programs here run for milliseconds and compile for seconds, so LLVM and ptxas optimise nothing:
XLA's own passes, and with them memory and collectives, are as always. Eight devices share two
cores, so that a collective may wait long for its last rank.
"""

import collections
import ctypes
import gc
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

TIERS = {"slow": "-m slow -n 2"}
"""Markers of tests that run only when pytest is asked for them, and its arguments then."""

LEFT_OUT = collections.Counter[str]()
"""Tests that this session has left to each tier."""

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tiers of `TIERS`, unless there is a -m or a test is named by its node id."""
    if config.option.markexpr or any("::" in argument for argument in config.args):
        return
    chosen = list[pytest.Item]()
    for item in items:
        if tier := next((one for one in TIERS if item.get_closest_marker(one)), ""):
            LEFT_OUT[tier] += 1
        else:
            chosen.append(item)
    items[:] = chosen


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (to_controller := getattr(session.config, "workeroutput", None)) is not None:
        to_controller["left_out"] = dict(LEFT_OUT)


@pytest.hookimpl(optionalhook=True)  # of xdist: each worker collects all tests
def pytest_testnodedown(node: Any) -> None:
    for tier, count in getattr(node, "workeroutput", {}).get("left_out", {}).items():
        LEFT_OUT[tier] = count


def pytest_unconfigure(config: pytest.Config) -> None:
    for folder in MADE:
        shutil.rmtree(folder, ignore_errors=True)
    if not hasattr(config, "workeroutput"):
        for tier, arguments in TIERS.items():
            if count := LEFT_OUT[tier]:
                print(f"left to the tier {tier} (pytest {arguments}): {count}")


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
