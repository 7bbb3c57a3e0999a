"""Accelerators: a table of what they can do, and the compiler flags we would set on them."""

import csv
import functools
import pathlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """What one JAX device of a kind can do.

    A chip that JAX shows as two devices (TPU v3, TPU v7) is halved. `confidence` is "seen" when
    the figures were read in a source, "memory" when they are recalled, or both.
    """

    name: str
    vendor: str
    year: int
    device_kinds: tuple[str, ...]  # what JAX reports as `device.device_kind`
    bf16_flops_per_second: float  # dense peak, without structured sparsity
    memory_bytes: float
    memory_bytes_per_second: float
    confidence: str
    notes: str


@functools.cache
def chips() -> tuple[Chip, ...]:
    """The table of `hardware.csv`, by vendor and year."""
    with pathlib.Path(__file__).with_name("hardware.csv").open(newline="") as file:
        return tuple(
            Chip(
                name=row["name"],
                vendor=row["vendor"],
                year=int(row["year"]),
                device_kinds=tuple(row["device_kinds"].split("|")),
                bf16_flops_per_second=float(row["bf16_tflops"]) * 1e12,
                memory_bytes=float(row["memory_gb"]) * 1e9,
                memory_bytes_per_second=float(row["memory_gb_per_second"]) * 1e9,
                confidence=row["confidence"],
                notes=row["notes"],
            )
            for row in csv.DictReader(file)
        )


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
        "xla_tpu_async_collective_fusion_fuse_multiple_collectives",
        True,
        "lets all the gathers of a layer run beside the same computations",
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


def xla_flags(platform: str, device_kind: str) -> tuple[XlaFlag, ...]:
    """The options for compiling a train step on a device."""
    return XLA_FLAGS.get(device_kind, XLA_FLAGS.get("gpu" if platform == "cuda" else platform, ()))
