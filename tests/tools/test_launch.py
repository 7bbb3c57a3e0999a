"""The SLURM script and the Kubernetes manifest, as far as they can be tried without a cluster."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import yaml

from jaxscale import supervise
from jaxscale.config import shipped_configs
from jaxscale.distributed import launcher

FOLDER = pathlib.Path("tools/launch").resolve()

SRUN = """#!/bin/bash
# Three tasks on two nodes, each with the variables that srun sets; SIGUSR1 is passed on.
echo "srun $*" >> called
while [[ "$1" == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_NUM_NODES=2
export SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_STEP_NODELIST='gpu[7-8]'
trap 'kill -USR1 $tasks' USR1
for place in "0 0 0 gpu7" "1 0 1 gpu7" "2 1 0 gpu8"; do
    read -r process node local host <<< "$place"
    SLURM_PROCID=$process SLURM_NODEID=$node SLURM_LOCALID=$local SLURMD_NODENAME=$host "$@" &
    tasks+=" $!"
done
status=0
for task in $tasks; do
    while kill -0 "$task" 2>/dev/null; do wait "$task"; status=$?; done
done
exit $status
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> called
"""
SUPERVISED = "-u -m jaxscale.supervise -- python -u -m jaxscale.train"
PYTHON = f"""#!/bin/bash
# In the place of a training: who it is and what it is to do; it takes its time, or fails. Under
# SLURM the supervisor is ours.
if [[ "$3" == jaxscale.supervise && -n "$SLURM_JOB_ID" ]]; then
    exec {sys.executable} -u -m jaxscale.supervise --wait_seconds=0 "${{@:4}}"
fi
{{ env | grep -E '^(SLURM_|JAXSCALE_TOKEN)'; echo "ARGUMENTS=$*"; }} > "task_$SLURM_PROCID"
trap 'exit ${{ENDS:-143}}' TERM USR1
if [[ "$*" == *fail ]]; then exit 2; fi
if [[ "$*" == *breaks ]]; then
    exit 1
fi
touch "ready_$SLURM_PROCID"
while true; do sleep 0.1; done
"""


@pytest.fixture
def job(tmp_path):
    """Starts the script where SLURM's commands are played by others."""
    for name, text in {"srun": SRUN, "python": PYTHON, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    started = []

    def start(*arguments, **environ):
        environ |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
        environ = {"SLURM_JOB_NUM_NODES": "2", "PYTHONPATH": str(FOLDER.parents[1])} | environ
        with (tmp_path / "stderr").open("w") as stderr:
            process = subprocess.Popen(
                [FOLDER / "slurm.sh", *arguments],
                env=environ,
                cwd=tmp_path,
                stderr=stderr,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def called(folder):
    """What SLURM was told."""
    return (folder / "called").read_text().splitlines()


def test_the_tasks_of_the_slurm_script_find_each_other(job, tmp_path):
    assert job("fail").wait(60) == 2
    places, tokens = [], set()
    for process_id in range(3):
        lines = (tmp_path / f"task_{process_id}").read_text().splitlines()
        environ = dict(line.split("=", 1) for line in lines)
        assert environ.pop("ARGUMENTS") == "-u -m jaxscale.train fail"
        tokens.add(environ.pop("JAXSCALE_TOKEN"))
        options = dict.fromkeys(launcher.FLAGS)
        places.append(launcher.find_processes(type("Options", (), options)(), environ))
    assert [len(token) for token in tokens] == [32]
    assert [place.process_id for place in places] == [0, 1, 2]
    assert {place.num_processes for place in places} == {3}
    assert {place.coordinator.partition(":")[0] for place in places} == {"gpu7"}
    assert len(called(tmp_path)) == 1, "what is refused is not tried again"


@pytest.mark.proof
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGUSR1, 143), (signal.SIGUSR1, 1), (signal.SIGTERM, 143)]
)
def test_before_its_time_is_up_a_slurm_job_saves_and_goes_back_into_the_queue(
    job, tmp_path, number, status
):
    """SIGUSR1 says that its time is up, and that save may fail; after SIGTERM it is to end."""
    process = job("--config", "x", ENDS=str(status))
    for process_id in range(3):
        deadline = time.monotonic() + 60
        while not (tmp_path / f"ready_{process_id}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == status
    back = ["scontrol requeue 4711"] if number == signal.SIGUSR1 else []
    assert called(tmp_path)[1:] == back


def test_a_slurm_script_that_no_job_can_run_is_refused(job, tmp_path):
    for environ, said in (
        ({"SLURM_JOB_NUM_NODES": ""}, "error: this script is not in a SLURM job; start it"),
        ({"SPARE_NODES": "2"}, "error: SPARE_NODES = 2 leaves none of 2 nodes to train on"),
    ):
        assert job("--config", "x", **environ).wait(60) == 2
        assert said in (tmp_path / "stderr").read_text()
    assert not (tmp_path / "called").exists()


@pytest.mark.proof
def test_a_slurm_job_that_keeps_failing_ends(job, tmp_path):
    assert job("breaks").wait(60) == 1
    srun = "srun --nodes=2 --ntasks=2 --label --kill-on-bad-exit=0 --wait=120 python -u -m "
    assert called(tmp_path) == [srun + "jaxscale.train breaks"] * 5
    log = (tmp_path / "jaxscale-4711.incidents.jsonl").read_text()
    assert len(log.splitlines()) == 5


def check_command(container):
    """Supervised, and with a token from a secret."""
    assert container["command"] == ["python", *SUPERVISED.split()]
    flag, name = container["args"][:2]
    assert flag == "--config"
    assert name in shipped_configs(), "the image has the package, and no checkout"
    (token,) = (each for each in container["env"] if each["name"] == "JAXSCALE_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "jaxscale", "key": "token"}}


def check_failures(spec, container):
    """A refused run is not started again; a lost pod is replaced while the others wait for it."""
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "which podFailurePolicy asks for"
    refused, lost = spec["podFailurePolicy"]["rules"]
    codes = {"containerName": container["name"], "operator": "In", "values": [supervise.REFUSED]}
    assert refused == {"action": "FailJob", "onExitCodes": codes}
    assert lost["action"] == "Ignore"
    assert lost["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    (node,) = (each for each in container["env"] if each["name"] == "JAXSCALE_NODE")
    assert node["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


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
    check_failures(spec, container)
    (rule,) = jobs["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
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
    assert done.returncode == 2
    words = (tmp_path / "gcloud_arguments").read_text().splitlines()
    assert words[:5] == ["compute", "tpus", "tpu-vm", "ssh", "my-slice"]
    assert {"--zone=europe-west4-b", "--worker=all"} <= set(words)
    environ = dict(line.split("=", 1) for line in (tmp_path / "task_").read_text().splitlines())
    assert environ["ARGUMENTS"] == f"{SUPERVISED} --workdir two words fail"
    assert len(environ["JAXSCALE_TOKEN"]) == 32


@pytest.mark.parametrize("words", [[], ["my-slice", "--config", "tiny"], ["my-slice", "zone"]])
def test_a_tpu_slice_without_a_zone_or_arguments_is_refused(words):
    done = subprocess.run([FOLDER / "tpu_vm.sh", *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: expected the name of a slice, its zone, and the")


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
    check_failures(spec, container)
    check_processes(monkeypatch, spec, container, job["metadata"]["name"], pod["subdomain"])
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
