"""Process discovery: the processes of a run from flags, or from SLURM, Open MPI or Kubernetes.

Nothing here imports JAX: an incomplete set of flags must be refused in a fraction of a second.
"""

import argparse
import ipaddress
import os
import pathlib
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxscale import command_line

FIRST_PORT, NUM_PORTS = 61440, 4096
"""A job's port is a hash of its number, so that two jobs on one host rarely share one."""

DEFAULT_PORT = 8476

MOST_PROCESSES = 2**20

FLAGS = {
    "coordinator": ("--coordinator", "JAX_COORDINATOR_ADDRESS"),
    "num_processes": ("--num_processes", "JAX_NUM_PROCESSES"),
    "process_id": ("--process_id", "JAX_PROCESS_ID"),
}
"""Value -> its flag, and JAX's variable for it, which Kubeflow's trainer sets."""


@dataclass(frozen=True)
class ProcessGroup:
    """The id of this process among several, and the coordinator."""

    coordinator: str  # HOST:PORT where process 0 listens
    num_processes: int
    process_id: int
    source: str = "flags"  # of these values, for messages
    num_hosts: int | None = None  # None: not known
    devices: tuple[int, ...] | None = None  # GPUs of this host for this process; None: all

    def __post_init__(self):
        if not 1 <= self.num_processes <= MOST_PROCESSES:
            raise ValueError(
                f"--num_processes = {self.num_processes} must be from 1 to {MOST_PROCESSES}"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"--process_id = {self.process_id} must be from 0 to {self.num_processes - 1}, "
                f"since --num_processes = {self.num_processes}"
            )
        host, port = self.address
        if self.num_hosts and self.num_hosts > 1 and (address := loopback(host)):
            raise ValueError(loopback_message(self.coordinator, address, self.num_hosts, port))

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, colon, port = self.coordinator.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(
                f"--coordinator = {self.coordinator} is not HOST:PORT, such as "
                f"{host or self.coordinator or 'node1'}:{DEFAULT_PORT}"
            )
        return host, int(port)


ALONE = ProcessGroup(f"localhost:{DEFAULT_PORT}", 1, 0)
"""A single process, which ignores the others that its launcher started."""


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every command that runs as several processes."""
    group = parser.add_argument_group(
        "several processes",
        "detected under SLURM, Open MPI, Kubernetes and on TPU pods; --num_processes=1 "
        "makes each process a separate run",
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="host of process 0, and a free port on it"
    )
    group.add_argument(
        "--num_processes",
        metavar="N",
        type=command_line.whole(1, MOST_PROCESSES),
        help="number of processes of the run",
    )
    group.add_argument(
        "--process_id",
        metavar="I",
        type=command_line.whole(0, MOST_PROCESSES - 1),
        help="id of this process, from 0",
    )


def common_flags(options: argparse.Namespace) -> dict[str, str]:
    """The flags that must be equal in every process: all except process ids and paths."""
    own = {*FLAGS, "workdir", "config", "json"}
    return {f"--{name}": str(value) for name, value in vars(options).items() if name not in own}


def find_processes(
    options: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> ProcessGroup | None:
    """The process group from flags or environment; ALONE for --num_processes=1, None when nothing
    is set.

    Flags take precedence over JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, and
    these over the variables of SLURM, Open MPI or an indexed Kubernetes Job. TPU pods are not
    detected here.

    Raises:
      ValueError: some of the values are missing or wrong, or the coordinator is a loopback host
        while there are several hosts.
    """
    given = {name: _given(name, options, environ) for name in FLAGS}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("num_processes") == 1 and not given.get("process_id"):
        return ALONE
    launched = _open_mpi(environ) or _slurm(environ) or _kubernetes(environ) or {}
    if not given and not launched:
        return None
    values: dict[str, Any] = launched | given
    if missing := [flag for name, (flag, _) in FLAGS.items() if name not in values]:
        raise ValueError(_incomplete(given, missing, launched))
    if "process_id" in given:  # then the launcher's devices may be those of another process
        values["devices"] = None
    values["source"] = "flags" if given else launched["source"]
    values.pop("hint", None)
    return ProcessGroup(**values)


def _given(name: str, options: argparse.Namespace, environ: Mapping[str, str]) -> Any:
    """A value from its flag, or else from JAX's variable; None when neither is set."""
    flag, variable = getattr(options, name), FLAGS[name][1]
    if flag is not None or not environ.get(variable):
        return flag
    return environ[variable] if name == "coordinator" else _int(environ, variable)


def host_identity() -> list[str]:
    """Host name and boot id: hosts may share a name, containers on one host share the boot id."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return [socket.gethostname(), boot.read_text().strip() if boot.exists() else ""]


def loopback(host: str) -> str | None:
    """The loopback IP address that a host name resolves to on this host, or None."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:  # such as a DNS name that does not exist yet
        return None
    addresses = [ipaddress.ip_address(address.partition("%")[0]) for address in sorted(found)]
    itself = all(address.is_loopback or address.is_unspecified for address in addresses)
    return str(addresses[0]) if itself else None


