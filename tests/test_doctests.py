"""Every example in a docstring returns what it shows, and every public name has one."""

import doctest
import importlib
import inspect
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import jaxscale

TEXTS = {
    str(path.with_suffix("")).replace("/", "."): path.read_text(encoding="utf-8")
    for path in sorted(pathlib.Path("jaxscale").rglob("*.py"))
}
WITH_EXAMPLES = [module for module, text in TEXTS.items() if ">>>" in text]
TRAINED = [module for module in WITH_EXAMPLES if "of the example of `fit`" in TEXTS[module]]
"""Modules whose examples use the run that the example of `fit` trains."""

FIT = jaxscale.fit.__module__

MOST_LINES = 6
"""Lines of an example of a public name, without what they print."""


def run_examples(module: str, names: dict[str, Any]) -> None:
    found = importlib.import_module(module)
    names = {"jax": jax, "jaxscale": jaxscale, "np": np, **names}
    failed, attempted = doctest.testmod(found, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert attempted
    assert not failed


@pytest.mark.parametrize("module", sorted({*WITH_EXAMPLES} - {*TRAINED, FIT}))
def test_examples(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(module, {})


@pytest.mark.proof
def test_examples_of_a_run(tmp_path, monkeypatch):
    """One run for all of them: its programs take seconds to compile."""
    monkeypatch.chdir(tmp_path)
    (example,) = doctest.DocTestFinder(recurse=False).find(
        jaxscale.fit, globs={"jaxscale": jaxscale}
    )
    assert not doctest.DocTestRunner().run(example, clear_globs=False).failed
    for module in TRAINED:
        run_examples(module, example.globs)


@pytest.mark.parametrize("name", jaxscale.__all__)
def test_a_public_name_has_a_short_example(name):
    example = doctest.DocTestParser().get_examples(inspect.getdoc(getattr(jaxscale, name)) or "")
    lines = sum(one.source.count("\n") for one in example)
    assert 1 <= lines <= MOST_LINES
