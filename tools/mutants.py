"""python tools/mutants.py [--folder NAME] [--only TEXT] [--jobs N] [--json FILE] [--list]

Mutation testing (DeMillo, Lipton and Sayward, Computer 11, 1978): applies each fault of
tools/mutants.toml to a temporary copy of this checkout, runs the tests there that should fail, and
prints a table of caught and surviving mutants. The same tests first run once without the fault: a
test that fails anyway proves nothing. The tier of a mutant is the suite's first with one of its
tests.

Returns 1 if a mutant survives or a test could not be run.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from _pytest.mark.expression import Expression

ROOT = pathlib.Path(__file__).resolve().parents[1]
FAULTS = "tools/mutants.toml"

TIERS = ("first", "proof", "slow")
"""Tiers of the suite: without -m, and by the argument of -m."""
PYTEST = ("-p", "no:cacheprovider")

LEAST_SECONDS, SLOWER = 60, 10
"""Time limit of a mutant's tests: `SLOWER` times their time without the fault, plus
`LEAST_SECONDS`. Beyond it the mutant counts as caught, since a suite that hangs does not pass."""

Verdict = Literal["caught", "survived", "not run"]


@dataclass(frozen=True)
class Mutant:
    """One fault, and the tests that should notice it."""

    folder: str  # of the package
    name: str
    file: str
    old: str  # occurs in the file exactly once
    new: str
    tests: str  # arguments of pytest: files or node ids, optionally with -k


@dataclass(frozen=True)
class Result:
    """The result of a mutant."""

    mutant: Mutant
    verdict: Verdict
    seconds: float
    said: str  # pytest's last line, or the reason why it did not run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chosen mutants and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="mutants with TEXT in the name")
    parser.add_argument("--folder", metavar="NAME", help="mutants of one folder of the package")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="mutants at a time")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error(f"--jobs = {options.jobs}; at least 1")
    chosen = [
        mutant
        for mutant in read(ROOT / FAULTS)
        if options.folder in (None, mutant.folder) and options.only in mutant.name
    ]
    if not chosen:
        parser.error("no mutant matches; --list prints all of them")
    tiers = find_tiers(chosen, ROOT)
    if options.list:
        print(table(HEADS, (described(mutant, tiers) for mutant in chosen)))
        return 0
    results = run_all(chosen, ROOT, options.jobs, functools.partial(print, file=sys.stderr))
    print(summary(results, tiers))
    if options.json:
        rows = [{**asdict(one), "tier": tiers[one.mutant.name]} for one in results]
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1))
    return 0 if all(result.verdict == "caught" for result in results) else 1


def read(path: pathlib.Path) -> list[Mutant]:
    """The mutants of a file; its arrays of tables are named for the folders.

    Raises:
      TypeError: a mutant lacks a field, or has one too many.
    """
    folders = tomllib.loads(path.read_text())
    return [Mutant(folder, **fields) for folder, found in folders.items() for fields in found]


def find_tiers(mutants: Sequence[Mutant], root: pathlib.Path) -> dict[str, str]:
    """Mutant's name -> the first of `TIERS` with one of its tests, or ""."""
    files = sorted({path.partition("::")[0] for one in mutants for path in split(one.tests)[0]})
    found = {tier: collect(files, tier, root) for tier in TIERS}

    def tier_of(mutant: Mutant) -> str:
        paths, wanted = split(mutant.tests)
        chosen = Expression.compile(wanted or "test")

        def is_one(test: str) -> bool:
            named = any(
                test == path or test.startswith((f"{path}::", f"{path}[")) for path in paths
            )
            return named and chosen.evaluate(lambda word, **_: word.lower() in test.lower())

        return next((tier for tier, tests in found.items() if any(map(is_one, tests))), "")

    return {mutant.name: tier_of(mutant) for mutant in mutants}


def split(tests: str) -> tuple[list[str], str]:
    """The files and node ids, and the expression after -k."""
    words = shlex.split(tests)
    at = words.index("-k") if "-k" in words else len(words)
    return words[:at], " ".join(words[at + 1 :])


def collect(files: Sequence[str], tier: str, root: pathlib.Path) -> list[str]:
    """The node ids of the tests of a tier.

    Raises:
      RuntimeError: pytest could not collect them; with its last line.
    """
    marked = [] if tier == TIERS[0] else ["-m", tier]
    command = [sys.executable, "-m", "pytest", "--collect-only", *PYTEST, *marked, *files]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode not in (0, 5):  # 5: none of these files has a test of this tier
        lines = (done.stdout + done.stderr).strip().splitlines() or [""]
        raise RuntimeError(f"{shlex.join(command)}: status {done.returncode}: {lines[-1]}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def run_all(
    mutants: Sequence[Mutant], root: pathlib.Path, jobs: int, report: Callable[[str], object]
) -> list[Result]:
    """Runs mutants, `jobs` at a time.

    Args:
      root: the checkout to copy.
      report: called with a line as each mutant ends.
    """
    sound = _Sound(root)

    def one(mutant: Mutant) -> Result:
        result = run(mutant, root, sound)
        report(f"{result.verdict:8} {result.seconds:5.0f} s  {mutant.folder}: {mutant.name}")
        return result

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, mutants))


