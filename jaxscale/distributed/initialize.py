"""Where `jax.distributed` is initialised, once the processes of a run have met and are alike."""

import socket
from typing import Any

from jaxscale.distributed import consistency, launcher
from jaxscale.distributed.control_channel import Peers
from jaxscale.distributed.launcher import ProcessGroup

HEARTBEAT_SECONDS = 60
"""After this time a process that is stopped or hangs in its driver counts as dead, says JAX."""


def initialize_jax(peers: Peers, cluster: ProcessGroup, timeout: int) -> None:
    """Forms JAX's own cluster, and compares the devices.

    Args:
      timeout: seconds to wait for the other processes and their devices.

    Raises:
      ValueError: the processes have different devices, or could not reach each other's host.
    """
    import jax  # noqa: PLC0415

    port = _port(peers)
    # It would take SIGTERM for itself; `processes.stops` is for that.
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
        # Gloo tells the others the address that this host has for its own name.
        "loopback": launcher.loopback(socket.gethostname()) if local[0].platform == "cpu" else None,
    }

    def decide(reports: list[dict[str, Any]]) -> str:
        several_hosts = len({tuple(report["host"]) for report in reports}) > 1
        for name, report in zip(peers.names, reports):
            if several_hosts and report["loopback"]:
                return (
                    f"{name}: the name {report['host'][0]} stands for {report['loopback']} there "
                    "(see /etc/hosts), which the processes of other hosts would be told to "
                    "connect to; map it to an address that they reach"
                )
        return consistency.first_difference([report["alike"] for report in reports], peers.names)

    if refusal := peers.gather("devices", report, decide, timeout):
        raise ValueError(refusal)


def _port(peers: Peers) -> int:
    """A free port of process 0's host, in every process."""
    if peers.process_id:
        return peers.await_answer("port of jax")
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    peers.tell("port of jax", port)
    return port
