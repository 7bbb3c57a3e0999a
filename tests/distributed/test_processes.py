"""One process alone is not slowed down; what processes refuse before JAX forms its cluster."""

import os
import re
import socket
import subprocess
import sys
import types

import jax
import pytest

from jaxscale.distributed import launcher, processes
from jaxscale.distributed.initialize import initialize_jax
from jaxscale.distributed.launcher import ProcessGroup
from jaxscale.hardware import GPU_MEMORY_VARIABLES
from jaxscale.planner.search.space import fraction_here


@pytest.mark.parametrize("place", [None, launcher.ALONE])
def test_one_process_alone_does_nothing(place):
    with processes.together(place, {}):
        assert processes.from_first("topic", 3) == 3
        assert processes.first("work", lambda: 4) == 4
        assert processes.all_reports("report", 5) == [5]
        assert processes.stops(1) == ""
        assert processes.stops(2, "SIGTERM") == "SIGTERM"


@pytest.mark.parametrize(
    ("host", "where"), [("127.0.0.1", "127.0.0.1:"), ("192.0.2.1", None), ("::1", "[::1]:")]
)
def test_jax_listens_only_where_it_is_needed(host, where, monkeypatch):
    """Its service knows no token."""
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    given = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *_, **settings: given.append(settings)
    )
    channel = types.SimpleNamespace(
        process_id=0, tell=lambda *_: None, gather=lambda *_: "", names=[]
    )
    initialize_jax(channel, ProcessGroup(f"{host}:1", 2, 0, "a test"), 1)
    bound = given[0]["coordinator_bind_address"]
    assert bound is None if where is None else bound.startswith(where)


def test_alone_costs_no_import_of_jax():
    program = (
        "import sys; from jaxscale.distributed import processes\n"
        "with processes.together(None, {}): assert not {'jax', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def report(host: str, boot: str = "b", loopback: str | None = None, **settings) -> dict:
    return {"host": [host, boot], "loopback": loopback, "alike": {"settings": settings}}


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([report("a"), report("b")], ""),
        ([report("a", loopback="127.0.0.1"), report("a", loopback="127.0.0.1")], ""),
        (
            [report("a", loopback="127.0.1.1"), report("b")],
            "process 0 on a: --coordinator = a:7: a, here 127.0.1.1 (see /etc/hosts), means the "
            "host itself, and there are 2 hosts; give a host name or IP of process 0 that the "
            "others reach, such as 10.0.0.1:7",
        ),
        ([report("a"), report("a", "other", loopback="::1")], "process 1 on a: --coordinator"),
        ([report("a", x=1), report("b", x=2)], "process 1 on b has x = 2, and process 0 on a"),
    ],
    ids=["alike", "one host", "two hosts", "two hosts of one name", "settings"],
)
def test_processes_that_do_not_fit_are_refused(reports, said):
    found = processes._refusal(ProcessGroup("a:7", 2, 0), reports)
    assert said in found
    assert bool(said) == bool(found)


def test_a_tpu_pod_is_what_jax_says(monkeypatch):
    from jax._src import cloud_tpu_init  # noqa: PLC0415
    from jax._src.clusters import cloud_tpu_cluster  # noqa: PLC0415

    assert processes._tpu_pod() is None
    monkeypatch.setattr(processes, "_has_tpu", lambda: True)
    for module in (cloud_tpu_init, cloud_tpu_cluster):
        monkeypatch.setattr(module, "running_in_cloud_tpu_vm", True)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost,b,c,d")
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "localhost")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "1")
    assert processes._tpu_pod() == ProcessGroup("localhost:8482", 8, 6, "the TPU pod")


def test_a_process_that_does_not_come_to_a_loopback_address(monkeypatch, capsys):
    monkeypatch.setattr(processes, "LOOPBACK_SECONDS", 0.3)
    port = free_port()
    place = ProcessGroup(f"localhost:{port}", 2, 0)
    with pytest.raises(SystemExit) as end, processes.together(place, {}):
        pytest.fail("it began without process 1")
    assert end.value.code == 1, "a supervisor tries again"
    said = capsys.readouterr().err
    assert said.startswith(f"error: process 1 of 2 did not connect to localhost:{port}")
    assert said.endswith("localhost is a loopback name, so all processes must be on one host\n")


