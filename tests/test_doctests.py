"""Every example in a docstring says what it returns."""

import doctest
import importlib
import pathlib

import pytest

WITH_EXAMPLES = [
    str(path.with_suffix("")).replace("/", ".")
    for path in sorted(pathlib.Path("jaxscale").rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples(module):
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted
    assert not failed
