"""Accelerators: a table of what they can do, and the compiler flags we would set on them."""

import csv
import functools
import json
import pathlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Chip:
    """What one JAX device of a kind can do, and how it is linked to others.

    A chip that JAX shows as two devices (TPU v3, TPU v7) is halved. `confidence` is "seen" when
    the figures were read in a source, "memory" when they are recalled, or both. Links are what
    one device sends one way. A figure that is not known, or that a device does not have, is 0.

    `matmul_fraction`, the links' measured rates and `memory_fraction` are from the tables of
    ml-engineering (maximum achievable matmul FLOPS, all-reduce, memory) for A100, H100, H200, B200,
    GB200, MI300X and v6e. Other devices have the share of their nearest relative, and GB300 and
    B300 that of GB200 and B200 times the ratio of their power limits, which bound it.
    """

    name: str
    vendor: str
    year: int
    device_kinds: tuple[str, ...]  # what JAX reports as `device.device_kind`
    generation: str  # of its kernels, as in `GENERATIONS`
    bf16_flops_per_second: float  # dense peak, without structured sparsity
    memory_bytes: float
    memory_bytes_per_second: float
    confidence: str
    notes: str
    fp8_flops_per_second: float = 0.0  # of 8-bit operands: int8 on TPUs before v7
    fp4_flops_per_second: float = 0.0
    matmul_fraction: float = 0.75  # of the peak, that the best large bfloat16 product reaches
    memory_fraction: float = 0.85  # of the memory's bandwidth, that a long copy reaches
    cores: int = 0  # multiprocessors that share a product's tiles
    host_bytes_per_second: float = 0.0
    package_devices: int = 1  # devices that share a package, with faster links
    package_bytes_per_second: float = 0.0
    node_devices: int = 1  # devices that a switch or mesh joins: a server, or a rack
    node_bytes_per_second: float = 0.0
    node_bus_bytes_per_second: float = 0.0  # that collectives of large messages were seen to reach
    node_mesh: bool = False  # links between pairs: a small group has few of them
    node_latency_seconds: float = 0.0  # of one step of a collective
    torus_axes: int = 0
    torus_bytes_per_second: float = 0.0  # along one axis, both directions together
    pod_shape: tuple[int, ...] = ()  # the largest torus
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
"""What a device's kernels are written for: NVIDIA's compute capabilities, AMD's targets, Google's
and Amazon's generations. "cpu" is for virtual devices."""


@functools.cache
def chips() -> tuple[Chip, ...]:
    """The table of `hardware.csv`, by vendor and year."""
    return read_chips(pathlib.Path(__file__).with_name("hardware.csv"))


def read_chips(path: str | pathlib.Path) -> tuple[Chip, ...]:
    """Devices from a CSV file of the columns of `hardware.csv`, or one from a JSON object of them.

    Columns that are left out take the defaults of `Chip`.

    Raises:
      ValueError: an unknown column or generation, or one of name, generation, bf16_tflops,
        memory_gb and memory_gb_per_second is missing; names it.
    """
    path = pathlib.Path(path)
    if path.suffix == ".json":
        columns = json.loads(path.read_text())
        rows = [{key: "" if value is None else str(value) for key, value in columns.items()}]
    else:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    for row in rows:
        unknown = sorted(set(row) - {*_TEXTS, *_COUNTS, *_SCALES, "device_kinds", "pod_shape"})
        missing = [name for name in _NEEDED if not row.get(name)]
        if unknown or missing:
            which = f"column {unknown[0]!r} is not known" if unknown else f"no {missing[0]!r}"
            raise ValueError(f"{path}: {which}; the columns are those of jaxscale/hardware.csv")
        if row["generation"] not in GENERATIONS:
            raise ValueError(
                f"{path}: generation {row['generation']!r} is not known; give that of the nearest "
                f"relative, one of {', '.join(GENERATIONS)}"
            )
    return tuple(_chip(row) for row in rows)


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


def _chip(row: dict[str, str]) -> Chip:
    given = {name: text for name, text in row.items() if text}
    fields: dict[str, Any] = {name: given.get(name, default) for name, default in _TEXTS.items()}
    fields |= {name: int(given[name]) for name in _COUNTS if name in given}
    for name, (field, unit) in _SCALES.items():
        if name in given:
            fields[field] = float(given[name]) * unit
    fields["year"] = fields.get("year", 0)
    fields["node_mesh"] = bool(fields.get("node_mesh"))
    fields["device_kinds"] = tuple(filter(None, row.get("device_kinds", "").split("|")))
    fields["pod_shape"] = tuple(map(int, filter(None, row.get("pod_shape", "").split("x"))))
    return Chip(**fields)


