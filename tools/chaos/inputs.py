"""Fuzzing of commands: bad flags, settings and files.

    python tools/chaos/inputs.py --count 200 --seed 0

A run is trained; then each case starts a command in a separate process: with a flag of its --help
set to one of VALUES, with a leaf of the config set to one of them, or on a copy of the run with
other bytes in one file, which trains for two more steps. Faults: a traceback; no end within ten
minutes; a signal; a refusal without a line that begins with "error:"; more than 30 lines on stderr;
training that continues to a state that differs in any bit from that of the undamaged run. Accepted
cases are listed for review, since some values are valid. The last line is JSON.
"""

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
VALUES = (
    "",
    "0",
    "-1",
    "1.5",
    "nan",
    "inf",
    "1e999",
    str(10**30),
    "none",
    "word",
    "two words",
    "a=b",
    "[1, 2",
    "\N{COLLISION SYMBOL}",
    "/dev/null",
    "/nonexistent/folder/file",
    "../..",
    "x" * 5000,
)
CONTENTS = (b"", b"5", b"{}", b"[]", b'{"a": ', b"\xff\xfe" * 50, b"\0" * 4096)
MOST_LINES, MOST_SECONDS = 30, 600  # on a machine that may be busy
STEPS, FURTHER = 5, 7
SKIPPED = ("--help", "--json", "--png", "--csv")
"""Skipped flags: every value is a valid file name."""


class Case(NamedTuple):
    """A command with bad input."""

    command: tuple[str, ...]
    about: str  # the bad input
    equal: tuple[pathlib.Path, ...] = ()  # runs that must end with the same state, if accepted


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a command has a fault."""
    parser = argparse.ArgumentParser(description="Runs every command with bad input.")
    parser.add_argument("--count", type=int, default=200, help="number of cases")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="chaos_"))
    os.environ["JAXSCALE_CACHE"] = str(folder / "compiled")
    # Some commands accept a value as the name of an output file, in the current folder.
    os.environ["PYTHONPATH"] = str(ROOT)
    os.chdir(folder)
    try:
        cases = draw_cases(folder, options.count, random.Random(options.seed))
        found = try_all(cases)
    finally:
        shutil.rmtree(folder)
    print(json.dumps({**vars(options), **found}))
    return int(bool(found["faults"]))


def draw_cases(folder: pathlib.Path, count: int, draw: random.Random) -> list[Case]:
    """A random sample of cases: two fifths flags, two fifths settings, a fifth files."""
    run, text = folder / "run", folder / "text.txt"
    text.write_text("A line of text.\n" * 50)
    trained = ("train", "--config", "tiny", "--workdir", str(run))
    further = make_runs(run, folder / "further")
    good = {
        "train": (*trained, "--describe"),
        "evaluate": ("evaluate", "--workdir", str(run)),
        "generate": ("generate", "--workdir", str(run), "--num_tokens=2"),
        "convert": ("convert", "--to_hf", "--workdir", str(run), "--output", str(folder / "hf")),
        "prepare": ("prepare", f"--input={text}", "--tokenizer=bytes", f"--output={folder}/out"),
        "plan": ("plan", "--model=llama2_7b", "--hardware=h100", "--devices=8"),
        "aot": ("aot", "--config", "tiny", "--topology=h100:1x1"),
        "schedule": ("schedule", "1f1b", "--stages=2", "--microbatches=4"),
        "doctor": ("doctor",),
        "supervise": ("supervise", f"--log={folder}/incidents.jsonl"),
    }
    flags = [
        Case((*command, f"{flag}={value}"), f"{name} {flag}={value[:40]!r}")
        for name, command in good.items()
        for flag in flags_of(name)
        for value in VALUES
    ]
    config = json.loads((run / "config.json").read_text())
    leaves = [
        Case((*good["train"], f"--config.{leaf}={value}"), f"{leaf}={value[:40]!r}")
        for leaf in leaves_of(config)
        for value in VALUES
    ]
    files = []
    names = sorted(path.relative_to(run) for path in read_files(run))
    for number, name in enumerate(draw.choices(names, k=count // 5)):
        content, command = draw.choice(CONTENTS), draw.choice(("train", "evaluate", "generate"))
        copy = folder / f"copy{number}"
        shutil.copytree(run, copy)
        (copy / name).write_bytes(content)
        about = f"{command} with {name} = {content[:10]!r}"
        if command == "train":
            files.append(Case(training(copy, FURTHER), about, (copy, further)))
        else:
            words = tuple(word.replace(str(run), str(copy)) for word in good[command])
            files.append(Case(words, about))
    many = 2 * count // 5
    return [*draw.sample(flags, min(many, len(flags))), *draw.sample(leaves, many), *files]


def training(workdir: pathlib.Path, steps: int) -> tuple[str, ...]:
    settings = ("--config.run.checkpoint_every=2", f"--config.run.steps={steps}")
    return ("train", "--config", "tiny", "--workdir", str(workdir), "--trackers=none", *settings)


def make_runs(run: pathlib.Path, further: pathlib.Path) -> pathlib.Path:
    """Trains a run, and a copy of it for longer; returns the copy."""
    for workdir, steps in ((run, STEPS), (further, FURTHER)):
        done = start(training(workdir, steps))
        if done.returncode:
            raise SystemExit(done.stderr)
        if workdir is run:
            shutil.copytree(run, further)
    return further


def read_files(run: pathlib.Path) -> list[pathlib.Path]:
    """The files of a run, except those of older checkpoints, which are not read."""
    older = [path for path in (run / "checkpoints").iterdir() if path.name != str(STEPS)]
    files = (path for path in run.rglob("*") if path.is_file())
    return [path for path in files if not set(older) & set(path.parents)]


def sums_of(run: pathlib.Path) -> dict[str, int]:
    """The checksum of every array of a run after FURTHER steps."""
    path = run / "checkpoints" / str(FURTHER) / "description" / "metadata"
    arrays = json.loads(path.read_text())["arrays"]
    return {name: array["checksum"] for name, array in arrays.items()}


def flags_of(command: str) -> list[str]:
    """The flags in a command's --help."""
    shown = re.findall(r"^  (?:-\w, )?(--\w+)", start((command, "--help")).stdout, re.MULTILINE)
    return [flag for flag in dict.fromkeys(shown) if flag not in (*SKIPPED, "--config")]


