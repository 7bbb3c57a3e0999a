"""The tiers of this suite, and the programs that it keeps on disk: conftest.py with toy tests."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

CONFTEST = pathlib.Path(__file__).with_name("conftest.py")
TESTS = """
import pytest

def test_first():
    pass

@pytest.mark.proof(but=("b",))
@pytest.mark.parametrize("case", ["a", "b", pytest.param("c", marks=pytest.mark.slow)])
def test_cases(case):
    pass

@pytest.mark.slow
def test_slow():
    pass
"""
MARKERS = """
[pytest]
addopts = -p no:cacheprovider -p no:xdist
markers =
    proof: a
    slow: b
    compiles: c
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pytest.ini").write_text(MARKERS)
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_toys.py").write_text(TESTS)
    return tmp_path


def run(folder, *arguments, **environ):
    """What ran, and what was printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", *arguments],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )
    return re.findall(r"::test_(\S+) PASSED", done.stdout), done.stdout + done.stderr


@pytest.mark.proof(but=("default", "proof"))
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["first", "cases[b]"]),
        (["-m", "proof"], ["cases[a]"]),
        (["-m", "slow"], ["cases[c]", "slow"]),
        (["-m", "not slow"], ["first", "cases[a]", "cases[b]"]),
        (["test_toys.py::test_cases[a]"], ["cases[a]"]),
        (["test_toys.py::test_slow"], ["slow"]),
    ],
    ids=["default", "proof", "slow", "not slow", "a case", "a slow one"],
)
def test_each_test_is_in_one_tier(arguments, expected, folder):
    ran, printed = run(folder, *arguments)
    assert ran == expected, printed


def test_the_last_lines_count_what_is_left_to_other_tiers(folder):
    _, printed = run(folder)
    assert printed.splitlines()[-2:] == [
        "left to the tier proof (pytest -m proof -n 2 --dist worksteal): 1",
        "left to the tier slow (pytest -m slow -n 2): 2",
    ]
    assert "processor time: 0." in printed


@pytest.mark.proof
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TESTS.replace('("b",)', '("b", "d")'), "test_cases is a proof except 'd', no case of it"),
        (TESTS + "pytestmark = pytest.mark.proof", "is marked proof and slow; one is allowed"),
    ],
)
def test_marks_that_say_nothing_are_refused(text, said, folder):
    (folder / "test_toys.py").write_text(text)
    ran, printed = run(folder)
    assert said in printed
    assert not ran


KEPT = """
import conftest, jax, numpy, pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

conftest.SHORTEST_SECONDS = 0

def compiled(n, devices=1):
    mesh = Mesh(numpy.array(jax.devices()[:devices]), ("x",))
    place = NamedSharding(mesh, PartitionSpec("x"))
    jax.jit(lambda x: x @ x + n, in_shardings=place)(numpy.ones((4, 4)))

def test_kept():
    compiled(1)

@pytest.mark.compiles
def test_compiles():
    compiled(2)

def test_several_devices():
    compiled(3, 2)

def test_kept_again():
    compiled(4)
"""


@pytest.mark.proof
def test_programs_are_kept_of_one_device_and_not_where_a_test_looks_at_compiling(folder):
    (folder / "test_toys.py").write_text(KEPT)
    place = folder / "kept"
    for name, count in (("", 0), (str(place), 2)):
        ran, printed = run(folder, JAXSCALE_TEST_CACHE=name)
        assert ran == ["kept", "compiles", "several_devices", "kept_again"], printed
        assert len([*place.glob("*/jit__lambda*-cache")]) == count
