"""Several processes as one run: they begin together, are alike, agree, and end together.

JAX is imported inside functions: what two processes can compare without it is compared first.
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
from jaxscale.distributed.control_channel import Peers
from jaxscale.distributed.initialize import initialize_jax
from jaxscale.distributed.launcher import ProcessGroup

START_SECONDS = 300
"""How long processes wait for each other to begin, and for the devices of all."""

LOOPBACK_SECONDS = 60
"""The same on one host, where all begin at once."""

FOLDER_SECONDS = 10
"""How long a network's file system may take to show a new file to another host."""

DEVICE_FILES = ("accel*", "vfio/[0-9]*", "nvidia*", "dxg", "kfd", "dri/render*")
"""Under /dev: of TPUs, and of GPUs by NVIDIA, under Windows, by AMD, and of any other kind."""

PLUGINS = ("libtpu", "jax_cuda13_plugin")
"""Packages of the extra `aot`."""

_peers: Peers | None = None  # of this process, as JAX's own cluster is


@contextlib.contextmanager
def together(
    cluster: ProcessGroup | None, settings: Mapping[str, Any], workdir: pathlib.Path | None = None
) -> Iterator[None]:
    """Runs the body as one of several processes; before any device is touched.

    All of them are compared first, and refuse to begin together. When one fails or dies inside,
    all end, and each says which one it was. One process alone does nothing here.

    Args:
      settings: flags and config, which must be the same everywhere.
      workdir: must be one folder, seen by all.

    Raises:
      SystemExit: with status 2 and one line, when the processes do not fit together.
    """
    global _peers
    leave_absent_hardware_alone()
    cluster = cluster or _tpu_pod() or clusters.ALONE
    if cluster.num_processes == 1:
        yield
        return
    with command_line.refusals():
        _peers = _join(cluster, settings)
    try:
        command_line.speak_as(_peers.process_id, _tell)
        with command_line.refusals():
            if workdir:
                _check_folder(_peers, workdir)
            initialize_jax(_peers, cluster, START_SECONDS)
        yield
    except BaseException as error:
        _end(_peers, error)
    _peers.close()
    _peers = None


def from_first(topic: str, value: Any) -> Any:
    """The value that process 0 has, in every process."""
    if _peers is None:
        return value
    if _peers.process_id:
        return _peers.await_answer(topic)
    _peers.tell(topic, value)
    return value


def first[T](topic: str, work: Callable[[], T]) -> T:
    """Does the work in process 0, and then in the others, which find done what it wrote."""
    if _peers is None:
        return work()
    if _peers.process_id:
        _peers.await_answer(topic)
        return work()
    result = work()
    _peers.tell(topic, None)
    return result


def all_reports(topic: str, report: Any) -> list[Any]:
    """What each process reports, in order, in every process."""
    return _peers.gather(topic, report, lambda reports: reports) if _peers else [report]


def stops(step: int, signalled: int = 0) -> tuple[str, int] | None:
    """Whether all stop after this step, since one got a signal; each asks after every step.

    Returns:
      Who got it ("" when alone), and the signal's number; None to go on.
    """
    if _peers is None:
        return ("", signalled) if signalled else None
    found = _peers.stops(step, signalled)
    return found and (_peers.names[found[0]], found[1])


def _join(cluster: ProcessGroup, settings: Mapping[str, Any]) -> Peers:
    host = cluster.address[0]
    itself = clusters.loopback(host)
    report = {
        "host": clusters.host_identity(),
        "loopback": itself,
        "alike": consistency.describe_process(settings),
    }
    hint = f"; {host} means the host itself, so all must be on one" if itself else ""
    peers, _ = rendezvous.join(
        cluster.coordinator,
        cluster.address,
        cluster.num_processes,
        cluster.process_id,
        report,
        lambda reports: {"refusal": _refusal(cluster, reports)},
        LOOPBACK_SECONDS if itself else START_SECONDS,
        hint,
    )
    return peers


