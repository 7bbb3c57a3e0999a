"""The SLURM script and the Kubernetes manifest, as far as they can be tried without a cluster."""

import os
import pathlib
import signal
import subprocess
import time

import pytest
import yaml

from jaxscale.distributed import launcher

FOLDER = pathlib.Path("tools/launch").resolve()

SRUN = """#!/bin/bash
# Three tasks on two nodes, each with the variables that srun sets.
shift 2
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_NUM_NODES=2
export SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_STEP_NODELIST='gpu[7-8]'
for place in "0 0 0" "1 0 1" "2 1 0"; do
    read -r process node local <<< "$place"
    SLURM_PROCID=$process SLURM_NODEID=$node SLURM_LOCALID=$local "$@" &
    echo $! >> tasks
done
status=0
for task in $(cat tasks); do wait "$task" || status=$?; done
exit $status
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >> called
kill -TERM $(cat tasks)
"""
SUPERVISED = "-u -m jaxscale.supervise -- python -u -m jaxscale.train"
PYTHON = """#!/bin/bash
# In the place of a training: who it is and what it is to do; it takes its time, or fails.
{ env | grep -E '^(SLURM_|JAXSCALE_TOKEN)'; echo "ARGUMENTS=$*"; } > "task_$SLURM_PROCID"
trap 'exit 143' TERM
if [[ "$*" == *fail ]]; then exit 3; fi
touch "ready_$SLURM_PROCID"
while true; do sleep 0.1; done
"""


@pytest.fixture
def job(tmp_path):
    """Starts the script where SLURM's commands are played by others."""
    programs = {
        "srun": SRUN,
        "scancel": SCANCEL,
        "python": PYTHON,
        "scontrol": '#!/bin/bash\necho "scontrol $*" >> called\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    started = []

    def start(*arguments):
        environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
        process = subprocess.Popen(
            [FOLDER / "slurm.sh", *arguments], env=environ, cwd=tmp_path, start_new_session=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_the_tasks_of_the_slurm_script_find_each_other(job, tmp_path):
    assert job("fail").wait(30) == 3
    places, tokens = [], set()
    for process_id in range(3):
        lines = (tmp_path / f"task_{process_id}").read_text().splitlines()
        environ = dict(line.split("=", 1) for line in lines)
        assert environ.pop("ARGUMENTS") == f"{SUPERVISED} fail"
        tokens.add(environ.pop("JAXSCALE_TOKEN"))
        options = dict.fromkeys(launcher.FLAGS)
        places.append(launcher.find_processes(type("Options", (), options)(), environ))
    assert [len(token) for token in tokens] == [32]
    assert [place.process_id for place in places] == [0, 1, 2]
    assert {place.num_processes for place in places} == {3}
    assert {place.coordinator.partition(":")[0] for place in places} == {"gpu7"}
    assert not (tmp_path / "called").exists(), "an error is not tried again"


def test_before_its_time_is_up_a_slurm_job_saves_and_goes_back_into_the_queue(job, tmp_path):
    process = job("--config", "x")
    for process_id in range(3):
        deadline = time.monotonic() + 30
        while not (tmp_path / f"ready_{process_id}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 143
    called = (tmp_path / "called").read_text().splitlines()
    assert called == ["scancel --signal=TERM 4711", "scontrol requeue 4711"]


def check_command(container):
    """Supervised, and with a token from a secret."""
    assert container["command"] == ["python", *SUPERVISED.split()]
    (token,) = (each for each in container["env"] if each["name"] == "JAXSCALE_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "jaxscale", "key": "token"}}


def check_processes(monkeypatch, spec: dict, container: dict, pods: str, subdomain: str):
    """The pods of an indexed job, of names `pods`-INDEX, agree on who they are."""
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    environ = {each["name"]: each.get("value") for each in container["env"]}
    for index in (0, 3):
        domain = f"{pods}-{index}.{subdomain}.default.svc.cluster.local"
        monkeypatch.setattr(launcher.socket, "getfqdn", lambda domain=domain: domain)
        options = type("Options", (), dict.fromkeys(launcher.FLAGS))()
        found = launcher.find_processes(options, environ | {"JOB_COMPLETION_INDEX": str(index)})
        assert found
        assert found.coordinator == f"{pods}-0.{subdomain}.default.svc.cluster.local:8476"
        assert (found.num_processes, found.process_id) == (spec["completions"], index)


def test_the_pods_of_the_job_set_find_each_other(monkeypatch):
    (jobs,) = yaml.safe_load_all((FOLDER / "jobset.yaml").read_text())
    assert (jobs["apiVersion"], jobs["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    name, network = jobs["metadata"]["name"], jobs["spec"]["network"]
    assert network["enableDNSHostnames"]
    assert network["publishNotReadyAddresses"]
    (replicated,) = jobs["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    check_command(container)
    check_processes(
        monkeypatch, spec, container, f"{name}-{replicated['name']}-0", network["subdomain"]
    )


GCLOUD = """#!/bin/bash
printf '%s\\n' "$@" > gcloud_arguments
for word in "$@"; do case $word in --command=*) bash -c "${word#--command=}" ;; esac; done
"""


def test_a_tpu_slice_starts_one_supervised_process_on_each_host(tmp_path):
    """Where gcloud is played by a program that runs the command once, here."""
    for name, text in {"gcloud": GCLOUD, "python": PYTHON}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [FOLDER / "tpu_vm.sh", "my-slice", "europe-west4-b", "--workdir", "two words", "fail"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)},
        cwd=tmp_path,
    )
    assert done.returncode == 3
    words = (tmp_path / "gcloud_arguments").read_text().splitlines()
    assert words[:5] == ["compute", "tpus", "tpu-vm", "ssh", "my-slice"]
    assert {"--zone=europe-west4-b", "--worker=all"} <= set(words)
    environ = dict(line.split("=", 1) for line in (tmp_path / "task_").read_text().splitlines())
    assert environ["ARGUMENTS"] == f"{SUPERVISED} --workdir two words fail"
    assert len(environ["JAXSCALE_TOKEN"]) == 32


def test_the_pods_of_the_manifest_find_each_other(monkeypatch):
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    check_command(container)
    check_processes(monkeypatch, spec, container, job["metadata"]["name"], pod["subdomain"])
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
