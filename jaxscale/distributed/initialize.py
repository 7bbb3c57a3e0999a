"""Where `jax.distributed` is initialised, once the processes of a run are connected and alike."""

import socket
from typing import Any

from jaxscale.distributed import consistency, launcher
from jaxscale.distributed.control_channel import ControlChannel
from jaxscale.distributed.launcher import ProcessGroup

HEARTBEAT_SECONDS = 60
"""JAX counts a process as dead that was stopped, or hangs in its driver, for this long."""


def initialize_jax(channel: ControlChannel, cluster: ProcessGroup, timeout: int) -> None:
    """Forms JAX's own cluster, and compares the devices.

    Args:
      timeout: seconds to wait for the other processes and their devices.

    Raises:
      ValueError: the processes have different devices, or could not reach each other's host.
    """
    import jax  # noqa: PLC0415

    port = _port(channel)
    # Its handler would replace ours for SIGTERM (run/signals.py, `processes.stops`).
    jax.config.update("jax_enable_preemption_service", False)
    host = cluster.coordinator.rpartition(":")[0]
    jax.distributed.initialize(
        f"{host}:{port}",
        cluster.num_processes,
        cluster.process_id,
        local_device_ids=cluster.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    local = jax.local_devices()
    kind = f"{len(local)} x {local[0].device_kind} ({local[0].platform})"
    report = {
        "alike": {"devices": {"local devices": kind}},
        "host": launcher.host_identity(),
        # Gloo gives the others the address that this host resolves its own name to.
        "loopback": launcher.loopback(socket.gethostname()) if local[0].platform == "cpu" else None,
    }

    def decide(reports: list[dict[str, Any]]) -> str:
        several_hosts = len({tuple(report["host"]) for report in reports}) > 1
        for name, report in zip(channel.names, reports):
            if several_hosts and report["loopback"]:
                return (
                    f"{name}: the name {report['host'][0]} stands for {report['loopback']} there "
                    "(see /etc/hosts), which the processes of other hosts would be told to "
                    "connect to; map it to an address that they reach"
                )
        return consistency.first_difference([report["alike"] for report in reports], channel.names)

    if refusal := channel.gather("devices", report, decide, timeout):
        raise ValueError(refusal)


def _port(channel: ControlChannel) -> int:
    """A free port of process 0's host, in every process."""
    if channel.process_id:
        return channel.await_answer("port of jax")
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    channel.tell("port of jax", port)
    return port