def _refusal(cluster: ProcessGroup, reports: Sequence[dict[str, Any]]) -> str:
    """Why these processes cannot run together; "" when they can."""
    names = [rendezvous.name(i, report["host"][0]) for i, report in enumerate(reports)]
    num_hosts = len({tuple(report["host"]) for report in reports})
    for name, report in zip(names, reports):
        if report["loopback"] and num_hosts > 1:
            text = clusters.loopback_message(
                cluster.coordinator, report["loopback"], num_hosts, cluster.address[1]
            )
            return f"{name}: {text}"
    return consistency.first_difference([report["alike"] for report in reports], names)


def _check_folder(peers: Peers, workdir: pathlib.Path) -> None:
    """Makes sure that all see the folder that process 0 sees."""
    token = workdir / f".processes_{os.getpid()}_{time.time_ns()}"
    if peers.process_id == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        token.touch()
    file = from_first("token", token.name)
    deadline = time.monotonic() + FOLDER_SECONDS
    while not (seen := (workdir / file).exists()) and time.monotonic() < deadline:
        os.listdir(workdir) if workdir.is_dir() else None  # asks the server again
        time.sleep(0.2)

    def decide(reports: list[bool]) -> str:
        token.unlink()
        for name, seen in zip(peers.names, reports):
            if not seen:
                return (
                    f"--workdir {workdir} is not one folder for all: {name} does not see what "
                    f"{peers.names[0]} wrote there; give a folder that every host has mounted"
                )
        return ""

    if refusal := peers.gather("folder", seen, decide):
        raise ValueError(refusal)


def leave_absent_hardware_alone() -> None:
    """Keeps JAX on the CPU where there is nothing else and nobody said what to use.

    The compilers for absent machines are plugins of JAX: at each start they would report, with
    tracebacks, that they find no hardware.
    """
    if "JAX_PLATFORMS" in os.environ or not any(map(importlib.util.find_spec, PLUGINS)):
        return
    if not any(glob.glob(f"/dev/{name}") for name in DEVICE_FILES):
        os.environ["JAX_PLATFORMS"] = "cpu"


def _tpu_pod() -> ProcessGroup | None:
    """What JAX knows of a TPU pod, from variables or its host's metadata."""
    if not _has_tpu():
        return None
    # There is no public way to ask for the values without connecting at once.
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
    """Whether it is worth asking JAX, which takes seconds."""
    files = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    return bool(files and importlib.util.find_spec("libtpu"))


def _tell(message: str) -> str:
    """Lets the others know that this process refuses to go on; what it has to print itself."""
    assert _peers
    me = _peers.process_id
    words = _announce(_peers, message, 0.5 if me else 0)
    return f"{_peers.names[me]}: {words}" if me else words


def _announce(peers: Peers, text: str, patience: float) -> str:
    """Tells the others an error; what this process has to print of it.

    Often all find the same error at once: it is printed once on each host. Or another process
    died, and this one has only lost its connection to it.
    """
    me = peers.process_id
    who, said = peers.fail(text, patience)
    if said != text:
        return f"{peers.names[who]} failed, so this one ends: {said}"
    hosts = [name.partition(" on ")[2] for name in peers.names]
    first = hosts.index(hosts[me])
    return text if me in (who, first) else f"the same as {peers.names[first]} says"


def _end(peers: Peers, error: BaseException) -> NoReturn:
    """Ends this process and lets the others know; JAX would wait for them for minutes."""
    status = 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 1
    else:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        # Process 0 speaks first, and all wait for the word of a death.
        words = _announce(peers, text, 1.5 if peers.process_id else 1)
        if words == text:
            print(f"error in {peers.names[peers.process_id]}:", file=sys.stderr)
            traceback.print_exception(error)
        else:
            print(f"error: {words}", file=sys.stderr)
    if status == 0:
        peers.close()
        raise error
    sys.stdout.flush()
    sys.stderr.flush()
    if peers.process_id == 0:
        time.sleep(1.5)  # the others must hear it before they miss this process
    os._exit(status)
