"""Table of accelerators: peak FLOP/s, memory, bandwidth, links."""

import contextlib
import csv
import functools
import math
import os
import pathlib
import re
from dataclasses import dataclass
from typing import Any

from jaxscale.storage.untrusted import load_json

GPU_MEMORY_FRACTION = 0.9
"""Share of a GPU's memory for a program; the rest is for its driver, NCCL and cuDNN."""
JAX_MEMORY_FRACTION = 0.75
"""The share that JAX preallocates by default."""
GPU_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""The environment variables of that share: the current name and the older one."""


@dataclass(frozen=True)
class Chip:
    """Peak FLOP/s, memory and links of one type of JAX device.

    Memory is the usable size, not the nominal one: of GPUs by XLA's descriptions and drivers, of
    TPUs by libtpu. Where that is unknown (GH200, GB200, B300, GB300, MI325X, MI355X, Trainium2) it
    is the nominal one, slightly reduced.

    A chip that JAX shows as two devices (TPU v3, TPU v7) is halved. `confidence` is "seen" when the
    figures were read in a source, "memory" when they are recalled, or both. Link rates are for one
    device in one direction. A figure that is unknown, or that does not apply, is 0.

    `matmul_fraction`, the links' measured rates and `memory_fraction` are from the tables of
    ml-engineering (maximum achievable matmul FLOPS, all-reduce, memory) for A100, H100, H200, B200,
    GB200, MI300X and v6e. Other devices get the fraction of the most similar device; GB300 and B300
    get that of GB200 and B200 times the ratio of their power limits, which bound it.
    """

    name: str
    vendor: str
    year: int
    device_kinds: tuple[str, ...]  # what JAX reports as `device.device_kind`
    generation: str  # target of its kernels, one of `GENERATIONS`
    bf16_flops_per_second: float  # dense peak, without structured sparsity
    memory_bytes: float
    memory_bytes_per_second: float
    confidence: str
    notes: str
    fp8_flops_per_second: float = 0.0  # of 8-bit operands: int8 on TPUs before v7
    fp4_flops_per_second: float = 0.0
    matmul_fraction: float = 0.75  # of the peak, achieved by the best large bfloat16 matmul
    memory_fraction: float = 0.85  # of the memory bandwidth, achieved by a long copy
    cores: int = 0  # multiprocessors, over which a matmul's tiles are distributed
    host_bytes_per_second: float = 0.0
    package_devices: int = 1  # devices that share a package, with faster links
    package_bytes_per_second: float = 0.0
    node_devices: int = 1  # devices that a switch or mesh joins: a server, or a rack
    node_bytes_per_second: float = 0.0
    node_bus_bytes_per_second: float = 0.0  # measured for collectives of large messages
    node_mesh: bool = False  # links between pairs: a small group can use few of them
    node_latency_seconds: float = 0.0  # of one step of a collective
    torus_axes: int = 0
    torus_bytes_per_second: float = 0.0  # along one axis, both directions together
    pod_shape: tuple[int, ...] = ()  # the largest torus
    wrap_shape: tuple[int, ...] = ()  # the smallest slice that is a torus: `Cluster.wraps`
    network_bytes_per_second: float = 0.0  # beyond node or pod
    network_latency_seconds: float = 0.0
    tdp_watts: float = 0.0
    system_watts: float = 0.0  # with a device's share of its server
    usd_per_hour: float = 0.0  # list price


GENERATIONS = (
    "sm70",
    "sm80",
    "sm89",
    "sm90",
    "sm100",
    "sm103",
    "gfx90a",
    "gfx942",
    "gfx950",
    "tpu3",
    "tpu4",
    "tpu5e",
    "tpu5p",
    "tpu6",
    "tpu7",
    "trn2",
    "cpu",
)
"""Targets of kernels: NVIDIA's compute capabilities, AMD's targets, Google's and Amazon's
generations; "cpu" for virtual devices."""


MATMUL_UNITS = {
    "float8": ("sm89", "sm90", "sm100", "sm103", "tpu7"),
    "int8": ("tpu5e", "tpu5p", "tpu6"),
}
"""`model.matmul_dtype` -> generations that multiply it faster than bfloat16. GPUs with float8 are
left out of int8; AMD's have other float8 formats."""