def loopback_message(coordinator: str, address: str, num_hosts: int, port: int) -> str:
    """The error for a loopback coordinator of several hosts, with the remedy."""
    host = coordinator.rpartition(":")[0]
    named = host if host == address else f"{host}, here {address} (see /etc/hosts),"
    return (
        f"--coordinator = {coordinator}: {named} means the host itself, and there are {num_hosts} "
        f"hosts; give a host name or IP of process 0 that the others reach, such as "
        f"10.0.0.1:{port}"
    )


def _incomplete(given: Mapping[str, Any], missing: list[str], launched: Mapping[str, Any]) -> str:
    names = " and ".join(FLAGS[name][0] for name in given)
    if not launched:
        return (
            f"{names} without {' and '.join(missing)}: several processes need all three, and "
            "SLURM, Open MPI or Kubernetes did not set them; one process needs none"
        )
    return (
        f"{launched['source']} started this as process {launched['process_id']} of several, and "
        f"does not say {' and '.join(missing)}: {launched['hint']}; --num_processes=1 if each "
        "process is a separate run"
    )


def _open_mpi(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The process group from the variables that Open MPI's mpirun sets in all versions."""
    size = _int(environ, "OMPI_COMM_WORLD_SIZE", 1)
    if size == 1 or "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    here = _int(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    found = {
        "source": "Open MPI",
        "num_processes": size,
        "process_id": _int(environ, "OMPI_COMM_WORLD_RANK"),
        "devices": _devices(_int(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0), here, environ),
        "hint": "add --coordinator=HOST:PORT, the host of rank 0",
    }
    uri, namespace = environ.get("OMPI_MCA_orte_hnp_uri", ""), environ.get("PMIX_NAMESPACE", "")
    port = _port(uri.partition(".")[0] or namespace)
    if here == size:
        return _complete(found, "127.0.0.1", port, 1)
    # Versions 4 and 5 name the host of mpirun itself, where rank 0 runs by default.
    named = re.search(r"tcp://([^,:]+)|tcp6://\[([^],]+)", uri) or re.match(
        r"prterun-(.+)-\d+@", namespace
    )
    return _complete(found, named[named.lastindex or 0], port, None) if named else found


def _slurm(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The process group from srun's variables; None in the batch script, which is no task."""
    size = _int(environ, "SLURM_STEP_NUM_TASKS", 1)
    if size == 1 or not {"SLURM_PROCID", "SLURM_STEP_NODELIST"} <= environ.keys():
        return None
    # "2(x3),1": the tasks of each node, in order.
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        tasks, _, times = part.rstrip(")").partition("(x")
        counts += [int(tasks)] * int(times or 1)
    node = _int(environ, "SLURM_NODEID", 0)
    here = counts[node] if node < len(counts) else 1
    found = {
        "source": "SLURM",
        "num_processes": size,
        "process_id": _int(environ, "SLURM_PROCID"),
        "devices": _devices(_int(environ, "SLURM_LOCALID", 0), here, environ),
    }
    job = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    hosts = _int(environ, "SLURM_STEP_NUM_NODES", len(counts))
    return _complete(found, first_host(environ["SLURM_STEP_NODELIST"]), _port(job), hosts)


def first_host(nodes: str) -> str:
    """The first name of a SLURM list: "node3" of "node[3-5,9],login1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first, "the pattern matches anything"
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0])


def _kubernetes(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The process group of a pod of an indexed Job; its manifest sets the number of processes."""
    on_tpu = {"TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_ADDRESSES_PATH"}
    if "JOB_COMPLETION_INDEX" not in environ or on_tpu & environ.keys():
        return None
    index = _int(environ, "JOB_COMPLETION_INDEX")
    found = {
        "source": "Kubernetes",
        "process_id": index,
        "hint": "set JAX_NUM_PROCESSES in the pod's env to the Job's completions, and its "
        "subdomain to the name of a headless Service, as in tools/launch/kubernetes.yaml",
    }
    # The pods of a Job are called JOB-0, JOB-1 ...; with a subdomain they find each other.
    pod, dot, domain = socket.getfqdn().partition(".")
    if dot and pod.endswith(f"-{index}"):
        host = f"{pod.removesuffix(str(index))}0.{domain}"
        return _complete(found, host, DEFAULT_PORT, None)
    return found


def _complete(found: dict, host: str, port: int, num_hosts: int | None) -> dict[str, Any]:
    address = f"[{host}]" if ":" in host else host
    return found | {"coordinator": f"{address}:{port}", "num_hosts": num_hosts}


def _port(job: str) -> int:
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS


def _int(environ: Mapping[str, str], variable: str, default: int | None = None) -> int:
    text = environ.get(variable, str(default))
    if not text.isdecimal():
        raise ValueError(f"{variable} = {text!r} in the environment is not a whole number")
    return int(text)


def _devices(local_id: int, here: int, environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """A process's share of its host's GPUs, where each process sees all of them.

    Args:
      local_id: of this process among the `here` processes on this host.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [*pathlib.Path("/dev").glob("nvidia[0-9]*")]
    count = len(gpus)
    # SLURM may assign GPUs to each task, which then sees fewer than the node has.
    if here == 1 or count < max(here, _int(environ, "SLURM_GPUS_ON_NODE", 0)):
        return None
    if count % here:
        raise ValueError(
            f"{count} GPUs do not divide over the {here} processes of this host; start another "
            "number of them, or set CUDA_VISIBLE_DEVICES for each"
        )
    share = count // here
    return tuple(range(local_id * share, (local_id + 1) * share))
