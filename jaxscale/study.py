"""Studies of papers: computes a study, and writes its table, pictures and page.

python -m jaxscale.study NAME --output DIR

A table puts published figures next to ours, with what is not comparable. An interrupted study
resumes with the same command.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from etils import epy

from jaxscale import command_line
from jaxscale.choices import did_you_mean
from jaxscale.formatting import table
from jaxscale.studies import page
from jaxscale.studies.run_study import run_study
from jaxscale.studies.shipped import SHIPPED
from jaxscale.studies.study import Case, Study

with epy.lazy_imports():  # they import JAX, which studies of predictions do not need
    from jaxscale.run import signals, training_loop


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    options, _ = command_line.parse(_parser(), sys.argv[1:] if argv is None else argv)
    if options.list:
        print(table([(one.name, one.question) for one in SHIPPED]))
        return 0
    with command_line.refusals():
        study = find_study(options.name)
        output = options.output or pathlib.Path("runs") / f"study_{study.name}"
        print(f"{study.question}\n{study.papers}. {study.method}\n", flush=True)
        try:
            rows = run_study(
                study,
                output,
                quick=options.quick,
                hardware=options.hardware,
                report=_print_case,
            )
        except ModuleNotFoundError as error:
            command_line.refuse(
                f"{study.name} needs optional packages: uv sync --inexact --extra measure ({error})"
            )
        except training_loop.Stopped as stopped:
            print(f"{stopped}; the same command resumes from there")
            return signals.STOPPED
        study = on_hardware(study, options.hardware)
        print(f"\n{page.results_text(study, rows)}\n")
        for path in page.write_results(study, rows, output, _command(study, options)):
            print(f"wrote {path}")
        numbers = page.results_json(study, rows, _command(study, options))
        command_line.write_json(options.json, numbers)
    return 0


def find_study(name: str | None) -> Study:
    """The shipped study of a name.

    Raises:
      ValueError: there is none; names the nearest.
    """
    known = {study.name: study for study in SHIPPED}
    if name is None:
        raise ValueError(f"NAME is missing; it can be {', '.join(known)}, or give --list")
    if name not in known:
        raise ValueError(
            f"{name!r} is not a study; it can be {', '.join(known)}{did_you_mean(name, known)}"
        )
    return known[name]


def on_hardware(study: Study, hardware: str) -> Study:
    """The study with a remark where its device is not the paper's."""
    if not hardware:
        return study
    remark = f" Here on {hardware}; published figures are of {study.hardware} or others."
    return dataclasses.replace(study, method=study.method + remark)


def _print_case(done: int, count: int, case: Case) -> None:
    print(f"{done}/{count}  " + ", ".join(map(_short, case.items())), flush=True)


def _short(item: tuple[str, object]) -> str:
    name, value = item
    many = isinstance(value, list)
    return f"{name} {value[0]} to {value[-1]}" if many and value else f"{name} {value}"


def _command(study: Study, options: argparse.Namespace) -> str:
    words = ["python -m jaxscale.study", study.name, *["--quick"] * options.quick]
    words += [f"--hardware {options.hardware}"] * bool(options.hardware)
    return " ".join(words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxscale.study",
        description="Computes a study of a paper, and writes its table (CSV and JSON), pictures "
        "(PNG) and a page (HTML), with published figures next to ours. The same command resumes "
        "an interrupted study.",
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="a study of --list")
    add("--list", action="store_true", help="print the studies and what each asks")
    add("--quick", action="store_true", help="a short form of the study, of seconds")
    add(
        "--hardware",
        default="",
        metavar="NAME",
        help="a device of hardware.csv instead of the paper's",
    )
    add(
        "--output",
        type=pathlib.Path,
        metavar="DIR",
        help="folder of the results, and of the cases that are finished; default runs/study_NAME",
    )
    add("--json", type=command_line.output_file, metavar="FILE", help="write the results to a file")
    return parser


if __name__ == "__main__":
    command_line.run(main)
