"""The doctor: a healthy machine passes, a broken one is told what is wrong, and status 1."""

import json
import pathlib
import re
import tomllib

import jax
import pytest

from jaxscale import config as configs
from jaxscale import doctor
from jaxscale.config.layout import Layout
from jaxscale.run import trainer
from jaxscale.run.setup import preflight
from jaxscale.training import xla_options

PROJECT = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]


def distribution(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name
    return name.group()


def test_a_healthy_machine_is_ready(tmp_path, capsys):
    file = tmp_path / "findings.json"
    assert doctor.main(["--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "ready to train" in printed
    findings = json.loads(file.read_text())
    assert findings["problems"] == []
    assert findings["self_test"]["passed"]
    assert findings["versions"]["jax"] == jax.__version__
    assert [row["count"] for row in findings["devices"]] == [jax.device_count()]
    assert findings["devices"][0]["bf16_peak_flops_per_second"] is None
    assert re.search(r"8 x cpu .*bfloat16 peak n/a", printed)


def test_the_self_test_notices_a_wrong_collective(monkeypatch):
    monkeypatch.setattr(jax.lax, "psum", lambda x, axis: x)
    assert not doctor.self_test()["passed"]


def test_the_self_test_notices_weights_that_are_not_gathered(monkeypatch, capsys):
    gather = jax.lax.all_gather

    def mixed_up(x, axis, tiled):
        return gather(x, axis, tiled=tiled)[::-1]

    monkeypatch.setattr(jax.lax, "all_gather", mixed_up)
    assert doctor.main([]) == 1
    assert "problem: the self-test failed: the result differs" in capsys.readouterr().out


def test_a_crash_in_the_self_test_is_a_finding(monkeypatch, capsys):
    def broken(x, axis, tiled):
        raise RuntimeError("no such link")

    monkeypatch.setattr(jax.lax, "all_gather", broken)
    assert doctor.main([]) == 1
    assert "FAILED" in (printed := capsys.readouterr().out)
    assert "RuntimeError: no such link" in printed


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("no backend was found"), "no backend was found"),
        (AssertionError(), "no JAX: no plugin for JAX_PLATFORMS = cuda loads"),  # as JAX has it
    ],
)
def test_an_installation_without_devices_is_a_finding(error, said, monkeypatch, capsys):
    def broken():
        raise error

    monkeypatch.setattr(jax, "devices", broken)
    monkeypatch.setattr(jax, "local_devices", broken)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert doctor.main([]) == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "fine"),
    [
        ("0.11.2", True),
        ("0.12.0.1", True),
        ("1.0", True),
        ("0.11.3.dev2", True),
        ("0.11.1", False),
        ("0.9.9", False),
    ],
)
def test_an_old_jax_is_a_problem(version, fine):
    found = doctor.problems({"jax": version}, {}, {"passed": True})
    assert (found == []) == fine
    assert fine or f"jax is {version}; at least 0.11.2" in found[0]


def test_a_package_that_is_not_installed_is_a_problem(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "PACKAGES", {"jax": "jax", "no-such-distribution": "no_such"})
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert "problem: no-such-distribution is not installed" in printed
    assert "cannot be imported" not in printed


def test_a_package_without_what_it_needs_is_a_problem(monkeypatch, tmp_path, capsys):
    """As pip leaves it with --no-deps."""
    (tmp_path / "needs_more.py").write_text("import no_such_requirement")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "PACKAGES", {"jax": "jax", "numpy": "needs_more"})
    assert doctor.main([]) == 1
    assert (
        "problem: numpy cannot be imported (ModuleNotFoundError: No module named "
        "'no_such_requirement'): uv sync --inexact --reinstall"
    ) in capsys.readouterr().out


def test_a_flag_that_the_compiler_refuses_is_left_out(monkeypatch, capsys):
    made_up = xla_options.XlaFlag("xla_cpu_no_such_flag", True, "to see it refused")
    monkeypatch.setitem(xla_options.XLA_FLAGS, "cpu", (made_up,))
    (tried,) = doctor.xla_flags()["xla_flags"]
    assert "No such compile option" in tried["refusal"]
    assert doctor.main([]) == 0
    assert "xla_cpu_no_such_flag=true: to see it refused; left out" in capsys.readouterr().out


def test_a_gpu_that_jax_does_not_see_gets_a_hint(monkeypatch, tmp_path, capsys):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(doctor, "ACCELERATORS", {str(tmp_path / "nvidia0"): ("gpu", "cuda13")})
    assert doctor.main([]) == 0
    assert "exists, but JAX runs on cpu: uv sync --inexact --extra cuda13" in (
        capsys.readouterr().out
    )


