"""Several processes as one run: they start together, are compared, agree on decisions, and end
together.

JAX is imported inside functions: settings that can be compared without it are compared first.
"""

import contextlib
import glob
import importlib.util
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from jaxscale import command_line
from jaxscale.distributed import consistency, rendezvous
from jaxscale.distributed import launcher as clusters
from jaxscale.distributed.control_channel import ControlChannel
from jaxscale.distributed.initialize import initialize_jax
from jaxscale.distributed.launcher import ProcessGroup
from jaxscale.hardware import (
    GPU_MEMORY_FRACTION,
    GPU_MEMORY_VARIABLES,
    gpu_memory_fraction,
    host_memory_bytes,
)
from jaxscale.storage.local_tier import VARIABLE, store_of

START_SECONDS = 300
"""How long processes wait for each other to start, and for the devices of all to appear."""

LOOPBACK_SECONDS = 60
"""The same when all processes are on one host and start at once."""

FOLDER_SECONDS = 10
"""How long a network file system may take to show a new file to another host."""

DEVICE_FILES = ("accel*", "vfio/[0-9]*", "nvidia*", "dxg", "kfd", "dri/render*")
"""Files in /dev of TPUs, and of GPUs: NVIDIA, WSL, AMD, and others."""

PINNED_FRACTION = 0.8
"""Share of the host's memory that may be pinned for GPUs; allocated on use."""

PLUGINS = ("libtpu", "jax_cuda13_plugin")
"""Packages of the extra `aot`."""

_channel: ControlChannel | None = None  # one per process, as JAX's cluster


@contextlib.contextmanager
def together(
    cluster: ProcessGroup | None, settings: Mapping[str, Any], workdir: pathlib.Path | None = None
) -> Iterator[None]:
    """Runs the body as one of several processes; call it before any device is used.

    They are compared first, and all refuse to start when they differ. When one fails or dies inside
    the body, all end, and each names the one that failed. A single process only runs the body.

    Args:
      settings: flags and config, which must be the same everywhere.
      workdir: a folder that all processes share.

    Raises:
      SystemExit: with status 2 and one line, when the processes differ.
    """
    global _channel
    leave_absent_hardware_alone()
    with command_line.refusals():
        take_gpu_memory()
    cluster = cluster or _tpu_pod() or clusters.ALONE
    if cluster.num_processes == 1:
        yield
        return
    with command_line.refusals():
        _channel = _join(cluster, settings)
    try:
        command_line.set_process_log(_channel.process_id, _report)
        with command_line.refusals():
            if workdir:
                _check_folder(_channel, workdir)
            initialize_jax(_channel, cluster, START_SECONDS)
        yield
    except BaseException as error:
        _end(_channel, error)
    _channel.close()
    _channel = None


def from_first(topic: str, value: Any) -> Any:
    """Process 0's value, in every process."""
    if _channel is None:
        return value
    if _channel.process_id:
        return _channel.await_answer(topic)
    _channel.tell(topic, value)
    return value


def first[T](topic: str, work: Callable[[], T]) -> T:
    """Does the work in process 0, then in the others, which find the files that it wrote."""
    if _channel is None:
        return work()
    if _channel.process_id:
        _channel.await_answer(topic)
        return work()
    result = work()
    _channel.tell(topic, None)
    return result


def all_reports(topic: str, report: Any) -> list[Any]:
    """The reports of all processes, in order, in every process."""
    return _channel.gather(topic, report, lambda reports: reports) if _channel else [report]


def alone() -> bool:
    """Whether this process is the whole run."""
    return _channel is None


def first_of_all() -> bool:
    """Whether this is process 0, or the only one."""
    return _channel is None or _channel.process_id == 0


def stops(point: int, request: str = "") -> str:
    """The request by which all processes stop now; called by each at the same points of the loop.

    Args:
      point: counts the calls, from 1.
      request: what asked this process to stop, such as "SIGTERM"; "" when nothing did.

    Returns:
      The request, with the process that got it if there are several; "" to continue.
    """
    if _channel is None:
        return request
    found = _channel.stops(point, request)
    return f"{found[1]} to {_channel.names[found[0]]}" if found else ""


def answer_with(activity: Callable[[], tuple[str, bool]], dump: Callable[[str], Any]) -> None:
    """Sets the answers of this process to a suspected hang: its activity and whether it is past its
    deadline; and the report that it prints in a hang."""
    if _channel is not None:
        _channel.activity, _channel.dump = activity, dump


def inquire() -> None:
    """Asks all for their activity, since this process is past its deadline; ends a hung run."""
    assert _channel
    _channel.inquire()


def leave(text: str, status: int) -> NoReturn:
    """Ends this process at once, and with it the run; may be called in any thread.

    Args:
      text: the reason, in one line.
      status: of every process.
    """
    if _channel is not None and status:
        _channel.fail(text, patience=0, status=status)
    with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
        print(text, file=sys.stderr, flush=True)
    if _channel is not None and _channel.process_id == 0:
        time.sleep(1.5)  # as in `_end`
    os._exit(status)


def _join(cluster: ProcessGroup, settings: Mapping[str, Any]) -> ControlChannel:
    host = cluster.address[0]
    itself = clusters.loopback(host)
    report = {
        "host": clusters.host_identity(),
        "loopback": itself,
        "alike": consistency.describe_process(settings),
    }
    hint = f"; {host} is a loopback name, so all processes must be on one host" if itself else ""
    channel, _ = rendezvous.join(
        cluster.coordinator,
        cluster.address,
        cluster.num_processes,
        cluster.process_id,
        report,
        lambda reports: {"refusal": _refusal(cluster, reports)},
        LOOPBACK_SECONDS if itself else START_SECONDS,
        hint,
        lambda other: consistency.matches_form(other, report),
    )
    return channel