@functools.cache
def chips() -> tuple[Chip, ...]:
    """The devices of `hardware.csv`, by vendor and year."""
    return read_chips(pathlib.Path(__file__).with_name("hardware.csv"))


def read_chips(path: str | pathlib.Path) -> tuple[Chip, ...]:
    """Devices from a CSV file with the columns of `hardware.csv`, or one from a JSON object.

    Columns that are left out take the defaults of `Chip`.

    Raises:
      ValueError: not such a table; an unknown column or generation; one of name, generation,
        bf16_tflops, memory_gb and memory_gb_per_second is missing, or cores of a GPU; a value is
        out of range; or a torus does not have a side for each axis. Names the column.
    """
    path = pathlib.Path(path)
    rows = _json_rows(path) if path.suffix == ".json" else _csv_rows(path)
    for row in rows:
        unknown = sorted(set(row) - {*_TEXTS, *_COUNTS, *_SCALES, *_SHAPES, "device_kinds"})
        missing = [name for name in _NEEDED if not row.get(name)]
        if unknown or missing:
            which = f"column {unknown[0]!r} is not known" if unknown else f"no {missing[0]!r}"
            raise ValueError(f"{path}: {which}; the columns are those of jaxscale/hardware.csv")
        if row["generation"] not in GENERATIONS:
            raise ValueError(
                f"{path}: generation {row['generation']!r} is not known; give that of the most "
                f"similar device, one of {', '.join(GENERATIONS)}"
            )
    try:
        return tuple(_chip(row) for row in rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _csv_rows(path: pathlib.Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not CSV text: {error}") from None
    for number, row in enumerate(rows, 1):
        if None in row:  # csv.DictReader's key for cells without a column
            raise ValueError(f"{path}: row {number} has more cells than the header has columns")
    return rows


def _json_rows(path: pathlib.Path) -> list[dict[str, str]]:
    columns = load_json(path)
    if not isinstance(columns, dict):
        raise ValueError(f"{path} has to be one JSON object of columns: {{'name': ...}}")
    return [{key: "" if value is None else str(value) for key, value in columns.items()}]


_NEEDED = ("name", "generation", "bf16_tflops", "memory_gb", "memory_gb_per_second")
_TEXTS = {"name": "", "vendor": "", "generation": "", "confidence": "memory", "notes": ""}
_COUNTS = ("year", "cores", "package_devices", "node_devices", "node_mesh", "torus_axes")
_SCALES = {  # column -> field, and its unit
    "bf16_tflops": ("bf16_flops_per_second", 1e12),
    "fp8_tflops": ("fp8_flops_per_second", 1e12),
    "fp4_tflops": ("fp4_flops_per_second", 1e12),
    "memory_gb": ("memory_bytes", 1e9),
    "memory_gb_per_second": ("memory_bytes_per_second", 1e9),
    "matmul_fraction": ("matmul_fraction", 1.0),
    "memory_fraction": ("memory_fraction", 1.0),
    "host_gb_per_second": ("host_bytes_per_second", 1e9),
    "package_gb_per_second": ("package_bytes_per_second", 1e9),
    "node_gb_per_second": ("node_bytes_per_second", 1e9),
    "node_bus_gb_per_second": ("node_bus_bytes_per_second", 1e9),
    "node_latency_us": ("node_latency_seconds", 1e-6),
    "torus_gb_per_second": ("torus_bytes_per_second", 1e9),
    "network_gb_per_second": ("network_bytes_per_second", 1e9),
    "network_latency_us": ("network_latency_seconds", 1e-6),
    "tdp_w": ("tdp_watts", 1.0),
    "system_w": ("system_watts", 1.0),
    "usd_per_hour": ("usd_per_hour", 1.0),
}
_SHAPES = ("pod_shape", "wrap_shape")
_FRACTIONS = ("matmul_fraction", "memory_fraction")
_ABOVE_ZERO = (*_NEEDED, *_FRACTIONS, "package_devices", "node_devices")
"""Columns that must be above 0; in others 0 means that the device does not have it."""
_MOST = 1e18
"""The largest figure, so that arithmetic with it stays finite."""


def _chip(row: dict[str, str]) -> Chip:
    given = {name: text for name, text in row.items() if text}
    fields: dict[str, Any] = {name: given.get(name, default) for name, default in _TEXTS.items()}
    fields |= {name: _figure(name, given[name], int) for name in _COUNTS if name in given}
    for name, (field, unit) in _SCALES.items():
        if name in given:
            fields[field] = _figure(name, given[name], float) * unit
    fields["year"] = fields.get("year", 0)
    fields["node_mesh"] = bool(fields.get("node_mesh"))
    fields["device_kinds"] = tuple(filter(None, given.get("device_kinds", "").split("|")))
    if fields["generation"].startswith(("sm", "gfx")) and not fields.get("cores"):
        raise ValueError(
            "no 'cores'; give the multiprocessors or compute units of a GPU, which "
            f"generation {fields['generation']!r} needs"
        )
    axes = fields.get("torus_axes", 0)
    fields |= {name: _sides(name, given.get(name, ""), axes) for name in _SHAPES}
    return Chip(**fields)


def _sides(name: str, text: str, axes: int) -> tuple[int, ...]:
    """The sides of a torus.

    Raises:
      ValueError: they cannot be read, or their number is not that of the axes.
    """
    if text and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text, re.ASCII):
        raise ValueError(f"{name} = {text!r} is not the sides of a torus, such as 16x16x16")
    sides = tuple(map(int, filter(None, text.split("x"))))
    if len(sides) != axes:
        raise ValueError(
            f"{name} = {text!r} has {len(sides)} sides and torus_axes is {axes}; give both, and "
            "one side for each axis"
        )
    return sides


def _figure(name: str, text: str, number_type: type) -> Any:
    """The number in a column.

    Raises:
      ValueError: it is not a number, or is out of range.
    """
    try:
        number = number_type(text)
    except ValueError:
        number = math.nan
    most = 1 if name in _FRACTIONS else _MOST
    enough = number > 0 if name in _ABOVE_ZERO else number >= 0
    if not (enough and number <= most):
        what = "whole number" if number_type is int else "number"
        least = "above 0" if name in _ABOVE_ZERO else "of at least 0"
        raise ValueError(
            f"{name} = {text!r} is not a {what} {least}" + (" and at most 1" if most == 1 else "")
        )
    return number


def find_chip(device_kind: str) -> Chip | None:
    """The chip with exactly this `device_kind`, or None.

    A slice of a GPU, or a card that differs in a suffix, has another peak.
    """
    return next((chip for chip in chips() if device_kind in chip.device_kinds), None)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Dense peak of one JAX device in FLOP/s, or None if the table has no figure.

    Args:
      device_kind: as in `jax.devices()[0].device_kind`.
      dtype: of the matmuls; the table has "bfloat16" only.
    """
    chip = find_chip(device_kind)
    return chip.bf16_flops_per_second if chip and dtype == "bfloat16" else None


def check_matmul_units(matmul_dtype: str, generation: str, name: str) -> None:
    """Refuses a `model.matmul_dtype` without matmul units in devices of a generation.

    Raises:
      ValueError: names the devices that have such units.
    """
    if generation in MATMUL_UNITS[matmul_dtype]:
        return
    others = [other for other, those in MATMUL_UNITS.items() if generation in those]
    raise ValueError(
        f"model.matmul_dtype = {matmul_dtype!r} on {name}, which does not multiply it faster than "
        "bfloat16: float8 is for Ada, Hopper, Blackwell and TPU v7, int8 for TPU v5e, v5p and v6e; "
        "set model.matmul_dtype = " + " or ".join(map(repr, [*others, ""]))
    )


def gpu_memory_fraction(unset: float = JAX_MEMORY_FRACTION) -> float:
    """Share of a GPU's memory that JAX preallocates, from the environment.

    Args:
      unset: the share if no variable is set.

    Raises:
      ValueError: the value is not such a share, or two variables set it, which jaxlib refuses.
    """
    found = {name: os.environ[name] for name in GPU_MEMORY_VARIABLES if os.environ.get(name)}
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)} are both set; unset {GPU_MEMORY_VARIABLES[1]}")
    for name, text in found.items():
        with contextlib.suppress(ValueError):
            if 0 < float(text) <= 1:
                return float(text)
        raise ValueError(
            f"{name} = {text!r} in the environment is not a share of a GPU's memory; set a number "
            f"above 0, up to 1, such as {GPU_MEMORY_FRACTION}"
        )
    return unset


def host_memory_bytes() -> int:
    """Memory of this host, or the limit of its container."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            sizes.append(int(pathlib.Path(path).read_text()))
    return min(sizes)