def test_a_missing_extra_comes_with_its_command(monkeypatch):
    monkeypatch.setitem(doctor.EXTRAS, "wandb", ("no-such-distribution",))
    assert doctor.missing_extras()["wandb"] == "uv sync --inexact --extra wandb"
    monkeypatch.setitem(doctor.EXTRAS, "wandb", ("jax",))
    assert "wandb" not in doctor.missing_extras()


def test_the_doctor_knows_what_the_package_declares():
    assert set(doctor.EXTRAS) == set(PROJECT["optional-dependencies"])
    assert {distribution(line) for line in PROJECT["dependencies"]} <= set(doctor.PACKAGES)
    assert f"jax>={doctor.MINIMUM_JAX}" in PROJECT["dependencies"]


def test_a_config_is_of_a_preflight(capsys):
    for flags, said in (
        (["--config", "nope"], "are for --preflight; add it"),
        (["--config.layout.fsdp=4"], "are for --preflight; add it"),
        (["--workdir", "runs/mine"], "are for --preflight; add it"),
        (["--preflight"], "needs the run's --config"),  # not figures of some other run
    ):
        with pytest.raises(SystemExit) as refused:
            doctor.main(flags)
        assert refused.value.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.proof
def test_preflight_measures_and_says_what_to_do(tmp_path, capsys, monkeypatch):
    flags = ["--preflight", "--config=tiny", "--config.layout.fsdp=4", "--config.layout.data=2"]
    monkeypatch.setattr(doctor, "examine", lambda: HEALTHY)
    monkeypatch.setattr(doctor, "show", lambda report: "")
    monkeypatch.setattr(preflight, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(preflight, "SLOW_BYTES_PER_SECOND", 0)
    assert doctor.main([*flags, f"--workdir={tmp_path}", f"--json={tmp_path / 'f.json'}"]) == 0
    found = json.loads((tmp_path / "f.json").read_text())["preflight"]
    checks = ["hosts", "clocks", "devices", "sum over data 2", "sum over fsdp 4"]
    assert [one["check"] for one in found] == [*checks, "storage", "disk", "host memory"]
    assert not any(one["advice"] for one in found)
    assert [path.name for path in tmp_path.iterdir()] == ["f.json"]
    capsys.readouterr()
    # A folder that cannot be made; clocks that differ; no free space.
    monkeypatch.setattr(preflight, "host_memory_bytes", lambda: 1000)
    reports = {"clocks": [0.0, 5.0], "unresolved": [["b"], []]}
    monkeypatch.setattr(
        preflight.processes, "all_reports", lambda topic, own: reports.get(topic, [own])
    )
    (tmp_path / "file").touch()
    assert doctor.main([*flags, f"--workdir={tmp_path / 'file'}"]) == 1
    said = capsys.readouterr().out
    for line in (
        "no IP address for b: add them to DNS or /etc/hosts",
        "clocks: at most 5.00 s apart; set the clocks by NTP",
        "storage: cannot be written: [Errno 17] File exists",
        "host memory: ",
        "train on more hosts",
    ):
        assert line in said


def test_preflight_knows_what_a_sum_should_take():
    layout = Layout(data=8, fsdp=8)
    seconds = preflight.expected_seconds(layout, 64, "NVIDIA H100 80GB HBM3", "gpu")
    assert list(seconds) == ["data", "fsdp"]
    nvlink = 2 * 7 / 8 * 4 * 2**20 / 450e9  # at the nominal rate
    assert nvlink < seconds["fsdp"] < 8 * nvlink
    assert seconds["data"] > 2 * seconds["fsdp"], "between nodes"
    for kind, platform in (("unheard of", "gpu"), ("cpu", "cpu")):
        assert preflight.expected_seconds(layout, 64, kind, platform) == {}


HEALTHY = {"processes": [{"problems": []}]}


def test_a_large_run_is_examined_before_anything_compiles(tmp_path, monkeypatch, caplog):
    found = preflight.Finding("clocks", "at most 5.00 s apart", "set the clocks by NTP")
    monkeypatch.setattr(trainer, "LARGE_RUN", jax.device_count())
    monkeypatch.setattr(preflight, "examine_run", lambda config, workdir: [found])

    def compiles(*_, **__):
        raise NotImplementedError

    monkeypatch.setattr(trainer, "make_engine", compiles)
    with pytest.raises(NotImplementedError):
        trainer.open_trainer(configs.load("configs/tiny.py"), tmp_path)
    (said,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert said.message == f"warning: preflight, {found}"
