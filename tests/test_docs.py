"""The pages of docs/: each opens with what it is for and a command to try, which is run here; and
what any page names is there."""

import contextlib
import dataclasses
import functools
import importlib
import io
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import pytest

from jaxscale import train
from jaxscale.config import DataConfig, RunConfig
from jaxscale.config.data_source import to_plain
from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelConfig
from jaxscale.config.model.model import CHOICES
from jaxscale.config.optimizer import OptimizerConfig
from jaxscale.config.remat_policy import BLOCK_TENSORS
from jaxscale.model_families.shipped import SHIPPED
from jaxscale.run import metrics

PAGES = sorted(pathlib.Path("docs").glob("*.md"))
TEXTS = {
    path.name: path.read_text(encoding="utf-8") for path in [*PAGES, pathlib.Path("README.md")]
}
SMALLEST = ["--config.model.num_layers=1", "--config.data.heldout=0", "--trackers", "none"]
SHORTER = {  # page -> what makes its command shorter, or smaller than what it shows
    "metrics.md": [*SMALLEST, "--config.run.steps=2"],
    "multi_process.md": [*SMALLEST, "--config.run.steps=2"],
    "training.md": [*SMALLEST, "--config.run.steps=2"],
    "planning.md": ["--pin", "tensor_rows=1", "offload=none", "schedule=1f1b"],
    "autotune.md": ["--trials", "1", "--config.model.num_layers=1"],
    "reliability.md": SMALLEST,
}
WORKED = ("worked_example.md", "hugging_face.md")
"""Pages that open with the first command of the worked example."""
INDEX = {name for name in TEXTS if name != "README.md"}


@pytest.mark.proof(
    but=(
        "api",
        "architecture",
        "commands",
        "correctness",
        "data",
        "decisions",
        "features",
        "glossary",
        "kernels",
        "layouts",
        "own_model",
        "pipelines",
        "planning",
        "settings",
    )
)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in WORKED], ids=lambda path: path.stem
)
def test_a_page_opens_with_a_command_that_runs(page, tmp_path, monkeypatch):
    for line in opening(page.name).splitlines():
        run(line, tmp_path, monkeypatch, *SHORTER.get(page.name, []))


def opening(name: str) -> str:
    title, _, purpose, *rest = TEXTS[name].splitlines()
    assert title.startswith("# ")
    assert purpose
    block = re.search(r"```bash\n(.*?)```", "\n".join(rest[:20]), re.DOTALL)
    assert block, "no command near the top of the page"
    return block.group(1).replace("\\\n", "")


