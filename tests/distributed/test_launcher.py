"""Who the processes are: from flags, from launchers, and what is refused before JAX is imported."""

import argparse
import socket
import subprocess
import sys

import pytest

from jaxscale.distributed import launcher
from jaxscale.distributed.launcher import ProcessGroup


def find(environ: dict[str, str] | None = None, **given) -> ProcessGroup | None:
    parser = argparse.ArgumentParser()
    launcher.add_process_flags(parser)
    return launcher.find_processes(
        parser.parse_args([f"--{name}={value}" for name, value in given.items()]), environ or {}
    )


SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "3,2,1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[07,9-10]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
ONE_HOST = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "5"}
VERSION_4 = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
VERSION_5 = {"PMIX_NAMESPACE": "prterun-node-3-212345@1"}


@pytest.mark.parametrize(
    ("environ", "source", "host", "num_processes", "process_id", "num_hosts"),
    [
        (SLURM, "SLURM", "node07", 6, 4, 3),
        ({**OPEN_MPI, **VERSION_4}, "Open MPI", "10.96.0.1", 8, 5, None),
        (
            {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "13.0;tcp6://[fd00::b9b,fd00::3]:43370"},
            "Open MPI",
            "fd00::b9b",
            8,
            5,
            None,
        ),
        ({**OPEN_MPI, **VERSION_5}, "Open MPI", "node-3", 8, 5, None),
        (ONE_HOST, "Open MPI", "127.0.0.1", 8, 5, 1),
        ({**SLURM, **OPEN_MPI, **VERSION_5}, "Open MPI", "node-3", 8, 5, None),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            "flags",
            "a",
            2,
            1,
            None,
        ),
    ],
    ids=["slurm", "ompi4", "ompi4-ipv6", "ompi5", "ompi-one-host", "mpirun-in-slurm", "kubeflow"],
)
def test_launchers_are_recognised(environ, source, host, num_processes, process_id, num_hosts):
    found = find(environ)
    assert found
    assert (found.source, found.address[0]) == (source, host)
    assert (found.num_processes, found.process_id) == (num_processes, process_id)
    assert found.num_hosts == num_hosts


@pytest.mark.parametrize(
    ("environ", "process"),
    [
        (SLURM, "SLURM_PROCID"),
        ({**OPEN_MPI, **VERSION_4}, "OMPI_COMM_WORLD_RANK"),
        ({**OPEN_MPI, **VERSION_5}, "OMPI_COMM_WORLD_RANK"),
    ],
    ids=["slurm", "ompi4", "ompi5"],
)
def test_all_processes_of_a_job_meet_at_one_place_and_other_jobs_elsewhere(environ, process):
    places = {find(environ | {process: str(i)}).coordinator for i in range(6)}
    assert len(places) == 1
    port = int(places.pop().rpartition(":")[2])
    assert 61440 <= port < 65536
    other = {
        "SLURM_STEP_ID": "1",
        "OMPI_MCA_orte_hnp_uri": "1531576321.0;tcp://10.96.0.1:3",
        "PMIX_NAMESPACE": "prterun-node-3-212346@1",
    }
    changed = {name: other[name] for name in other if name in environ}
    assert find(environ | changed).address[1] != port


def test_a_pod_of_an_indexed_job_finds_the_first_one(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-12.pods.team.svc.cluster.local")
    found = find({"JOB_COMPLETION_INDEX": "12", "JAX_NUM_PROCESSES": "16"})
    assert found == ProcessGroup("train-0.pods.team.svc.cluster.local:8476", 16, 12, "flags")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"},  # the batch script itself
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"JOB_COMPLETION_INDEX": "0", "TPU_WORKER_HOSTNAMES": "a,b"},  # JAX knows TPU pods
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    ],
)
def test_one_process_alone_is_no_cluster(environ):
    assert find(environ) is None


@pytest.mark.parametrize("environ", [SLURM, ONE_HOST, {"JOB_COMPLETION_INDEX": "3"}])
def test_processes_can_be_separate_runs(environ):
    assert find(environ, num_processes=1) is launcher.ALONE