def leaves_of(config: dict[str, Any]) -> list[str]:
    return [f"{name}.{leaf}" for name, part in config.items() for leaf in part]


def try_all(cases: Sequence[Case]) -> dict[str, Any]:
    """The number of refused cases, the accepted cases, and the faults."""
    refused, accepted, faults = 0, [], []
    for number, case in enumerate(cases, 1):
        fault = ""
        try:
            done = start(case.command)
        except subprocess.TimeoutExpired:
            fault = f"no end in {MOST_SECONDS} s"
        else:
            fault = fault_of(done)
            if done.returncode == 0 and not fault and case.equal:
                one, other = map(sums_of, case.equal)
                fault = "" if one == other else "the state is not that of the undamaged run"
            refused += done.returncode == 2
            accepted += [case.about] if done.returncode == 0 else []
        if fault:
            faults.append(f"{case.about}: {fault}")
        print(f"{number} of {len(cases)}: {case.about}: {fault or 'ok'}", flush=True)
    return {"cases": len(cases), "refused": refused, "accepted": accepted, "faults": faults}


def fault_of(done: subprocess.CompletedProcess) -> str:
    """The fault of an ended command, or ""."""
    lines = done.stderr.splitlines()
    if "Traceback" in done.stderr + done.stdout:
        return f"a traceback: {lines[-1]}"
    if done.returncode not in (0, 1, 2):
        return f"status {done.returncode}: {done.stderr[-300:]}"
    if done.returncode and not re.search(r"(^|: )error: ", done.stderr, re.MULTILINE):
        return f"status {done.returncode} without an error: {done.stderr[-300:]}"
    return f"{len(lines)} lines on stderr" if len(lines) > MOST_LINES else ""


def start(command: Sequence[str]) -> subprocess.CompletedProcess:
    """Runs a command of the package until it ends.

    Raises:
      subprocess.TimeoutExpired: it did not end in time.
    """
    name, *arguments = command
    more = ["--", "true"] if name == "supervise" and "--help" not in arguments else []
    return subprocess.run(
        [sys.executable, "-m", f"jaxscale.{name}", *arguments, *more],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=MOST_SECONDS,
    )


if __name__ == "__main__":
    sys.exit(main())
