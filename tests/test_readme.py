"""The README's commands and its notebook block, run as they are written."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import pytest

from jaxscale import __main__

README = pathlib.Path("README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def run(command: list[str], **environment) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.proof
def test_the_first_command_trains_shortened(tmp_path):
    """The same command except its length, its folder, and the environment that is set already."""
    (command,) = [block for block in blocks("bash") if "jaxscale.train" in block]
    install, _, train = command.strip().partition(" && ")
    assert install == "pip install -q uv"
    words = train.split()
    assert words[:4] == ["uv", "run", "-q", "python"]
    words[words.index("--workdir") + 1] = str(tmp_path)
    short = [
        "--config.run.steps=2",
        "--config.run.eval_batches=1",
        "--config.model.num_layers=1",
        "--config.data.seq_len=64",
        "--config.optimizer.warmup_steps=1",
        "--config.data.source={stdlib}/email/**/*.py",
    ]
    printed = run([sys.executable, *words[4:], *short], JAX_NUM_CPU_DEVICES="1")
    assert "step 2/2" in printed
    assert "A sample at step 2" in printed
    # What it says to do next works too.
    for line in re.findall(r"^  python (-m jaxscale\.(?:evaluate|generate) .*)$", printed, re.M):
        arguments = line.replace('"def main("', "def").split()
        assert run([sys.executable, *arguments], JAX_NUM_CPU_DEVICES="1")


def test_the_second_command_is_this_suite():
    (command,) = [block for block in blocks("bash") if "pytest" in block]
    expected = "pip install -q uv && uv run -q --extra dev pytest -n 2 --dist worksteal"
    assert command.strip() == expected


@pytest.mark.proof
def test_the_notebook_block_of_ten_lines_runs_and_runs_again(tmp_path, monkeypatch, capsys):
    """In this process, which has the eight devices and JAX imported."""
    (block,) = blocks("python")
    lines = [line for line in block.splitlines() if line]
    assert len(lines) <= 10
    shutil.copytree("configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    names = {}
    with jax.enable_x64(False):
        for _ in range(2):
            exec(block, names)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    losses = [float(words[1]) for words in lines if len(words) == 2 and words[0].isdecimal()]
    assert len(losses) == 10
    assert losses[:5] == losses[5:]
    assert losses[4] < losses[0]


def test_the_package_lists_the_commands_of_the_readme():
    done = subprocess.run([sys.executable, "-m", "jaxscale"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    names = re.compile(r"python -m jaxscale\.(\w+)")
    assert set(names.findall(done.stdout)) == set(names.findall(README))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("trian", "error: 'trian' is not a command; did you mean python -m jaxscale.train?"),
        ("plan", "error: 'plan' is not a command; did you mean python -m jaxscale.plan?"),
        ("xyz", "error: 'xyz' is not a command"),
    ],
)
def test_a_word_after_the_package_is_answered_with_the_command(word, said, capsys):
    with pytest.raises(SystemExit) as refused:
        __main__.main([word, "--config", "tiny"])
    assert refused.value.code == 2
    assert capsys.readouterr().err == f"{said}\n"


def test_the_package_has_help_and_a_reader_that_has_seen_enough():
    assert __main__.main(["--help"]) == 0
    shell = f"{sys.executable} -m jaxscale | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


@pytest.mark.proof
@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(\w+\.py)`", README))))
def test_every_file_that_it_names_is_there(path):
    found = [p for p in pathlib.Path(".").rglob(path) if ".venv" not in p.parts]
    assert found
