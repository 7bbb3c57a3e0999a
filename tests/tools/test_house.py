"""What the measures of the package count."""

import ast
import pathlib

import pytest

from tools import house

MODULE = """
from jaxscale.config import Config


def longest(config: Config, stage: int, items: list) -> list:
    from jaxscale.config import load  # one import of the package

    if stage >= 2 and config:
        return [one for one in items if one]
    return []
"""


@pytest.mark.parametrize(
    ("code", "paths"),
    [
        ("def f(): pass", 1),
        ("def f(a, b): return a if a and b else b", 3),
        ("def f(x): return [y for y in x if y if x]", 4),
        ("def f(x):\n  for y in x:\n    while y:\n      pass", 3),
        ("def f(x):\n  match x:\n    case 1: pass\n    case _: pass", 3),
    ],
)
def test_paths_are_counted_with_operators_and_comprehensions(code, paths):
    (function,) = ast.parse(code).body
    assert house.complexity(function) == paths


def test_a_package_is_measured(tmp_path, capsys):
    (tmp_path / "models").mkdir()
    (tmp_path / "model_families").mkdir()
    (tmp_path / "one.py").write_text(MODULE)
    for name in ("q", "k"):
        (tmp_path / "models" / f"{name}.py").write_text('AXES = ("embed", "heads")\n')
    (tmp_path / "model_families" / "gemma.py").write_text("")
    (tmp_path / "other.py").write_text('NAME = "gemma"\n')
    found = house.measure(tmp_path)
    assert (found["files"], found["lines"]) == (5, 13)
    assert found["complexity"]["max"] == 5
    assert found["imports_in_functions"] == 1
    assert found["whole_config_share"] == 1
    assert found["copies"]["tree"] == ["models/"]
    assert found["copies"]["zero"] == ["one.py"]
    assert found["files_of_a_family"] == {"gemma": ["other.py"]}
    assert house.main(["--folder", str(tmp_path), "--json", str(tmp_path / "found.json")]) == 0
    assert "13 lines in 5 files" in capsys.readouterr().out
    assert pathlib.Path(tmp_path / "found.json").stat().st_size > 100