def run(mutant: Mutant, root: pathlib.Path, sound: "_Sound") -> Result:
    """Runs one mutant: its tests without the fault, if they have not run yet, and with it."""
    try:
        source = mutated((root / mutant.file).read_text(), mutant)
    except (OSError, ValueError) as error:
        return Result(mutant, "not run", 0.0, str(error))
    without = sound(mutant.tests)
    if without.status:
        return Result(mutant, "not run", 0.0, f"without the fault: {without.said}")
    limit = without.seconds * SLOWER + LEAST_SECONDS
    with copy_of(root) as copy:
        (copy / mutant.file).write_text(source)
        found = run_tests(mutant.tests, copy, limit)
    # Status 5 means that no test was collected, so none failed.
    verdict: Verdict = "survived" if found.status in (0, 5) else "caught"
    return Result(mutant, verdict, found.seconds, found.said)


def mutated(source: str, mutant: Mutant) -> str:
    """The source of a file with the fault.

    Raises:
      ValueError: the text to replace does not occur exactly once.
    """
    count = source.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.file} has {mutant.old!r} {count} times; it must be once")
    return source.replace(mutant.old, mutant.new)


@dataclass(frozen=True)
class _Tests:
    """A run of tests."""

    status: int | None  # pytest's; None if it was ended
    seconds: float
    said: str


class _Sound:
    """Results of tests without a fault, each run once for all mutants that name it."""

    def __init__(self, root: pathlib.Path):
        self._root = root
        self._found: dict[str, _Tests] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def __call__(self, tests: str) -> _Tests:
        with self._lock:
            lock = self._locks.setdefault(tests, threading.Lock())
        with lock:
            if tests not in self._found:
                with copy_of(self._root) as copy:
                    self._found[tests] = run_tests(tests, copy, None)
            return self._found[tests]


@contextlib.contextmanager
def copy_of(root: pathlib.Path):
    """A temporary copy of a checkout, without hidden files and outputs of runs."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = pathlib.Path(folder) / "checkout"
        made = shutil.ignore_patterns(".?*", "runs", "build", "dist", "*.egg-info", "kernel-ipc-*")
        shutil.copytree(root, copy, ignore=made)
        yield copy


def run_tests(tests: str, checkout: pathlib.Path, limit_seconds: float | None) -> _Tests:
    """Runs pytest in a checkout, with the checkout's package on the path."""
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    # For a file proofs run, too; for a node id the test of any tier.
    marked = [] if "::" in tests else ["-m", "not slow"]
    begin = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", *PYTEST, *marked, *shlex.split(tests)],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit_seconds)
            status = process.returncode
        except subprocess.TimeoutExpired:
            printed, status = f"ended after {limit_seconds:.0f} s", None
        finally:
            with contextlib.suppress(ProcessLookupError):  # with processes started by the tests
                os.killpg(process.pid, signal.SIGKILL)
    lines = printed.strip().splitlines() or [""]
    counts = [line for line in lines if re.search(r"\d (passed|failed|error)", line)]
    return _Tests(status, time.monotonic() - begin, (counts or lines)[-1].strip("= "))


HEADS = ["mutant", "folder", "file", "tests", "tier"]


def described(mutant: Mutant, tiers: Mapping[str, str]) -> list[str]:
    """A mutant's cells of the table."""
    return [mutant.name, mutant.folder, mutant.file, mutant.tests, tiers[mutant.name]]


def table(heads: list[str], rows) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def summary(results: Sequence[Result], tiers: Mapping[str, str]) -> str:
    """The table of results, their counts, and the mutants that were not caught."""
    rows = [[*described(r.mutant, tiers), r.verdict, f"{r.seconds:.0f}"] for r in results]
    text = [table([*HEADS, "result", "seconds"], rows), ""]
    verdicts = [result.verdict for result in results]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)]
    text.append(f"{len(results)} mutants: {', '.join(counts)}")
    found = collections.Counter(tiers[result.mutant.name] or "none" for result in results)
    text.append("by tier: " + ", ".join(f"{count} {tier}" for tier, count in found.items()))
    text += [
        f"{result.verdict}: {result.mutant.name} ({result.mutant.file}): {result.said}"
        for result in results
        if result.verdict != "caught"
    ]
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
