"""The list of mutants fits the code, and the tool tells caught mutants from the others."""

import ast
import collections
import functools
import json
import os
import pathlib
import runpy
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

ROOT = pathlib.Path(__file__).parents[2]
tool = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "mutants.py")))
MUTANTS = tool.read(ROOT / tool.FAULTS)


def test_there_are_enough_in_every_part_and_each_has_its_own_name():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 76
    parts = collections.Counter(mutant.folder for mutant in MUTANTS)
    assert parts.keys() >= {
        "training",
        "ops",
        "sharding",
        "pipeline",
        "checkpoint",
        "metrics",
        "data",
        "planner",
        "compiled",
        "run",
        "distributed",
    }
    assert min(parts.values()) >= 3


@functools.cache
def functions_of(path):
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_a_line_that_is_there_once_and_names_tests_that_exist(mutant):
    source = tool.mutated((ROOT / mutant.file).read_text(), mutant)
    ast.parse(source)
    words = shlex.split(mutant.tests)
    named = words[: words.index("-k")] if "-k" in words else words
    assert named
    assert len(words) in (len(named), len(named) + 2)
    for path, _, name in (word.partition("::") for word in named):
        functions = functions_of(path)
        assert not name or name in functions, f"{path} has no {name}"


@pytest.mark.proof
def test_four_fifths_have_a_test_in_the_first_tier():
    """Which is what people run, and what is run for every change."""
    tiers = tool.find_tiers(MUTANTS, ROOT)
    assert all(tiers.values())
    assert 5 * list(tiers.values()).count("first") >= 4 * len(tiers)


PACKAGE = "def double(x):\n    return 2 * x\n"
TESTS = """
import time
from jaxscale.sums import double

def test_double():
    assert double(2) == 4

def test_of_a_sign():
    assert double(-1) < 0

def test_that_ends():
    while double(1) == 3:
        time.sleep(1)

def test_that_fails_anyway():
    assert double(1) == 3
"""
LIST = """
[[ops]]
name = "adds"
file = "jaxscale/sums.py"
old = "2 * x"
new = "2 + x"
tests = "tests/test_sums.py::test_double tests/test_sums.py::test_of_a_sign"

[[ops]]
name = "a syntax error"
file = "jaxscale/sums.py"
old = "return 2"
new = "return return 2"
tests = "tests/test_sums.py::test_double"

[[other]]
name = "adds, and nobody looks"
file = "jaxscale/sums.py"
old = "2 * x"
new = "2 + x"
tests = "tests/test_sums.py::test_double"

[[other]]
name = "of a line that was changed"
file = "jaxscale/sums.py"
old = "3 * x"
new = "2 + x"
tests = "tests/test_sums.py::test_double"

[[other]]
name = "of a test that fails anyway"
file = "jaxscale/sums.py"
old = "2 * x"
new = "2 + x"
tests = "tests/test_sums.py -k anyway"

[[other]]
name = "of a test that does not exist"
file = "jaxscale/sums.py"
old = "2 * x"
new = "2 + x"
tests = "tests/test_sums.py -k nowhere"
"""
EXPECTED = {
    "adds": "caught",
    "a syntax error": "caught",
    "adds, and nobody looks": "survived",
    "of a line that was changed": "not run",
    "of a test that fails anyway": "not run",
    "of a test that does not exist": "not run",
}


@pytest.fixture
def checkout(tmp_path):
    """A package of one function, with the tool and a separate list of mutants."""
    files = {
        "jaxscale/__init__.py": "",
        "jaxscale/sums.py": PACKAGE,
        "tests/test_sums.py": TESTS,
        "tools/mutants.toml": LIST,
        "tools/mutants.py": (ROOT / "tools/mutants.py").read_text(),
        "pytest.ini": "[pytest]\naddopts = -q\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(checkout, *words):
    # The path as of a user who works on another checkout; without the plugins of the real suite.
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "tools/mutants.py", *words]
    return subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True)


@pytest.mark.proof
def test_what_survives_and_what_could_not_run_is_told_from_what_is_caught(checkout):
    done = run(checkout, "--json", "out.json", "--jobs", "2")
    found = json.loads((checkout / "out.json").read_text())
    assert {one["mutant"]["name"]: one["verdict"] for one in found} == EXPECTED, done.stderr
    assert done.returncode == 1
    assert "6 mutants: 2 caught, 1 survived, 3 not run\nby tier: 5 first, 1 none\n" in done.stdout
    assert found[0]["tier"] == "first"
    assert "survived: adds, and nobody looks (jaxscale/sums.py): 1 passed" in done.stdout
    assert "| adds | ops | jaxscale/sums.py |" in done.stdout
    assert (checkout / "jaxscale/sums.py").read_text() == PACKAGE


@pytest.mark.proof
def test_what_is_caught_is_a_success_and_lists_run_nothing(checkout):
    assert run(checkout, "--folder", "ops", "--only", "adds").returncode == 0
    listed = run(checkout, "--list", "--folder", "other")
    assert listed.returncode == 0
    assert listed.stdout.count("\n") == 2 + 4
    assert "no mutant matches" in run(checkout, "--only", "nothing").stderr


@pytest.mark.proof
def test_a_suite_that_hangs_has_noticed(checkout, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setitem(tool.run.__globals__, "LEAST_SECONDS", 1)
    monkeypatch.setitem(tool.run.__globals__, "SLOWER", 1)
    mutant = tool.Mutant(
        "ops", "hangs", "jaxscale/sums.py", "2 * x", "3 * x", "tests/test_sums.py::test_that_ends"
    )
    sound = tool._Sound(checkout)
    result = tool.run(mutant, checkout, sound)
    assert (result.verdict, result.said[:12]) == ("caught", "ended after ")
