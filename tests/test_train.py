"""The train command as people use it: typed wrong, stopped, continued, with nothing left to do."""

import json
import pathlib
import shlex
import signal
import subprocess
import sys

import jax
import pytest

from jaxscale.compiled.trace import CAUSES
from jaxscale.config import load
from jaxscale.config.layout import resolve_sizes
from jaxscale.run.metrics import EVALUATION_FIELDS, STEP_FIELDS, SUMMARY_FIELDS
from jaxscale.sharding.layout_checks import check_divides
from jaxscale.training.learning_rate import schedule
from tests.without_jax import without_jax

TINY = (
    "--config",
    "configs/tiny.py",
    "--config.run.checkpoint_every=2",
    "--config.data.seq_len=32",
    "--config.layout.fsdp=2",
    "--config.model.num_layers=1",
)


def train(*arguments, check=True):
    command = [sys.executable, "-W", "error", "-m", "jaxscale.train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if check and done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return done


def records(workdir: pathlib.Path) -> list[dict]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: line[key] for key in ("step", "loss", "examples")} for line in lines if "loss" in line
    ]


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A short run, uninterrupted."""
    workdir = tmp_path_factory.mktemp("whole")
    done = train(
        *TINY,
        "--workdir",
        workdir,
        "--config.run.steps=6",
        "--profile",
        "2:3",
        "--config.run.eval_every=3",
        "--json",
        workdir / "out.json",
    )
    return workdir, done.stdout


def test_a_run_leaves_what_it_says(whole):
    workdir, printed = whole
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1].keys() >= {
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens",
        "step_seconds",
        "data_seconds",
        "tokens_per_second",
        "mfu",
        "hfu",
    }
    assert steps[-1]["mfu"] is None, "a CPU has no known peak"
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary == json.loads((workdir / "out.json").read_text())
    assert summary["step"] == 6
    assert (workdir / "loss.png").stat().st_size > 10_000
    (events,) = (workdir / "tensorboard").iterdir()
    assert b"goodput" in events.read_bytes()
    assert b"seconds/compute" in events.read_bytes()
    assert list((workdir / "profile").rglob("*.xplane.pb"))
    assert summary["profile"]["steps"] == [2, 3]
    for device in summary["profile"]["processes"][0]:
        causes = device["seconds_by_cause"]
        assert all(causes[cause] > 0 for cause in CAUSES)
        assert sum(causes.values()) == pytest.approx(device["seconds"])
    assert json.loads((workdir / "config.json").read_text())["run"]["steps"] == 6
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["2", "4", "6"]
    for said in (
        "compiling the train step",
        "compiled in",
        "first step done",
        "eval loss",
        "A sample at step 6",
        "Next steps",
        "layers/attention/q",
    ):
        assert said in printed


def test_every_field_that_a_run_writes_is_documented(whole):
    """In docs/metrics.md, which these records make."""
    workdir, _ = whole
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        known = STEP_FIELDS if "loss" in json.loads(line) else EVALUATION_FIELDS
        assert json.loads(line).keys() <= known.keys()
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary.keys() <= {**STEP_FIELDS, **EVALUATION_FIELDS, **SUMMARY_FIELDS}.keys()
    assert SUMMARY_FIELDS.keys() <= summary.keys()


def test_the_rate_that_is_written_is_that_of_the_steps_own_update(whole):
    workdir, _ = whole
    config = json.loads((workdir / "config.json").read_text())
    rate = schedule(
        config["optimizer"]["schedule"],
        learning_rate=config["optimizer"]["learning_rate"],
        final=config["optimizer"]["final_learning_rate"],
        warmup_steps=config["optimizer"]["warmup_steps"],
        steps=config["run"]["steps"],
    )
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    written = [line["learning_rate"] for line in lines if "loss" in line]
    # The first update is made at the rate of none made before.
    assert written == pytest.approx([float(rate(updates)) for updates in range(6)], rel=1e-6)
    assert len(set(written)) > 3


def test_a_finished_run_has_nothing_to_do(whole, capsys, tmp_path):
    from jaxscale import train as command  # noqa: PLC0415

    workdir, _ = whole
    assert (
        command.main(
            [
                *TINY,
                "--workdir",
                str(workdir),
                "--config.run.steps=6",
                "--config.run.eval_batches=3",
                f"--json={tmp_path / 'again.json'}",
            ]
        )
        == 0
    )
    assert (tmp_path / "again.json").read_text() == (workdir / "summary.json").read_text()
    said = capsys.readouterr().out
    assert "nothing to do: run.steps = 6" in said
    assert "changed since: run.eval_batches = " in said


@pytest.mark.proof
def test_a_stopped_run_continues_as_if_it_had_not_stopped(whole, tmp_path):
    workdir, _ = whole
    command = [
        sys.executable,
        "-m",
        "jaxscale.train",
        *TINY,
        "--workdir",
        str(tmp_path),
        "--config.run.steps=6",
        "--config.run.eval_every=3",
        f"--json={tmp_path / 'out.json'}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    for line in process.stdout:
        if line.startswith("first step done"):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.communicate(timeout=300)[0]
    # The six steps may all be done before the signal arrives; then there is nothing to continue.
    assert process.returncode in (128 + signal.SIGTERM, 0)
    if process.returncode:
        so_far = json.loads((tmp_path / "out.json").read_text())
        assert f"SIGTERM: stopped after step {so_far['step']}" in rest
        assert so_far["loss"] == records(tmp_path)[-1]["loss"]
        done = train(
            *TINY, "--workdir", tmp_path, "--config.run.steps=6", "--config.run.eval_every=3"
        )
        assert "resuming at step" in done.stdout
    assert records(tmp_path) == records(workdir)


@pytest.mark.proof(
    but=("arguments1-did you mean 'configs/tiny.py'", "arguments2-did you mean --workdir")
)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--confg", "configs/tiny.py"], "did you mean --config"),
        (["--config", "configs/tinny.py"], "did you mean 'configs/tiny.py'"),
        (["--config", "configs/tiny.py", "--workdri", "x"], "did you mean --workdir"),
        (["--config", "configs/tiny.py", "--config.model.num_layer=3"], "model.num_layers"),
        (["--config", "configs/tiny.py", "--config.modle.num_layers=3"], "did you mean"),
        (["--config", "configs/tiny.py", "--profile", "3"], "FIRST:LAST"),
        (
            ["--config=tiny", "--describe", "--json=x.json"],
            "--json is for training, and --describe",
        ),
        (["--config=tiny", "--describe", "--profile=2:3"], "--profile is for training"),
        (["--config", "configs/tiny.py", "--trackers", "tensorbord"], "tensorboard"),
        (["--config", "configs/tiny.py", "--trackers", "none,tensorboard"], "give only none"),
        (["--config", "configs/tiny.py", "--trackers", "tensorboard,none"], "give only none"),
        (["--config", "configs/tiny.py", "--trackers", "wandb"], "pip install 'jaxscale[wandb]'"),
        (
            ["--config", "configs/tiny.py", "--json", "/nonexistent/x.json"],
            "no folder /nonexistent",
        ),
    ],
)
def test_a_typo_is_answered_before_jax_is_imported(arguments, said):
    done = without_jax("train", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


@pytest.mark.proof
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("layout.fsdp=16", "(fsdp 16) needs a multiple of 16 devices and there are 8; change one"),
        ("layout.fsdp=3", "or start with JAX_NUM_CPU_DEVICES=3 in the environment"),
        ("layout.tensor=8", "model.num_heads = 4 does not divide over layout.tensor = 8"),
        ("data.global_batch_size=12", "data.global_batch_size to 8 or 16"),
        ("layout.microbatches=3", "data.global_batch_size"),
        ("model.attention=cudnn", "model.attention"),
        ("model.attention=splash", "model.attention"),
        ("data.source=no_such_folder/*.txt", "no_such_folder"),
        ("data.tokenizer=no_such.json", "data.tokenizer"),
        ("model.vocab_size=200", "set model.vocab_size = 257"),
        ("data.source={stdlib}/**/*.py model.vocab_size=32000", "257 tokens; set --config.data."),
        ("data.heldout=0.999", "data.heldout"),
        ("model.d_model=1000000000", "this host has"),
        ("model.num_layers=1000000000", "lower model.num_layers or model.d_model"),
        ("data.global_batch_size=1000000000", "lower data.global_batch_size or data.seq_len"),
    ],
)
def test_what_does_not_fit_the_devices_or_the_data_is_refused(override, said, tmp_path, capsys):
    # In this process: importing JAX anew for each would take most of the time.
    from jaxscale import train as command  # noqa: PLC0415

    changed = [f"--config.{one}" for one in override.split()]
    with pytest.raises(SystemExit) as refused:
        command.main(["--config", "configs/tiny.py", "--workdir", str(tmp_path), *changed])
    assert refused.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")


def test_the_last_lines_name_what_was_written_in_commands_that_can_be_pasted():
    from jaxscale.train import _next_steps  # noqa: PLC0415

    config = load("configs/tiny.py")
    lines = _next_steps(
        "--config 'my configs/c.py'", "my run", config, ("tensorboard",), draws=True
    ).splitlines()
    commands = [line for line in lines if "workdir " in line]
    assert len(commands) == 3, "evaluate, generate, another layout"
    assert shlex.split(commands[0])[-1] == "my run"
    assert shlex.split(commands[1])[4:] == ["my run", "--prompt", "def main("]
    assert "--config 'my configs/c.py'" in "\n".join(lines)
    assert "--workdir 'my run_8'" in commands[2]
    before = ["layout.pipeline=2", "layout.data=4", "layout.microbatches=4", "layout.remat=keep:1"]
    text = _next_steps("", "r", load("configs/tiny.py", before), (), draws=True)
    there = text.split("--workdir r_8 ")[1].splitlines()[0].replace("--config.", "").split()
    after = load("configs/tiny.py", [*before, *there])
    check_divides(resolve_sizes(after.layout, 8), after.data.global_batch_size)
    assert lines[-1].endswith(
        "my run/loss.png, metrics.jsonl, summary.json, tensorboard/, checkpoints/"
    )
    config = load("configs/tiny.py", ["data.source=a.txt"])
    silent = _next_steps("--config c.py", "r", config, (), draws=True).splitlines()
    assert "generate --workdir r --prompt TEXT" in "\n".join(silent)
    assert silent[-1].endswith("r/loss.png, metrics.jsonl, summary.json, checkpoints/")
    chat = load("configs/tiny.py", ["data.source={'path': 'a.jsonl', 'messages': 'm'}"])
    assert "generate --workdir r --messages FILE.json" in _next_steps("", "r", chat, (), draws=True)
    whole = load("configs/tiny.py", ["data.heldout=0"])
    assert "Next steps:\n  train longer" in _next_steps("", "r", whole, (), draws=False)
    own = load("configs/tiny.py", ["model.family=tests.models.experts:make"])
    assert "evaluate --workdir r --trust_family\n  train longer" in _next_steps(
        "", "r", own, (), draws=False
    )


def test_a_file_in_the_place_of_the_checkpoints_is_refused_at_once(tmp_path, capsys):
    from jaxscale import train as command  # noqa: PLC0415

    (tmp_path / "checkpoints").touch()
    with pytest.raises(SystemExit):
        command.main(["--config", "configs/tiny.py", "--workdir", str(tmp_path)])
    assert (
        "checkpoints is a file, not the folder of the run's checkpoints" in capsys.readouterr().err
    )


@pytest.mark.parametrize("more", [["--describe"], ["--workdir", "w"]])
def test_devices_that_jax_does_not_find_are_one_line(more, monkeypatch, tmp_path, capsys):
    """With status 1: a driver may be there again when a supervisor starts the command again."""
    from jaxscale import train as command  # noqa: PLC0415

    def broken():
        raise AssertionError  # as JAX does, where no plugin of JAX_PLATFORMS loads

    monkeypatch.setattr(jax, "device_count", broken)
    monkeypatch.setattr(jax, "default_backend", broken)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    config = pathlib.Path("configs/tiny.py").resolve()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command.main(["--config", str(config), *more])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: JAX does not start with JAX_PLATFORMS = 'cuda' in the env")
    assert "python -m jaxscale.doctor" in said
    assert said.count("\n") == 1


def test_describe_prints_the_layout_and_trains_nothing(tmp_path, capsys):
    from jaxscale import train as command  # noqa: PLC0415

    arguments = [
        "--config",
        "configs/tiny.py",
        "--workdir",
        str(tmp_path / "run"),
        "--describe",
        "--config.layout.fsdp=4",
    ]
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "data 2 x fsdp 4" in printed
    assert "zero 3 *" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.proof
def test_a_changed_batch_size_text_or_model_is_not_continued(whole, capsys):
    from jaxscale import train as command  # noqa: PLC0415

    workdir, _ = whole
    for override, said in (
        ("data.global_batch_size=16", "data.global_batch_size = 8 and has read 48 examples, and"),
        ("data.seed=1", "data.seed = 0, and this run has data.seed = 1; restore it"),
        ("model.d_ff=64", "model.d_ff = 64 here, 128 there"),
        ("model.rope_theta=2e4", "model with other settings; restore them:\n  model.rope_theta = "),
        ("optimizer.name=lion", "opt_state/0/nu/embed/tokens: only in the checkpoint"),
    ):
        with pytest.raises(SystemExit):
            command.main(
                [*TINY, "--workdir", str(workdir), "--config.run.steps=8", f"--config.{override}"]
            )
        captured = capsys.readouterr()
        assert said in captured.err
        assert "compiling" not in captured.out
