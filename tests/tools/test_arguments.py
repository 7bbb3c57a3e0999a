"""Tools that need a library which may be missing still answer --help, and name what is missing."""

import subprocess
import sys

import pytest

WITHOUT = """
import runpy, sys
sys.modules[sys.argv.pop(1)] = None
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("library", "script", "wrong"),
    [
        ("torch", "tools/hf_goldens.py", ("gpt3", "no case is called gpt3; there are llama, ")),
        ("nbformat", "tools/notebooks/execute.py", ("no.ipynb", "there is no file no.ipynb")),
    ],
)
def test_help_needs_no_optional_library(library, script, wrong):
    def run(*words):
        command = [sys.executable, "-c", WITHOUT, library, script, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr
        return done

    assert run("--help").stdout.startswith("usage: ")
    for words, said in (((), f"{library} is not installed here"), ((wrong[0],), wrong[1])):
        done = run(*words)
        assert done.returncode == 2
        assert f"error: {said}" in done.stderr
