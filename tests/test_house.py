"""The structure of the package: what a newcomer may rely on to find things."""

import ast
import collections
import importlib
import pathlib
import pkgutil

import pytest

import jaxscale

PACKAGE = pathlib.Path(jaxscale.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_folders_are_small():
    for folder in {path.parent for path in MODULES}:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= 16 or folder == PACKAGE, folder


def test_modules_of_the_package_are_imported_at_the_top():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                imports = (one for one in ast.walk(node) if isinstance(one, ast.ImportFrom))
                assert not [one for one in imports if (one.module or "").startswith("jaxscale")]


@pytest.mark.proof
def test_a_public_name_means_one_thing():
    homes = collections.defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(PACKAGE)))
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1 and name != "main"}
    assert not shared


def test_no_public_name_is_a_module():
    modules = {module.name for module in pkgutil.iter_modules([str(PACKAGE)])}
    assert not modules & set(dir(jaxscale))
    before = {name: getattr(jaxscale, name) for name in dir(jaxscale)}
    for module in modules - {"__main__"}:
        importlib.import_module(f"jaxscale.{module}")
    assert before == {name: getattr(jaxscale, name) for name in dir(jaxscale)}


def test_importing_everything_brings_the_public_names_alone():
    cell = {}
    exec("from jaxscale import *", cell)
    del cell["__builtins__"]
    assert cell == {name: getattr(jaxscale, name) for name in dir(jaxscale)}


def test_the_formatter_is_not_switched_off():
    skips = sum(path.read_text().count("# fmt: " + "skip") for path in MODULES)
    assert skips < 20
