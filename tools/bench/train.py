"""python tools/bench/train.py [--config FILE ...] [--layouts "fsdp=8" "fsdp=2,tensor=4" ...]

Compares train steps on synthetic tokens with the same model in plain Flax NNX and optax on one
device (`baseline.py`). Every subject is a new process. Subjects of a case run together with
interleaved steps, and a ratio is the median over neighbouring steps, so that other load on the
machine affects all equally.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from measure import TRACED  # noqa: E402
from provenance import provenance  # noqa: E402

from jaxscale import command_line  # noqa: E402
from jaxscale import config as configs  # noqa: E402
from jaxscale.compiled.trace import DeviceTime, trace_line  # noqa: E402
from jaxscale.config import Config  # noqa: E402
from jaxscale.config.layout import MESH_AXES  # noqa: E402
from jaxscale.hardware import peak_flops  # noqa: E402
from jaxscale.training.flops import step_flops  # noqa: E402

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""XLA's status for out of memory."""
OURS = "jaxscale"
PROGRAMS = {
    OURS: ("ours.py", ""),
    "plain loop": ("baseline.py", "loop"),
    "plain scan": ("baseline.py", "scan"),
}
"""Subject -> its program and variant: the plain model's layers in a Python loop, or scanned."""


class Run(NamedTuple):
    """The reports of one process of `measure.py`."""

    first: dict[str, Any]  # after its first step
    steps: list[dict[str, float]]  # the others
    peaks: dict[str, Any]  # of memory
    trace: dict[str, Any] | None = None  # time breakdown of traced steps


