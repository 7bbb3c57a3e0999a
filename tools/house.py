"""Code metrics of the package: size, functions, complexity, and copies of the same fact.

Command: python tools/house.py [--folder jaxscale] [--json FILE]

A fact is counted where its pattern matches outside the module that owns it:

- tree: which parameters a model has, by logical axes of two dimensions, outside `models/`;
- zero: what a ZeRO stage does, by comparing a stage with a number;
- flops: FLOPs of a model's layers by formulas of its sizes;
- stacks: a loop over the kinds of layers in a period.
"""

import argparse
import ast
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FACTS = {
    "tree": r"\"embed\", *\"(heads|kv_heads|mlp)\"",
    "zero": r"\b(zero_stage|stage|zero)\b *(==|>=|<=|<|>) *[1-3]\b",
    "flops": r"2(\.0)? \* (self\.|model\.|shape\.)?(d_model|heads|num_heads)\b",
    "stacks": r"for kind in range\((stack\.|self\.)?period\)",
}
"""Fact -> pattern. The folder `models/` counts once."""

BRANCHES = (
    *(ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert),
    *(ast.comprehension, ast.match_case),
)


@dataclass(frozen=True)
class Function:
    """A function of the package, nested functions included."""

    name: str  # path:line name
    lines: int
    complexity: int  # McCabe's, boolean operators and conditions of comprehensions included
    takes_config: bool  # whether an argument is the whole config
    imports: int  # of the package's own modules


def functions(path: pathlib.Path) -> Iterator[Function]:
    """The functions of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        types = [ast.unparse(one.annotation) for one in arguments if one.annotation]
        yield Function(
            f"{path}:{node.lineno} {node.name}",
            (node.end_lineno or node.lineno) - node.lineno + 1,
            complexity(node),
            any(re.fullmatch(r"(configs?\.)?Config( \| None)?", one) for one in types),
            sum(map(_is_own, ast.walk(node))),
        )


def complexity(function: ast.AST) -> int:
    """Cyclomatic complexity: one, plus one for each branch."""
    found = 1
    for node in ast.walk(function):
        found += isinstance(node, BRANCHES)
        found += len(node.ifs) if isinstance(node, ast.comprehension) else 0
        found += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
    return found


def _is_own(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith("jaxscale")
    return isinstance(node, ast.Import) and any(
        one.name.startswith("jaxscale") for one in node.names
    )


def copies(folder: pathlib.Path, paths: Sequence[pathlib.Path]) -> dict[str, list[str]]:
    """The modules that match each fact; `models/` is one."""
    found: dict[str, list[str]] = {}
    for fact, pattern in FACTS.items():
        homes = [path.relative_to(folder) for path in paths if re.search(pattern, path.read_text())]
        names = ["models/" if home.parts[0] == "models" else str(home) for home in homes]
        found[fact] = list(dict.fromkeys(names))
    return found


def measure(folder: pathlib.Path) -> dict:
    """The figures of a package."""
    paths = sorted(folder.rglob("*.py"))
    texts = [path.read_text().splitlines() for path in paths]
    every = [one for path in paths for one in functions(path)]
    lines, paths_through = (
        sorted(getattr(one, name) for one in every) for name in ("lines", "complexity")
    )
    sizes = sorted(map(len, texts))
    comments = sum(line.strip().startswith("#") for text in texts for line in text)
    return {
        "files": len(paths),
        "lines": sum(sizes),
        "file_lines": {"p90": _percentile(sizes, 90), "max": sizes[-1]},
        "function_lines": {"p90": _percentile(lines, 90), "max": lines[-1]},
        "complexity": {"p99": _percentile(paths_through, 99), "max": paths_through[-1]},
        "most_complex": [
            f"{one.complexity} {one.name}"
            for one in sorted(every, key=lambda one: -one.complexity)[:5]
        ],
        "comment_share": round(comments / sum(sizes), 4),
        "whole_config_share": round(sum(one.takes_config for one in every) / len(every), 4),
        "imports_in_functions": sum(one.imports for one in every),
        "copies": copies(folder, paths),
        "files_of_a_family": files_of_a_family(folder, paths),
    }


def _percentile(ordered: Sequence[int], percent: int) -> int:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def files_of_a_family(folder: pathlib.Path, paths: Sequence[pathlib.Path]) -> dict[str, list[str]]:
    """For each family of models, the other modules that name it in code."""
    families = [path.stem for path in (folder / "model_families").glob("*.py")]
    families = [name for name in families if name not in ("__init__", "shipped", "family")]
    found = {}
    for name in families:
        word = re.compile(rf"[\"']{name}[\"']|\b{name}\.|\bimport {name}\b")
        homes = [
            str(path.relative_to(folder))
            for path in paths
            if path.stem != name and word.search(path.read_text())
        ]
        found[name] = homes
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("jaxscale"))
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args(argv)
    if not options.folder.is_dir():
        parser.error(f"--folder {options.folder} is not a folder; run from the repository's root")
    found = measure(options.folder)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    counts = {fact: len(homes) for fact, homes in found["copies"].items()}
    print(f"{found['lines']:,} lines in {found['files']} files")
    for name in ("file_lines", "function_lines", "complexity"):
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found[name].items()))
    print("most complex: " + "; ".join(found["most_complex"]))
    print(f"comments: {found['comment_share']:.1%} of lines")
    print(f"functions that take the whole config: {found['whole_config_share']:.1%}")
    print(f"own imports inside functions: {found['imports_in_functions']}")
    print("facts are stated in: " + ", ".join(f"{name} {n}" for name, n in counts.items()))
    for fact, homes in found["copies"].items():
        print(f"  {fact}: {', '.join(homes)}")
    most = max(found["files_of_a_family"].items(), key=lambda one: len(one[1]))
    print(f"files that name a family outside its module: at most {len(most[1])} ({most[0]})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