def _refusal(cluster: ProcessGroup, reports: Sequence[dict[str, Any]]) -> str:
    """The reason why these processes cannot run together; "" when they can."""
    names = [rendezvous.name(i, report["host"][0]) for i, report in enumerate(reports)]
    num_hosts = len({tuple(report["host"]) for report in reports})
    for name, report in zip(names, reports):
        if report["loopback"] and num_hosts > 1:
            text = clusters.loopback_message(
                cluster.coordinator, report["loopback"], num_hosts, cluster.address[1]
            )
            return f"{name}: {text}"
    return consistency.first_difference([report["alike"] for report in reports], names)


def _check_folder(channel: ControlChannel, workdir: pathlib.Path) -> None:
    """Verifies that all processes see the same folder as process 0."""
    token = workdir / f".processes_{os.getpid()}_{time.time_ns()}"
    if channel.process_id == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        token.touch()
    file = from_first("token", token.name)
    deadline = time.monotonic() + FOLDER_SECONDS
    while not (seen := (workdir / file).exists()) and time.monotonic() < deadline:
        os.listdir(workdir) if workdir.is_dir() else None  # refreshes NFS's cache of the folder
        time.sleep(0.2)

    def decide(reports: list[bool]) -> str:
        token.unlink()
        for name, seen in zip(channel.names, reports):
            if not seen:
                advice = "give"
                if store := store_of(workdir):
                    advice = f"for {store.url} set {VARIABLE} to"
                return (
                    f"--workdir {workdir} is not shared: {name} does not see a file that "
                    f"{channel.names[0]} wrote there; {advice} a folder that every host has mounted"
                )
        return ""

    if refusal := channel.gather("folder", seen, decide):
        raise ValueError(refusal)


def leave_absent_hardware_alone() -> None:
    """Sets JAX to the CPU when there is no accelerator and JAX_PLATFORMS is not set.

    The compilers of the extra `aot` are plugins of JAX: at each start they would report, with
    tracebacks, that they find no hardware.
    """
    if "JAX_PLATFORMS" in os.environ or not any(map(importlib.util.find_spec, PLUGINS)):
        return
    if not any(glob.glob(f"/dev/{name}") for name in DEVICE_FILES):
        os.environ["JAX_PLATFORMS"] = "cpu"


def take_gpu_memory() -> None:
    """Sets the share of a GPU's memory that JAX allocates to the planner's, and lets XLA pin most
    of the host's memory for offloading, unless the environment sets either. The defaults are 75 %
    of a GPU, and 64 GiB of pinned memory for all GPUs of a process.

    Raises:
      ValueError: the environment's share of a GPU's memory is not valid.
    """
    gpu_memory_fraction()
    if not any(map(os.environ.get, GPU_MEMORY_VARIABLES)):
        os.environ[GPU_MEMORY_VARIABLES[0]] = str(GPU_MEMORY_FRACTION)
    pinned = int(PINNED_FRACTION * host_memory_bytes() / 2**30)
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(pinned, 1)))


def _tpu_pod() -> ProcessGroup | None:
    """The process group of a TPU pod, as JAX finds it in variables or host metadata."""
    if not _has_tpu():
        return None
    # JAX has no public API that reads the values without connecting at once.
    from jax._src import cloud_tpu_init  # noqa: PLC0415
    from jax._src.clusters import GceTpuCluster, GkeTpuCluster  # noqa: PLC0415

    for pod in (GkeTpuCluster, GceTpuCluster):
        if cloud_tpu_init.running_in_cloud_tpu_vm and pod.is_env_present():
            count = pod.get_process_count()
            if count > 1:
                address = pod.get_coordinator_address(START_SECONDS, None)
                return ProcessGroup(address, count, pod.get_process_id(), "the TPU pod")
    return None


def _has_tpu() -> bool:
    """Whether this host may have a TPU, from its files: asking JAX takes seconds."""
    files = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    return bool(files and importlib.util.find_spec("libtpu"))


def _report(message: str, status: int) -> tuple[str, int]:
    """Reports to the others that this process refuses to continue; returns the text to print here
    and the exit status."""
    assert _channel
    me = _channel.process_id
    words, status = _announce(_channel, message, 0.5 if me else 0, status)
    return f"{_channel.names[me]}: {words}" if me else words, status


def _announce(channel: ControlChannel, text: str, patience: float, status: int) -> tuple[str, int]:
    """Reports an error to the others; returns the text that this process prints, and the exit
    status of all, by which each one's supervisor decides.

    Often all find the same error at once: it is printed once on each host. Or another process
    died, and this one has only lost its connection to it.
    """
    me = channel.process_id
    who, said, status = channel.fail(text, patience, status=status)
    if said != text:
        return f"{channel.names[who]} failed, so this one ends: {said}", status
    hosts = [name.partition(" on ")[2] for name in channel.names]
    first = hosts.index(hosts[me])
    return text if me in (who, first) else f"the same error as {channel.names[first]}", status


def _end(channel: ControlChannel, error: BaseException) -> NoReturn:
    """Reports an error to the others and ends this process; JAX would wait minutes for them."""
    status = 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 1
    else:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        # Process 0 reports first, and all wait for the report of a death.
        words, status = _announce(channel, text, 1.5 if channel.process_id else 1, status)
        if words == text:
            print(f"error in {channel.names[channel.process_id]}:", file=sys.stderr)
            traceback.print_exception(error)
        else:
            print(f"error: {words}", file=sys.stderr)
    if status == 0:
        channel.close()
        raise error
    sys.stdout.flush()
    sys.stderr.flush()
    if channel.process_id == 0:
        time.sleep(1.5)  # the report must arrive before the others notice the closed connection
    os._exit(status)
