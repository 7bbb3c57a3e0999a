"""python tools/matrix.py [--model KIND ...] [--schedule NAME ...] [--whole] [--page PAGE]

Runs layouts in float64 and writes a table of their largest errors relative to one device.

Without --model, the layouts of a decoder that the suite runs: every factorisation of eight devices
into data x fsdp x context x tensor, with ZeRO stages, accumulations, remat policies and offload,
one row for each set of axes of several devices. With --model, other types of models, of which the
suite runs a few layouts: every pair of mesh axes (pipeline included), ZeRO stage, accumulation or
schedule, and remat policy. With --schedule, pipelines of four ranks: each schedule with every other
axis, and fsdp in every ZeRO stage.
"""

import argparse
import collections
import datetime
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ERRORS = ("loss", "gradient norm", "gradients", "parameters")
MODEL_ERRORS = ("loss", "gradient norm", "parameters")
ALL = (
    "local and global layers",
    "encoder and decoder",
    "esm",
    "two stacks",
    "experts",
    "experts on every mesh",
)


def main(argv: Sequence[str]) -> int:
    """Prints the table; with `--page` replaces the table between that file's marks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", metavar="FILE", help="where to replace the table")
    parser.add_argument(
        "--model",
        metavar="KIND",
        nargs="*",
        help="models named in tests/invariants/models.py; without names, one of each type: "
        f"{', '.join(ALL)}",
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        nargs="*",
        help="pipeline schedules; without names, all",
    )
    parser.add_argument("--whole", action="store_true", help="every combination, not pairs: hours")
    options = parser.parse_args(argv)
    if options.page:  # before hours of work
        try:
            _marked(pathlib.Path(options.page), _table(options))
        except (OSError, ValueError) as error:
            parser.error(f"--page: {error}")
    os.environ |= {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    # Unoptimised: steps run for milliseconds and compile for seconds.
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    if options.schedule is not None:
        from jaxscale.pipeline_schedules import shipped  # noqa: PLC0415 - as below

        return max(_schedule(name, options) for name in options.schedule or shipped.NAMES)
    if options.model is None:
        return _decoder(options)
    from tests.invariants import models  # noqa: PLC0415 - after the devices are set

    if unknown := [kind for kind in options.model if kind not in models.KINDS]:
        parser.error(f"--model {unknown[0]!r} is not known; it can be {', '.join(models.KINDS)}")
    return max(_model(kind, options) for kind in options.model or ALL)


def _decoder(options: argparse.Namespace) -> int:
    from tests.invariants import matrix  # noqa: PLC0415 - after the devices are set
    from tests.invariants.test_layouts import check_layout  # noqa: PLC0415

    layouts = list(matrix.every_layout()) if options.whole else matrix.pairwise_layouts()
    worst: dict = collections.defaultdict(lambda: dict.fromkeys(ERRORS, 0.0))
    count: dict = collections.Counter()
    found, status = _run(layouts, check_layout)
    for layout, errors in found:
        axes = tuple(axis for axis in matrix.AXES if layout[axis] > 1)
        count[axes] += 1
        for name in ERRORS:
            worst[axes][name] = max(worst[axes][name], errors[name])
    heads = ["mesh axes", "layouts", *ERRORS]
    rows = [
        [" x ".join(axes), count[axes], *(f"{worst[axes][name]:.0e}" for name in ERRORS)]
        for axes in sorted(count, key=lambda axes: (len(axes), *map(matrix.AXES.index, axes)))
    ]
    title = (
        f"{sum(count.values())} layouts, {_today()}, `python tools/matrix.py`. Largest error "
        "relative to one device, five steps, float64."
    )
    text = "\n".join([title, "", _line(heads), _rule(heads), *map(_line, rows)])
    return max(status, _write(options.page, "matrix", lambda before: text))


def _model(kind: str, options: argparse.Namespace) -> int:
    """Updates one row of the table of models."""
    from tests.invariants import matrix, models  # noqa: PLC0415 - as above

    axes, every = models.KINDS[kind].axes, models.KINDS[kind].every_mesh
    if options.whole:
        layouts = list(matrix.every_model_layout(axes))
    else:
        layouts = matrix.pairwise_model_layouts(axes, every=every)
    found, status = _run(layouts, lambda layout: models.check_model_layout(kind, layout))
    if not found:
        return status
    worst = [f"{max(errors[name] for _, errors in found):.0e}" for name in MODEL_ERRORS]
    piped = sum(layout["pipeline"] > 1 for layout, _ in found)
    heads = ["model", "layouts", "of them pipelines", *MODEL_ERRORS, "run"]
    row = [kind, len(found), piped, *worst, _today()]
    return max(status, _write(options.page, "models", _merge(heads, row)))


def _schedule(name: str, options: argparse.Namespace) -> int:
    """Updates one row of the table of schedules."""
    from jaxscale.pipeline_schedules.shipped import find_schedule  # noqa: PLC0415 - as above
    from tests.invariants import matrix, test_pipeline  # noqa: PLC0415
    from tests.invariants.layouts import make_config, open_engine  # noqa: PLC0415

    def check(layout: dict) -> dict:
        family = "deep experts" if "expert" in layout else "llama"
        engine = open_engine(make_config(test_pipeline.MODELS[family], layout))
        return test_pipeline.errors_of(engine, family)

    found, status = _run(matrix.schedule_layouts(find_schedule(name)), check)
    if not found:
        return status
    worst = [f"{max(errors[kind] for _, errors in found):.0e}" for kind in ERRORS]
    row = [name, len(found), *worst, _today()]
    heads = ["schedule", "layouts", *ERRORS, "run"]
    return max(status, _write(options.page, "schedules", _merge(heads, row)))


def _merge(heads: Sequence, row: Sequence) -> Callable[[str], str]:
    """Replaces the row of the same name in a table, or appends it."""

    def merge(before: str) -> str:
        rows = [line for line in before.splitlines()[2:] if line.startswith("|")]
        others = [line for line in rows if not line.startswith(f"| {row[0]} |")]
        return "\n".join([_line(heads), _rule(heads), *others, _line(row)])

    return merge


def _run(layouts: Sequence[dict], check: Callable[[dict], dict]) -> tuple[list, int]:
    """Each layout that passed with its errors, and a status: 1 if any failed."""
    from tests.invariants import matrix  # noqa: PLC0415 - as above

    found, status, begin = [], 0, time.monotonic()
    for number, layout in enumerate(layouts, 1):
        try:
            errors = check(layout)
        except Exception as error:
            outcome, status = f"FAILED: {error}", 1
        else:
            outcome = f"{max(errors.values()):.0e}"
            found.append((layout, errors))
        seconds = time.monotonic() - begin
        print(
            f"{number} of {len(layouts)}, {seconds:.0f} s: {matrix.name(layout)}: {outcome}",
            file=sys.stderr,
            flush=True,
        )
    return found, status


def _table(options: argparse.Namespace) -> str:
    """The name of the table's marks."""
    if options.schedule is not None:
        return "schedules"
    return "matrix" if options.model is None else "models"


def _line(cells: Sequence) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _rule(heads: Sequence) -> str:
    return "|" + "---|" * len(heads)


def _today() -> str:
    import jax  # noqa: PLC0415 - as above

    return f"{datetime.datetime.now(datetime.UTC).date()}, jax {jax.__version__}"


def _write(page: str | None, name: str, make: Callable[[str], str]) -> int:
    """Prints a table, made from the one on the page, and writes it there."""
    if not page:
        print(make(""))
        return 0
    path = pathlib.Path(page)
    start, text, rest = _marked(path, name)
    text = make(text)
    print(text)
    path.write_text(f"{start}{text}\n{rest}")
    return 0


def _marked(path: pathlib.Path, name: str) -> tuple[str, str, str]:
    """Splits a page: the part before a table, the table between its marks, the part after.

    Raises:
      ValueError: the page has no such marks.
      OSError: it cannot be read.
    """
    begin, end = f"<!-- {name}: generated by tools/matrix.py -->\n", f"<!-- end of {name} -->"
    start, found, rest = path.read_text().partition(begin)
    text, ended, rest = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"{path} has no marks {begin.strip()} ... {end}")
    return start + begin, text, end + rest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