def test_flags_come_before_launchers():
    assert find(SLURM, coordinator="other:7").coordinator == "other:7"
    found = find(
        {**SLURM, "CUDA_VISIBLE_DEVICES": "0,1"}, coordinator="h:7", num_processes=9, process_id=8
    )
    # The launcher has assigned their GPUs.
    assert (found.num_processes, found.process_id, found.devices) == (9, 8, None)
    assert find(coordinator="[fd00::1]:80", num_processes=2, process_id=0).address == (
        "fd00::1",
        80,
    )


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (2, 3)),
        ({"CUDA_VISIBLE_DEVICES": "4,5", "SLURM_GPUS_ON_NODE": "2"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "4,5", "SLURM_GPUS_ON_NODE": "4"}, None),  # --gpus-per-task=2
        ({"CUDA_VISIBLE_DEVICES": "3"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_NODEID": "2"}, None),  # alone on its node
        # Two tasks on each of two nodes, then one: this one is the second on the second node.
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, (2, 3)),
    ],
)
def test_gpus_that_all_processes_of_a_host_see_are_split(environ, devices):
    assert find(SLURM | environ).devices == devices


def test_gpus_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="3 GPUs do not divide over the 2 processes of this host"):
        find({**SLURM, "CUDA_VISIBLE_DEVICES": "0,1,2"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[3-5,9],m1", "n3"),
        ("n[007],m1", "n007"),
        ("r[1-2]n[3,4]-x,z", "r1n3-x"),
        ("a-b.c.org,d", "a-b.c.org"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes, first):
    assert launcher.first_host(nodes) == first


@pytest.mark.parametrize(
    ("environ", "given", "said"),
    [
        ({}, {"coordinator": "a:1"}, "--coordinator without --num_processes and --process_id"),
        ({}, {"num_processes": 2, "process_id": 0}, "without --coordinator"),
        ({}, {"process_id": 0}, "one process needs none"),
        (
            {},
            {"coordinator": "a:1", "num_processes": 2, "process_id": 2},
            "--process_id = 2 must be from 0 to 1",
        ),
        (
            {"JAX_PROCESS_ID": "-1"},
            {"coordinator": "a:1", "num_processes": 2},
            "JAX_PROCESS_ID = '-1' in the environment is not a whole number",
        ),
        (
            {"JAX_NUM_PROCESSES": "0"},
            {"coordinator": "a:1", "process_id": 0},
            "--num_processes = 0 must be from 1 to 1048576",
        ),
        (
            {"JAX_NUM_PROCESSES": "9" * 20},
            {"coordinator": "a:1", "process_id": 0},
            "must be from 1 to 1048576",
        ),
        (
            {},
            {"coordinator": "a", "num_processes": 2, "process_id": 0},
            "--coordinator = a is not HOST:PORT, such as a:8476",
        ),
        ({}, {"coordinator": "a:70000", "num_processes": 2, "process_id": 0}, "not HOST:PORT"),
        ({"JAX_NUM_PROCESSES": "two"}, {}, "JAX_NUM_PROCESSES = 'two' in the environment"),
        (
            {"JOB_COMPLETION_INDEX": "3"},
            {},
            "Kubernetes started this as process 3 of several, and "
            "does not say --coordinator and --num_processes: set JAX_NUM_PROCESSES",
        ),
        (OPEN_MPI, {}, "does not say --coordinator: add --coordinator=HOST:PORT"),
        (
            SLURM,
            {"coordinator": "localhost:7"},
            "localhost, here 127.0.0.1 .see /etc/hosts., means "
            "the host itself, and there are 3 hosts",
        ),
        (SLURM, {"coordinator": "[::1]:7"}, "means the host itself"),
        (SLURM, {"coordinator": "0.0.0.0:7"}, "means the host itself"),
    ],
)
def test_what_cannot_be_a_cluster_is_refused(environ, given, said, monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: "pod")
    with pytest.raises(ValueError, match=said):
        find(environ, **given)


def test_a_name_that_hosts_map_to_loopback_is_seen(monkeypatch):
    addresses = {"debian": ["127.0.1.1"], "both": ["127.0.0.1", "10.0.0.7"], "v6": ["::1"]}

    def lookup(host, port):
        if host not in addresses:
            raise socket.gaierror("unknown")
        return [(0, 0, 0, "", (address, 0)) for address in addresses[host]]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert launcher.loopback("debian") == "127.0.1.1"
    assert launcher.loopback("v6") == "::1"
    assert launcher.loopback("both") is None
    assert launcher.loopback("later") is None, "its pod may not have a name yet"


@pytest.mark.proof
@pytest.mark.parametrize("command", ["train", "evaluate", "generate", "doctor"])
def test_every_command_refuses_half_a_cluster_before_jax_is_imported(command, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    arguments = {
        "train": ["--config", "configs/tiny.py"],
        "evaluate": ["--workdir", str(tmp_path)],
        "generate": ["--workdir", str(tmp_path), "--prompt", ""],
        "doctor": [],
    }[command]
    program = (
        f"import sys; from jaxscale.{command} import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--process_id=1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --process_id without --coordinator and --num_processes")
    assert done.stderr.count("\n") == 1
