"""Initialises `jax.distributed`, after the processes of a run are connected and compared."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from etils import epy

from jaxscale.distributed import consistency, launcher, rendezvous
from jaxscale.distributed.control_channel import ControlChannel
from jaxscale.distributed.launcher import ProcessGroup

with epy.lazy_imports():  # once the processes agree
    import jax

HEARTBEAT_SECONDS = 300
"""After this long without a heartbeat (stopped, or hung in its driver) JAX counts a process as
dead. Our deadlines (`hangs`) are shorter: JAX ends all processes without naming their activity."""


class NoDevicesError(ValueError):
    """JAX does not start on the requested devices."""

    exit_status = 1  # a driver may recover, so a supervisor tries again


def num_devices() -> int:
    """The number of devices of all processes; starts JAX's back ends.

    Raises:
      NoDevicesError: a back end does not start.
    """
    try:
        return jax.device_count()
    except (RuntimeError, AssertionError) as error:  # the second where no plugin loads
        reason = str(error) or "no plugin for it loads"
        raise NoDevicesError(
            f"JAX does not start with JAX_PLATFORMS = {os.environ.get('JAX_PLATFORMS')!r} in the "
            f"environment: {reason}; python -m jaxscale.doctor lists what is missing, and "
            "JAX_PLATFORMS=cpu needs no accelerator"
        ) from None


def initialize_jax(channel: ControlChannel, cluster: ProcessGroup, timeout: int) -> None:
    """Connects JAX's cluster, and compares the devices.

    Args:
      timeout: seconds to wait for the other processes and their devices.

    Raises:
      ValueError: the processes have different devices, or could not reach each other's host.
    """
    port = _port(channel)
    # JAX's handler of SIGTERM would replace ours (run/signals.py, `processes.stops`).
    jax.config.update("jax_enable_preemption_service", False)
    host = cluster.coordinator.rpartition(":")[0]
    jax.distributed.initialize(
        f"127.0.0.1:{_through_here(cluster.address[0], port)}"
        if cluster.process_id
        else f"{host}:{port}",
        cluster.num_processes,
        cluster.process_id,
        local_device_ids=cluster.devices,
        coordinator_bind_address=None if cluster.process_id else _bound(cluster.address[0], port),
        cluster_detection_method="deactivate",
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    local = jax.local_devices()
    kind = f"{len(local)} x {local[0].device_kind} ({local[0].platform})"
    report = {
        "alike": {"devices": {"local devices": kind}},
        "host": launcher.host_identity(),
        # Gloo sends the others the IP address to which this host resolves its own name.
        "loopback": launcher.loopback(socket.gethostname()) if local[0].platform == "cpu" else None,
    }

    def decide(reports: list[dict[str, Any]]) -> str:
        several_hosts = len({tuple(report["host"]) for report in reports}) > 1
        for name, report in zip(channel.names, reports):
            if several_hosts and report["loopback"]:
                return (
                    f"{name}: its host name {report['host'][0]} resolves to {report['loopback']} "
                    "there (see /etc/hosts), to which processes of other hosts cannot connect; map "
                    "the name to an IP address that they reach"
                )
        return consistency.first_difference([report["alike"] for report in reports], channel.names)

    if refusal := channel.gather("devices", report, decide, timeout):
        raise ValueError(refusal)


def _bound(host: str, port: int) -> str | None:
    """HOST:PORT on which JAX's service listens: only the IP address that is needed, since the
    service checks no token; None for all, where the name has several or another machine's."""
    found = rendezvous.bind_address(host)
    if found is None:
        return None
    family, address = found
    return f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}"


def _through_here(host: str, port: int) -> int:
    """A local port that forwards to process 0 (a TCP proxy).

    JAX ends a process whose connection to process 0 breaks, at once and with a C++ stack trace.
    Behind this proxy the connection only becomes silent, so that the control channel, which knows
    the process that ended, reports it and ends this one.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            here = listener.accept()[0]
            try:
                there = socket.create_connection((host, port))
            except OSError:  # process 0 does not listen yet; JAX tries again
                here.close()
                continue
            start(_pump, here, there, True)
            start(_pump, there, here, False)

    def start(work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name="to process 0", daemon=True).start()

    start(accept)
    return listener.getsockname()[1]


def _pump(source: socket.socket, target: socket.socket, close: bool) -> None:
    """Forwards bytes until the source closes; `close` then closes the target, too."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    if close:
        target.close()


def _port(channel: ControlChannel) -> int:
    """A free port of process 0's host, in every process."""
    if channel.process_id:
        return channel.await_answer("port of jax")
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    channel.tell("port of jax", port)
    return port
