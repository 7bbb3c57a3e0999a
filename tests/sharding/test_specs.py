"""Specs of arrays are built in the sharding folder alone."""

import ast
import pathlib

import pytest

import jaxscale

PACKAGE = pathlib.Path(jaxscale.__file__).parent
ELSEWHERE = {
    # A rank's share within the kernel's own `shard_map`.
    "ops/embedding.py",
    "ops/experts/dispatch.py",
    "ops/loss_over_vocabulary.py",
    "ops/tensor_parallel.py",
}


def names_specs(path: pathlib.Path) -> bool:
    """Whether a file imports, or takes from a module, `PartitionSpec` or its alias."""
    wanted = {"PartitionSpec", "P"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and wanted & {alias.name for alias in node.names}:
            return True
        if isinstance(node, ast.Attribute) and node.attr in wanted:
            return True
    return False


@pytest.mark.proof
def test_other_folders_take_specs_from_the_sharding_folder():
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    found = {name for name, path in files.items() if names_specs(path)}
    assert {name for name in found if not name.startswith("sharding/")} == ELSEWHERE