def run(line: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    """A command of a page, with its runs in a folder: in a process of its own where it trains or
    measures, and else in this one, which has eight devices and JAX imported."""
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    assert words.pop(0) == "python"
    words = [re.sub(r"^runs/", f"{folder}/", word) for word in words]
    if {"--describe", "--top"} & set(words):
        monkeypatch.syspath_prepend(variables.get("PYTHONPATH", "."))
        command = importlib.import_module(words[1])
        with jax.enable_x64(False):
            assert words[0] == "-m"
            assert command.main([*words[2:], *more]) == 0
        return
    here = pathlib.Path(sys.executable).parent  # so that its own `python` is this one
    done = subprocess.run(
        [sys.executable, *words, *more],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "PATH": f"{here}{os.pathsep}{os.environ['PATH']}",
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_ENABLE_X64": "0",
            **variables,
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.proof
def test_the_worked_example_works(tmp_path, monkeypatch):
    """All its commands and Python, in this process, which has the eight devices that they ask for
    and JAX imported."""
    monkeypatch.setattr(train, "_show_sample", lambda *arguments: None)  # seconds to compile
    monkeypatch.setattr(metrics, "plot", lambda *arguments: None)
    assert len({opening(name) for name in WORKED}) == 1
    text = TEXTS["worked_example.md"].replace("runs/", f"{tmp_path}/")
    blocks = re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 8
    with jax.enable_x64(False):
        for language, block in blocks:
            if language == "python":
                exec(block, {})
                continue
            words = shlex.split(block.replace("\\\n", ""))
            words = words[words.index("python") :]
            assert words[:2] == ["python", "-m"]
            command = importlib.import_module(words[2])
            more = ["--trackers", "none", "--config.data.heldout=0"] if command is train else []
            assert command.main([*words[3:], *more]) == 0


@pytest.mark.proof
def test_a_model_is_called_in_a_notebook_as_the_page_says():
    (block,) = re.findall(r"```python\n(.*?)```", TEXTS["hugging_face.md"], re.DOTALL)
    exec(block, found := {})
    np.testing.assert_allclose(found["padded"][:, :2], found["logits"][:, :2], rtol=1e-5)


@functools.cache
def help_of(program: tuple[str, ...]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
        ask_for_help(program)
    assert not ended.value.code
    return out.getvalue()


def ask_for_help(program: tuple[str, ...]) -> None:
    """In this process, which has JAX imported."""
    if program[0] == "-m":
        importlib.import_module(program[1]).main(["--help"])
    # Some set variables for JAX before they import it.
    with mock.patch.dict(os.environ), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program[0], "--help"])
        patch.syspath_prepend(str(pathlib.Path(program[0]).parent))
        runpy.run_path(program[0], run_name="__main__")


def commands() -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Page, program and flags of every command of ours on any page."""
    found = set()
    for name, text in TEXTS.items():
        code = re.findall(r"```(?:bash)?\n(.*?)```", text, re.DOTALL)
        code += re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        lines = "\n".join(" ".join(part.split("\\\n")) for part in code)
        for line in re.split(r"\n| -- ", lines):  # a command may start another one
            match = re.search(r"python (-m jaxscale\.\w+|tools/[\w/]+\.py)(.*)", line)
            if not match or match.group(1) == "tools/launch/local.py":
                continue
            flags = re.findall(r"(?<=\s)--[a-z_]+\b(?!\.)", match.group(2))
            found.add((name, tuple(match.group(1).split()), tuple(flags)))
    return sorted(found)


def test_every_flag_on_a_page_exists():
    checked = 0
    for page, program, flags in commands():
        for flag in flags:
            assert flag in help_of(program), f"{page}: {' '.join(program)} has no {flag}"
            checked += 1
    assert checked > 10


def test_every_command_that_writes_has_a_folder_of_its_own():
    """A run that is complete there, or a folder that is not empty, would end the second one."""
    first: dict[str, str] = {}
    for text in TEXTS.values():
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                trains = "jaxscale.train" in line and not re.search(r"--describe|--help", line)
                folders = re.findall(r"--output (\S+)", line)
                if trains:
                    folders = re.findall(r"--workdir (\S+)", line)
                    assert folders, f"the folder is that of other commands: {line}"
                for folder in folders:
                    assert first.setdefault(folder, line) == line
    assert len(first) > 10


def headings(name: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", TEXTS[name], re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_and_file_exists(name):
    folder = pathlib.Path("." if name == "README.md" else "docs")
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([\w-]+))?\)", TEXTS[name]):
        if target.startswith("http"):
            continue
        assert (folder / target).exists(), target
        if anchor:
            assert anchor in headings(pathlib.Path(target).name or name), f"{target}#{anchor}"
    for path in re.findall(r"`((?:jaxscale|tools|configs|tests)/[\w/]+\.\w+)`", TEXTS[name]):
        assert pathlib.Path(path).exists(), path


def test_every_page_is_linked_from_the_readme():
    assert set(re.findall(r"\(docs/(\w+\.md)", TEXTS["README.md"])) == INDEX


def test_every_family_and_its_settings_are_named():
    page = TEXTS["model_families.md"]
    settings = {name for family in SHIPPED for name in (family.name, *family.settings)}
    assert not [name for name in settings | {*CHOICES["activation"]} if f"`{name}`" not in page]
    everywhere = {
        field.name: str(field.default)
        for field in dataclasses.fields(ModelConfig)
        if "plain" not in field.metadata and field.name != "family"
    }
    assert dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", page, re.MULTILINE)) == everywhere
    assert "| |" not in page.partition("| setting | families | meaning |")[2]


@pytest.mark.parametrize("record", [RunConfig, DataConfig, OptimizerConfig])
def test_every_setting_of_a_run_is_listed_with_its_default(record):
    section = record.__name__.removesuffix("Config").lower()
    rows = re.findall(rf"^\| `{section}\.(\w+)` \| `(.*?)` \|", TEXTS["settings.md"], re.MULTILINE)
    defaults = {
        field.name: str(getattr(record(), field.name)) for field in dataclasses.fields(record)
    }
    if record is DataConfig:
        defaults["source"] = str(to_plain(record().source[0]))
    assert dict(rows) == defaults


def test_every_setting_of_a_layout_is_listed_with_its_default():
    rows = re.findall(r"^\| (`layout\..*?) \| (`.*?) \| ", TEXTS["layouts.md"], re.MULTILINE)
    listed = {
        name: default
        for names, defaults in rows
        for name, default in zip(
            re.findall(r"`layout\.(\w+)`", names), re.findall(r"`(.*?)`", defaults), strict=True
        )
    }
    defaults = {field.name: str(field.default) for field in dataclasses.fields(Layout)}
    assert listed == defaults
    assert not [name for name in BLOCK_TENSORS if f"`{name}`" not in TEXTS["layouts.md"]]


def test_the_index_of_the_architecture_page_names_one_file_each():
    rows = re.findall(r"^\| ([^|]+) \| `([\w/]+\.py)` \|$", TEXTS["architecture.md"], re.MULTILINE)
    assert len({code for code, _ in rows}) == len(rows) >= 30
    for _, path in rows:
        assert pathlib.Path("jaxscale", path).is_file(), path