def start(process_id: int, port: int, *arguments: str, **environ: str) -> subprocess.Popen:
    """One of two real processes that train, as a user would start it by hand."""
    program = (
        "import sys; from jaxscale.distributed import processes; processes.FOLDER_SECONDS = 0.5\n"
        "from jaxscale.train import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            program,
            "--config",
            "configs/tiny.py",
            f"--coordinator=localhost:{port}",
            "--num_processes=2",
            f"--process_id={process_id}",
            *arguments,
        ],
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.proof
@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (
            ["--config.optimizer.learning_rate=1.0"],
            {},
            "has config.optimizer.learning_rate = 1.0, and process 0 on HOST has 0.001; start all",
        ),
        (["--trackers=none"], {}, "has flags.--trackers = (), and process 0"),
        (
            [],
            {"JAX_NUM_CPU_DEVICES": "3"},
            "has JAX_NUM_CPU_DEVICES = 3, and process 0 on HOST has 8; set the same variables",
        ),
        (["--workdir", "{other}"], {}, "{own} is not shared: process 1 on HOST does"),
    ],
    ids=["config", "flags", "devices", "folder"],
)
def test_two_processes_that_differ_refuse_together(arguments, environ, said, tmp_path):
    folders = {"own": str(tmp_path / "own"), "other": str(tmp_path / "other")}
    port = free_port()
    first = start(0, port, "--workdir", folders["own"])
    changed = [each.format(**folders) for each in arguments]
    second = start(1, port, "--workdir", folders["own"], *changed, **environ)
    printed = [process.communicate(timeout=60)[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [2, 2]
    host = socket.gethostname()
    assert printed[0].startswith("error: ")
    assert said.format(**folders).replace("HOST", host) in printed[0]
    assert f"process 1 on {host}" in printed[0]
    assert [each.count("\n") for each in printed] == [1, 1]
    assert f"same error as process 0 on {host}" in printed[1], "once on each host is enough"
    assert not list(tmp_path.rglob(".processes*"))


def test_the_flags_are_explained(capsys):
    from jaxscale import train  # noqa: PLC0415

    with pytest.raises(SystemExit):
        train.main(["--help"])
    printed = capsys.readouterr().out
    for flag, _ in launcher.FLAGS.values():
        assert flag in printed


@pytest.mark.parametrize(
    ("installed", "found", "said", "expected"),
    [
        (True, [], None, "cpu"),
        (True, ["/dev/nvidia0"], None, None),
        (True, [], "cuda", "cuda"),
        (False, [], None, None),
    ],
)
def test_compilers_for_absent_machines_do_not_look_for_them(
    monkeypatch, installed, found, said, expected
):
    monkeypatch.delenv("JAX_PLATFORMS")
    if said:
        monkeypatch.setenv("JAX_PLATFORMS", said)
    monkeypatch.setattr(processes.importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(processes.glob, "glob", lambda pattern: found)
    processes.leave_absent_hardware_alone()
    assert os.environ.get("JAX_PLATFORMS") == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {"XLA_CLIENT_MEM_FRACTION": "0.9"}),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94"}),
    ],
)
def test_gpus_give_as_much_memory_as_plans_count_on(monkeypatch, said, expected):
    for name in (*GPU_MEMORY_VARIABLES, "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(processes, "host_memory_bytes", lambda: 100 * 2**30)
    processes.take_gpu_memory()
    assert {name: os.environ[name] for name in GPU_MEMORY_VARIABLES if name in os.environ} == (
        expected
    )
    assert os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "80"
    (share,) = map(float, expected.values())
    assert fraction_here("gpu") == pytest.approx(share - 0.05)


@pytest.mark.parametrize(
    ("names", "value", "said"),
    [
        (GPU_MEMORY_VARIABLES[:1], "90%", "XLA_CLIENT_MEM_FRACTION = '90%' in the environment"),
        (GPU_MEMORY_VARIABLES[:1], "1.5", "above 0, up to 1, such as 0.9"),
        (GPU_MEMORY_VARIABLES, "0.9", "are both set; unset XLA_PYTHON_CLIENT_MEM_FRACTION"),
    ],
)
def test_no_share_of_a_gpus_memory_is_refused(monkeypatch, names, value, said):
    for name in names:
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(said)):
        processes.take_gpu_memory()
