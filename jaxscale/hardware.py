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
XLA_FLAGS = {
    "cpu": (),
    "gpu": (
        XlaFlag(
            "xla_gpu_enable_latency_hiding_scheduler",
            True,
            "starts a collective early, so that it runs beside computation (NVIDIA's advice)",
        ),
        XlaFlag(
            "xla_gpu_enable_while_loop_double_buffering",
            True,
            "lets the gather of the next layer's weights overlap this layer (NVIDIA's advice for "
            "fully sharded parameters in a scan)",
        ),
    ),
    "tpu": (
        XlaFlag("xla_enable_async_all_gather", True, "gathers weights beside computation"),
        XlaFlag(
            "xla_tpu_enable_async_collective_fusion",
            True,
            "fuses a running collective with the computation that hides it",
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
            "xla_tpu_overlap_compute_collective_tc",
            True,
            "lets the tensor core compute while it drives a collective",
        ),
    ),
}
"""By what JAX reports as `device.platform`. XLA renames and drops flags, and one in the XLA_FLAGS
variable that it does not know ends the process: pass these as `compiler_options` of `jax.jit` or
`compile`, which raise instead, and leave out those that it refuses."""
