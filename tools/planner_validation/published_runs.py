"""Published training runs, one per row of a CSV file, as the planner's records.

A row has a source, a machine, a model, a layout and what was measured: seconds per step, tokens per
second, bytes, or energy.
"""

import csv
import pathlib
import re
from dataclasses import dataclass, field

from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.model.shape import ModelShape
from tools.planner_validation.parse_run import (
    Columns,
    UnhandledError,
    fitting,
    to_choice,
    to_cluster,
    to_shape,
    to_traits,
)
from tools.planner_validation.trainer_layout import TrainerLayout


@dataclass(frozen=True)
class Row:
    """A run: its model, machine and layout, and what was measured (0 where nothing was)."""

    id: str
    source: str
    hardware: str
    model: str
    shape: ModelShape
    cluster: Cluster
    parallelism: TrainerLayout
    step_seconds: float
    memory_bytes: float
    out_of_memory: bool
    reading: str = "device"  # what the bytes measure; or "allocator", or "allocated"
    sizes: dict[str, float] = field(default_factory=dict)  # parts of memory, by name, in bytes
    framework: str = ""
    precision: str = ""

    @property
    def machine(self) -> tuple[str, str]:
        """Key of the runs that share one calibration."""
        return self.source, self.hardware


@dataclass(frozen=True)
class Bill:
    """The energy of a whole run."""

    id: str
    source: str
    hardware: str
    device_hours: float
    overhead: float  # PUE: energy of the building over that of the devices
    joules: float


@dataclass(frozen=True)
class Rows:
    """The rows of a file; `unhandled` has the source of each other row and the reason."""

    runs: list[Row]
    bills: list[Bill]
    unhandled: list[tuple[str, str]]


def read_runs(path: str | pathlib.Path) -> Rows:
    """Reads a file of measured runs.

    Raises:
      ValueError: the file lacks a column, which is named.
    """
    with pathlib.Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        missing = sorted({"source", "hardware", "layers", "hidden"} - set(reader.fieldnames or ()))
        if missing:
            raise ValueError(
                f"{path} has no column {missing[0]!r}; it is not a file of measured runs"
            )
        found = Rows([], [], [])
        for texts in reader:
            columns = Columns(texts)
            try:
                if "MWh" in columns("notes"):
                    found.bills.append(to_bill(columns))
                else:
                    found.runs.append(to_row(columns))
            except UnhandledError as reason:
                found.unhandled.append((columns("source"), str(reason)))
    return found


def to_row(get: Columns) -> Row:
    """One run.

    Raises:
      UnhandledError: a part of the row is missing or unknown.
    """
    shape = to_shape(get)
    parallelism = to_choice(get, shape, to_traits(get))
    machine = to_cluster(get, parallelism)
    parallelism = fitting(get, shape, machine, parallelism)
    text, sizes = get("mem_GB"), _sizes(get("notes"))
    reading, unit = _reading(get)
    failed = text.upper() == "OOM" or "out of memory" in get("notes").lower()
    return Row(
        id=get("id"),
        source=get("source"),
        hardware=get("hardware"),
        model=get("model"),
        shape=shape,
        cluster=machine,
        parallelism=parallelism,
        step_seconds=_step_seconds(get, shape, parallelism),
        # Where parts are listed, the total is their sum, not measured on a device.
        memory_bytes=0.0 if failed or sizes else get.float("mem_GB") * unit,
        out_of_memory=failed,
        reading=reading,
        sizes=sizes,
        framework=get("framework"),
        precision=get("precision").lower(),
    )


def _reading(get: Columns) -> tuple[str, float]:
    """Quantity and unit of a memory figure: nanotron prints the memory of PyTorch's
    allocator in units of 2**30 bytes; others read `nvidia-smi`, unless the notes say "GB
    allocated"."""
    if get("framework").lower().startswith("nanotron"):
        return "allocator", 2.0**30
    return ("allocated" if "GB allocated" in get("notes") else "device"), 1e9


def _step_seconds(get: Columns, shape: ModelShape, parallelism: TrainerLayout) -> float:
    """Seconds of a step, as measured, or from measured tokens or FLOPs per second."""
    if get.float("step_time_s"):
        return get.float("step_time_s")
    tokens = float(parallelism.global_batch) * shape.seq_len
    rate = get.float("tok_s_dev")
    if not rate and not get("calc_step_s"):
        rate = get.float("calc_tok_s_dev")
    if rate:
        return tokens / (rate * float(parallelism.num_devices))
    return get.float("calc_step_s")


def _sizes(notes: str) -> dict[str, float]:
    """Parts of a device's memory that the notes list, in bytes; or a fraction of the baseline."""
    patterns = {
        "state": r"params\+optimizer ([\d.]+)",
        "activations": r"no recompute ([\d.]+)",
        "selective": r"SP\+selective ([\d.]+)",
    }
    found = {}
    if "GiB" in notes:
        for name, pattern in patterns.items():
            if match := re.search(pattern, notes):
                found[name] = float(match[1]) * 2**30
    if match := re.search(r"activation memory = ([\d.]+)% of the tensor-parallel-only", notes):
        found["share"] = float(match[1]) / 100
    return found


def to_bill(get: Columns) -> Bill:
    """The energy of a run, from device-hours or hours of all devices."""
    notes = get("notes").replace(",", "")
    energy = re.search(r"([\d.]+) MWh", notes)
    device_hours = re.search(r"([\d.]+) GPU-hours", notes)
    hours = re.search(r"([\d.]+) h for", notes)
    if not energy or not (device_hours or hours):
        raise UnhandledError("energy is given, and no device-hours")
    overhead = re.search(r"PUE ([\d.]+)", notes)
    return Bill(
        id=get("id"),
        source=get("source"),
        hardware=get("hardware"),
        device_hours=float(device_hours[1])
        if device_hours
        else float(hours[1]) * get.int("n_devices", 1),  # pyright: ignore[reportOptionalSubscript]
        overhead=float(overhead[1]) if overhead else 1.1,
        joules=float(energy[1]) * 3.6e9,
    )