def find_chip(device_kind: str) -> Chip | None:
    """The chip that JAX calls `device_kind`, or None: only exact names, never a relative of it.

    A slice of a GPU, or a card that differs in a suffix, has another peak.
    """
    return next((chip for chip in chips() if device_kind in chip.device_kinds), None)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Dense peak of one JAX device in FLOP/s, or None where the table has no figure.

    Args:
      device_kind: as in `jax.devices()[0].device_kind`.
      dtype: of the matrix products; the table knows "bfloat16".
    """
    chip = find_chip(device_kind)
    return chip.bf16_flops_per_second if chip and dtype == "bfloat16" else None


@dataclass(frozen=True)
class XlaFlag:
    """A compiler option and why it is set."""

    name: str
    value: bool | int
    reason: str


XLA_FLAGS_VERSION = "2026-11"

_GPU = (
    XlaFlag(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "starts a collective early, so that it runs beside computation (NVIDIA's advice)",
    ),
    XlaFlag(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        4,
        "on the way back through the layers gathers and reduce-scatters are under way at once; "
        "with the limit of 1 the gather ends before the layer begins",
    ),
    XlaFlag(
        "xla_gpu_enable_analytical_sol_latency_estimator",
        False,
        "it takes a loop, as that over micro-batches, to last no time, and hides nothing behind it",
    ),
)
_TPU_V5E = (
    XlaFlag("xla_enable_async_all_gather", True, "gathers weights beside computation"),
    XlaFlag(
        "xla_tpu_enable_async_collective_fusion",
        True,
        "fuses a running collective with the computation that hides it; of all TPUs only v5e can",
    ),
    XlaFlag(
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        True,
        "includes all-gathers in that fusion",
    ),
    XlaFlag(
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        True,
        "spreads one collective over several computations",
    ),
    XlaFlag(
        "xla_max_concurrent_async_all_gathers",
        16,
        "a layer has up to nine weights to gather; with the limit of 1 only one is hidden",
    ),
    XlaFlag(
        "xla_tpu_overlap_compute_collective_tc",
        True,
        "lets the tensor core compute while it drives a collective",
    ),
)
_TPU_SPARSE_CORES = (
    XlaFlag(
        "xla_tpu_prefer_async_allgather_to_allreduce",
        True,
        "on 64 chips and more of a 3-D torus a gather would become an all-reduce of padded "
        "buffers, for which the chip waits",
    ),
    XlaFlag(
        "xla_tpu_enable_sparse_core_collective_offload_all_gather",
        True,
        "the sparse cores drive gathers while the tensor cores compute; async collective fusion "
        "is refused on these chips",
    ),
    XlaFlag(
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather",
        True,
        "includes gathers over two dimensions of the torus",
    ),
    XlaFlag(
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather",
        True,
        "includes gathers over three dimensions of the torus",
    ),
    XlaFlag(
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
        True,
        "the sparse cores drive reduce-scatters as well",
    ),
    XlaFlag(
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter",
        True,
        "includes reduce-scatters over several dimensions of the torus",
    ),
    XlaFlag(
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
        True,
        "and all-reduces: a reduce-scatter becomes one where the other dimension in tiles of 128 "
        "does not divide by the sides of the torus, as 11,008 on 4 x 4 x 4",
    ),
    XlaFlag(
        "xla_tpu_enable_sparse_core_offload_queuing_in_lhs",
        True,
        "all the collectives of a layer are queued before it computes, not one after the other",
    ),
)
XLA_FLAGS = {
    "cpu": (),
    "gpu": _GPU,
    "tpu": (),
    "TPU v5 lite": _TPU_V5E,
    "TPU v5e": _TPU_V5E,
    "TPU v5": _TPU_SPARSE_CORES,
    "TPU v5p": _TPU_SPARSE_CORES,
    "TPU v6 lite": _TPU_SPARSE_CORES,
    "TPU v6e": _TPU_SPARSE_CORES,
}
"""By what JAX reports as `device.device_kind`, else as `device.platform`. Each was seen to change
the scheduled program of a layered step as its reason says (libtpu 0.0.51, XLA of jax 0.12)."""


DETERMINISTIC = {
    "cpu": (),
    "tpu": (),
    "gpu": (
        XlaFlag(
            "xla_gpu_deterministic_ops",
            True,
            "the same bits on each run (XLA's words): scatters add in order and not by atomics, "
            "cuDNN's attention takes its deterministic backward pass (openxla/xla#14125), and no "
            "kernel is chosen by timing, so that a program compiled again has the same kernels",
        ),
    ),
}
"""By `device.platform`: what a step needs to compute the same bits every time. CPUs and TPUs run a
compiled program in one order."""


def xla_flags(platform: str, device_kind: str) -> tuple[XlaFlag, ...]:
    """The options for compiling a train step on a device."""
    return XLA_FLAGS.get(device_kind, XLA_FLAGS.get("gpu" if platform == "cuda" else platform, ()))