class Subject:
    """A process with the protocol of `measure.py`; the constructor returns after its first step.

    Args:
      command: without `--started`, which is added.
      path: of its imports, in front of PYTHONPATH.

    Raises:
      RuntimeError: the process failed; the message ends with its output.
    """

    def __init__(
        self, name: str, command: Sequence[str], num_cpu_devices: int, path: str = str(ROOT)
    ):
        paths = [path, os.environ.get("PYTHONPATH", "")] if path else []
        environment = {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several may share an accelerator
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "JAX_TRACEBACK_FILTERING": "off",  # the error itself on the last line
            "JAX_NUM_CPU_DEVICES": str(num_cpu_devices),
        }
        # Bytecode is cached, as for a user; pip has compiled a peer's modules.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.name = name
        self.steps: list[dict[str, float]] = []
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, f"--started={time.monotonic()}"],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.first = self._read()

    def step(self) -> None:
        """Runs one more step and stores its times."""
        self._send("step\n")
        self.steps.append(self._read())

    def finish(self) -> Run:
        """Ends the measurement and returns its results."""
        self._send("end\n")
        peaks = self._read()
        return Run(self.first, self.steps, peaks, peaks.pop("trace", None))

    def close(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _send(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()
        self._errors.seek(0)
        errors = self._errors.read().replace(f"{ROOT}{os.sep}", "")
        # XLA may list its buffers after the reason.
        ran_out = errors.rfind(OUT_OF_MEMORY)
        reason = errors[-1500:] if ran_out < 0 else errors[ran_out:].splitlines()[0]
        raise RuntimeError(f"{self.name} ended with {status}: {reason}")


def command_of(name: str, config_file: str, settings: Sequence[str]) -> list[str]:
    """The command of one of PROGRAMS."""
    script, variant = PROGRAMS[name]
    program = [sys.executable, str(ROOT / "tools/bench" / script), f"--variant={variant}"]
    return [*program, f"--config={config_file}", "--set", *settings]


def measure(
    config_file: str,
    settings: Sequence[str],
    names: Iterable[str],
    *,
    steps: int,
    end: float = math.inf,
    trace: str | None = None,
) -> dict[str, Run]:
    """One round: starts the subjects one after the other, then interleaves their steps.

    Args:
      end: in `time.monotonic()`: no step after the first timed one begins if it, or the traced
        steps after it, might end later.
      trace: a folder for a trace of two more steps of ours.
    """
    layout = configs.load(config_file, settings).layout
    sizes = [getattr(layout, axis) for axis in MESH_AXES]
    num_devices = math.prod(size for size in sizes if size > 0)
    with contextlib.ExitStack() as stack:
        subjects = []
        for name in names:
            command = command_of(name, config_file, settings)
            if trace and name == OURS:
                command.insert(-1 - len(settings), f"--trace={trace}")
            subject = Subject(name, command, num_devices if name == OURS else 1)
            subjects.append(stack.enter_context(contextlib.closing(subject)))
        longest, more = 0.0, TRACED if trace else 0
        for done in range(steps):
            begin = time.monotonic()
            if done and begin + (1 + more) * longest > end:
                break
            for subject in subjects:
                subject.step()
            longest = max(longest, time.monotonic() - begin)
        return {subject.name: subject.finish() for subject in subjects}


def summarise(name: str, runs: Sequence[Run], config: Config) -> dict[str, Any]:
    """One subject's medians over rounds and steps."""
    first, model = runs[-1].first, config.model
    step_seconds = median(step["seconds"] for run in runs for step in run.steps)
    tokens_per_second = config.data.tokens_per_step / step_seconds
    record = {
        "subject": name,
        "tokens_per_second": tokens_per_second,
        "step_seconds": step_seconds,
        "step_cpu_seconds": median(step["cpu_seconds"] for run in runs for step in run.steps),
        "start_seconds": median(sum(run.first["phases"].values()) for run in runs),
        "start_cpu_seconds": median(run.first["cpu_seconds"] for run in runs),
        "phases": {
            phase: median(run.first["phases"][phase] for run in runs) for phase in first["phases"]
        },
        "steps": len(runs[-1].steps),
        "losses": [first["loss"], *(step["loss"] for step in runs[-1].steps)],
        **{name: first[name] for name in first.keys() - {"phases", "loss", "cpu_seconds"}},
        **{name: max(run.peaks[name] or 0 for run in runs) or None for name in runs[-1].peaks},
    }
    if runs[-1].trace:
        record["trace"] = runs[-1].trace
    peak = peak_flops(first["device_kind"], model.compute_dtype)
    if peak:
        per_token = peak * first["num_devices"] / tokens_per_second
        flops = step_flops(config)
        record["mfu"], record["hfu"] = flops.model / per_token, flops.hardware / per_token
    return record


def compare(ours: Sequence[Run], plain: Sequence[Run]) -> dict[str, float]:
    """Speed ratios of ours, by wall-clock and by CPU time."""
    pairs = [pair for runs in zip(ours, plain) for pair in zip(*(run.steps for run in runs))]
    return {
        name: median(theirs[field] / mine[field] for mine, theirs in pairs)
        for name, field in (("speed_ratio", "seconds"), ("cpu_ratio", "cpu_seconds"))
    }


def median(values: Iterable[float]) -> float:
    """The median of an iterable."""
    return statistics.median(values)


def run_case(
    config_file: str,
    settings: Sequence[str],
    names: Sequence[str],
    *,
    steps: int,
    repeats: int,
    seconds: float = math.inf,
    trace: str | None = None,
) -> list[dict[str, Any]]:
    """The records of a case, one per subject; a failed case is a record with its error.

    Args:
      seconds: of a round, start included, after which no further step begins.
      trace: a folder for the last round's trace of two more steps of ours.
    """
    case = {"config": config_file, "settings": list(settings), "rounds": repeats}
    try:
        config = configs.load(config_file, settings)
        rounds = [
            measure(
                config_file,
                settings,
                names,
                steps=steps,
                end=time.monotonic() + seconds,
                trace=trace if number == repeats - 1 else None,
            )
            for number in range(repeats)
        ]
    except (RuntimeError, ValueError) as error:
        return [{**case, "subject": OURS, "error": str(error)}]
    runs = {name: [round_[name] for round_ in rounds] for name in names}
    records = {name: {**case, **summarise(name, runs[name], config)} for name in names}
    plain = [name for name in names if name != OURS]
    if plain:
        fastest = min(plain, key=lambda name: records[name]["step_seconds"])
        records[OURS] |= {"compared_with": fastest, **compare(runs[OURS], runs[fastest])}
    return list(records.values())


COLUMNS = (
    f"{'subject':14} {'tokens/s':>9} {'s/step':>7} {'CPU s':>7} {'start s':>8} {'compile':>8} "
    f"{'resident':>9} {'compiled':>9} {'device':>9}  speed"
)


def row(record: dict[str, Any]) -> str:
    """A record as a line of the table."""
    if "error" in record:
        return f"{record['subject']:14} failed: {record['error'].strip().splitlines()[-1]}"
    # PyTorch does not report the memory of a step.
    compiled_bytes = record.get("argument_bytes", 0) + record.get("temp_bytes", 0)
    sizes = (record["peak_resident_bytes"], compiled_bytes, record["peak_device_bytes"])
    speed = ""
    if "mfu" in record:
        speed = f"{record['mfu']:.1%} MFU, {record['hfu']:.1%} HFU "
    if "speed_ratio" in record:
        speed += (
            f"{record['speed_ratio']:.2f} x {record['compared_with']} "
            f"({record['cpu_ratio']:.2f} by CPU time)"
        )
    return (
        f"{record['subject']:14} {record['tokens_per_second']:9,.0f} {record['step_seconds']:7.3f} "
        f"{record['step_cpu_seconds']:7.2f} {record['start_seconds']:8.1f} "
        f"{record['phases']['compile']:8.1f} "
        + " ".join(f"{size / 1e9:6.2f} GB" if size else f"{'-':>9}" for size in sizes)
        + f"  {speed}"
    )


def trace_rows(traced: Mapping[str, Any]) -> Iterator[str]:
    """The time breakdown, then the longest operations."""
    yield trace_line([DeviceTime(**device) for device in traced["devices"]], traced["steps"])
    for one in traced["longest"]:
        milliseconds = 1e3 * one["seconds"] / traced["steps"]
        runs = one["runs"] // traced["steps"]
        source = "/".join(one["source"].split("/")[-3:])
        yield f"{milliseconds:9.2f} ms {runs:5} x {one['cause']:9} {one['operation']:40} {source}"


def main(argv: Sequence[str]) -> int:
    """Returns 1 if a case failed."""
    parser = argparse.ArgumentParser(
        prog="python tools/bench/train.py",
        description="Compares train steps with the same model in plain Flax and optax.",
        epilog="Any leaf of the configs can be set: --config.data.seq_len=256",
    )
    parser.add_argument("--config", nargs="+", metavar="FILE", default=["configs/bench_8x256.py"])
    parser.add_argument(
        "--layouts",
        nargs="+",
        metavar="KEY=N,...",
        default=["data=1", "fsdp=8"],
        help="settings of config.layout, each a case",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        metavar="NAME",
        default=["float32", "bfloat16"],
        help="compute types, each a case",
    )
    parser.add_argument(
        "--against",
        nargs="+",
        metavar="NAME",
        choices=("loop", "scan", "none"),
        default=["loop", "scan"],
        help="plain versions to compare with: loop, scan, or none",
    )
    parser.add_argument(
        "--steps", type=command_line.whole(1, 10**6), default=5, help="timed steps of a process"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="time limit of a round for further steps, start and compilation included",
    )
    parser.add_argument(
        "--repeats", type=command_line.whole(1, 10**6), default=3, help="processes of each subject"
    )
    parser.add_argument(
        "--trace",
        metavar="FOLDER",
        help="trace two more steps of ours to FOLDER, and print their time breakdown",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=command_line.output_file,
        help="append a line of JSON for each subject",
    )
    options, overrides = command_line.parse(parser, argv)
    with command_line.refusals():
        for file in options.config:
            configs.load(file)
    names = [OURS, *(f"plain {name}" for name in options.against if name != "none")]
    failed = False
    for file, layout, dtype in itertools.product(options.config, options.layouts, options.dtypes):
        settings = [*overrides, *(f"layout.{setting}" for setting in layout.split(","))]
        settings.append(f"model.compute_dtype={dtype}")
        print(f"\n{file}, {layout}, {dtype}\n{COLUMNS}", flush=True)
        records = run_case(
            file,
            settings,
            names,
            steps=options.steps,
            repeats=options.repeats,
            seconds=options.seconds,
            trace=options.trace,
        )
        for record in records:
            failed |= "error" in record
            print(row(record), flush=True)
            if "trace" in record:
                print("\n".join(trace_rows(record["trace"])), flush=True)
            if options.json:
                with pathlib.Path(options.json).open("a") as lines:
                    lines.write(json.dumps({"benchmark": "train", **provenance(), **record}) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
