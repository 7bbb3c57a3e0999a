"""XLA flags of a train step, by device, with the reason for each."""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding

from jaxscale.hardware import (
    GPU_MEMORY_FRACTION,
    JAX_MEMORY_FRACTION,
    find_chip,
    gpu_memory_fraction,
)
from jaxscale.sharding.layer_bytes import LayerBytes
from jaxscale.sharding.specs import replicated

log = logging.getLogger("jaxscale")


@dataclass(frozen=True)
class XlaFlag:
    """A compiler option and the reason for it."""

    name: str
    value: bool | int | str
    reason: str


VERSION = "2026-11"

_GPU = (
    XlaFlag(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "starts a collective early, so that it overlaps with computation (NVIDIA's advice)",
    ),
    XlaFlag(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        4,
        "the backward pass has gathers and reduce-scatters in flight at once; with a limit of 1 "
        "the gather ends before the layer starts",
    ),
    XlaFlag(
        "xla_gpu_enable_analytical_sol_latency_estimator",
        False,
        "it estimates that a loop, such as over micro-batches, takes no time, and overlaps no "
        "collective with it",
    ),
)
_TPU = (
    XlaFlag(
        "xla_tpu_enable_ragged_dot_kernel",
        True,
        "without it libtpu 0.0.52 multiplies every row by the matrix of every expert, except on v4 "
        "and v5p: with 8 experts 8 times the FLOPs; in 0.0.50 it is the default",
    ),
)
_TPU_V5E = (
    *_TPU,
    XlaFlag("xla_enable_async_all_gather", True, "gathers weights during computation"),
    XlaFlag(
        "xla_tpu_enable_async_collective_fusion",
        True,
        "fuses a running collective with the computation that it overlaps with; v5e only",
    ),
    XlaFlag(
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        True,
        "includes all-gathers in that fusion",
    ),
    XlaFlag(
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        True,
        "overlaps one collective with several computations",
    ),
    XlaFlag(
        "xla_max_concurrent_async_all_gathers",
        16,
        "a layer has up to nine weights to gather; with a limit of 1 only one is overlapped",
    ),
    XlaFlag(
        "xla_tpu_overlap_compute_collective_tc",
        True,
        "lets the tensor core compute while it drives a collective",
    ),
)
_TPU_SPARSE_CORES = (
    *_TPU,
    XlaFlag(
        "xla_tpu_prefer_async_allgather_to_allreduce",
        True,
        "on 64 chips and more of a 3-D torus a gather would become a synchronous all-reduce "
        "of padded buffers",
    ),
    XlaFlag(
        "xla_tpu_enable_sparse_core_collective_offload_all_gather",
        True,
        "the sparse cores drive gathers while the tensor cores compute; these chips have no async "
        "collective fusion",
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
        "the sparse cores also drive reduce-scatters",
    ),
    XlaFlag(
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter",
        True,
        "includes reduce-scatters over several dimensions of the torus",
    ),
    XlaFlag(
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
        True,
        "and all-reduces, such as XLA makes of a reduce-scatter where the other dimension in tiles "
        "of 128 does not divide by the sides of the torus (`Zero.ranks_as_dimension` avoids most)",
    ),
    XlaFlag(
        "xla_tpu_enable_sparse_core_collective_offload_ragged_all_to_all",
        True,
        "and the all-to-alls of experts: of four layers of Mixtral, over 8 ranks, 42 % of the "
        "bytes overlap with matmuls, in place of 20 % (libtpu 0.0.52)",
    ),
    XlaFlag(
        "xla_tpu_enable_sparse_core_offload_queuing_in_lhs",
        True,
        "queues all the collectives of a layer before it computes, not one after the other",
    ),
)
XLA_FLAGS = {
    "cpu": (),
    "gpu": _GPU,
    "tpu": _TPU,
    "TPU v5 lite": _TPU_V5E,
    "TPU v5e": _TPU_V5E,
    "TPU v5": _TPU_SPARSE_CORES,
    "TPU v5p": _TPU_SPARSE_CORES,
    "TPU v6 lite": _TPU_SPARSE_CORES,
    "TPU v6e": _TPU_SPARSE_CORES,
}
"""`device.device_kind`, else `device.platform` -> flags. Each flag was seen to change the scheduled
program of a layered step as its reason says (libtpu 0.0.51, XLA of jax 0.12), `_TPU` that of a
program with only `ragged_dot` (libtpu 0.0.52)."""

PIPELINED = (
    XlaFlag(
        "xla_gpu_enable_command_buffer",
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE",
        "XLA's default and WHILE: a tick's operations are loops of zero or one trips, for each of "
        "which the host reads the condition and waits; in a CUDA graph the device decides. XLA "
        "omits WHILE and CONDITIONAL with a driver or CUDA older than 12.3. Not COLLECTIVES: NCCL "
        "cannot be captured in a conditional node (NVIDIA/nccl#1986), so a loop with a collective "
        "remains on the host",
    ),
    XlaFlag(
        "xla_disable_hlo_passes",
        "dynamic-slice-annotator",
        "a copy of one layer's slice would be a memcpy whose memory address the host computes from "
        "the layer's index, and a loop with such a copy cannot be recorded; without the pass it is "
        "a kernel",
    ),
)
"""Extra flags for pipelined steps on GPU."""

FLOAT8 = (
    XlaFlag(
        "xla_gpu_enable_triton_gemm",
        False,
        "leaves matmuls to cuBLAS: in XLA's Triton kernels, Hopper's tensor cores accumulate "
        "float8 matmuls with about 14 bits, whatever precision is requested "
        "(max_num_imprecise_acc in XLA's emitter)",
    ),
)
"""Extra flags for steps with `model.matmul_dtype = "float8"` on GPU."""

IN_PLACE = (
    XlaFlag(
        "xla_gpu_enable_triton_gemm",
        False,
        "leaves matmuls to cuBLAS before slices are fused: a Triton kernel, or a cuBLAS kernel "
        "chosen by timing both, writes its result to a separate array",
    ),
    XlaFlag(
        "xla_gpu_enable_dynamic_slice_fusion",
        True,
        "matmuls write residuals directly to the arrays of all layers, and read them from there",
    ),
)
"""Extra flags for steps whose layers write residuals to the stack (`save_in_place`) on GPU."""

UNROLLED = (
    XlaFlag(
        "xla_gpu_enable_triton_gemm",
        False,
        "cuBLAS adds a matmul's result to the stream, or to the gradient of another matmul, while "
        "writing it; with Triton among the timed kernels a separate kernel adds the result",
    ),
    XlaFlag(
        "xla_gpu_dot_merger_threshold_mb",
        0,
        "the backward pass reads queries, keys and values as separate arrays: they would be copied "
        "from the result of one merged matmul",
    ),
)
"""Extra flags for steps with unrolled layers on one GPU."""

INIT = (
    XlaFlag(
        "xla_backend_optimization_level",
        1,
        "LLVM spends seconds on optimising the random-bit generators, without a gain",
    ),
)
"""Flags for the program that draws the parameters, on CPU."""


COMBINED_BYTES = 30 * 2**20
"""XLA for GPUs' default limit of combined collectives, in bytes of results."""

_COPIES_ASIDE = XlaFlag(
    "xla_disable_hlo_passes",
    "dynamic-slice-annotator",
    "XLA would overlap the copies of a layer's gradients into the stack with the layer's compute, "
    "and so wait for their all-reduce first",
)

DETERMINISTIC = {
    "cpu": (),
    "tpu": (),
    "gpu": (
        XlaFlag(
            "xla_gpu_deterministic_ops",
            True,
            "the same bits on each run (XLA's words): scatters add in order, without atomics, "
            "cuDNN's attention uses its deterministic backward pass (openxla/xla#14125), and no "
            "kernel is chosen by timing, so that a program compiled again has the same kernels",
        ),
    ),
}
"""`device.platform` -> flags for a bitwise reproducible step; CPUs and TPUs run a program in
a fixed order."""

XLA_MEMORY_FRACTION = 0.8
"""Share of a GPU's memory that XLA plans with, whatever share JAX preallocates."""


def has_sparse_cores(device_kind: str) -> bool:
    """Whether a device is a TPU whose sparse cores drive collectives."""
    return XLA_FLAGS.get(device_kind) is _TPU_SPARSE_CORES


def waits_for_gathers(device_kind: str) -> bool:
    """Whether a device is a TPU whose compiler overlaps few or no all-gathers with compute: v4 and
    v5e, as seen in steps of llama2_7b with libtpu 0.0.52; on v7x it overlaps more."""
    return device_kind == "TPU v4" or XLA_FLAGS.get(device_kind) is _TPU_V5E


def _combining(layer: LayerBytes) -> tuple[XlaFlag, ...]:
    """Options that combine the collectives of a layer, and no more: the gradients of the head would
    wait for the embedding's. Without them larger models have more collectives in a layer than may
    be in flight at once, and some are not overlapped."""
    reason = "the weights, or the gradients, of a layer are sent in one NCCL call"
    combined = tuple(
        XlaFlag(f"xla_gpu_{collective}_combine_threshold_bytes", num_bytes, reason)
        for collective, num_bytes in (
            ("all_gather", layer.gathered),
            ("reduce_scatter", layer.reduced),
            ("all_reduce", layer.reduced),
        )
        if num_bytes > COMBINED_BYTES
    )
    return combined if layer.gathered else (*combined, _COPIES_ASIDE)


def _memory_limit(device: Any, arguments: float) -> XlaFlag:
    """The option that has XLA plan with the memory that JAX preallocates on a GPU.

    If a step needs more than XLA's limit, XLA recomputes matmuls and overlaps less. The limit is on
    temporaries: (80 % of the memory - arguments) * factor %, with a default factor of 95
    (openxla/xla, `GetSchedulerMemoryLimit` in gpu_hlo_schedule.cc). All processes must have the
    same program, so a GPU's memory is from hardware.csv; for a GPU missing there, or arguments
    above 80 %, the limit is too low.

    Args:
      arguments: bytes, on a device.
    """
    here = device in jax.devices()
    taken = gpu_memory_fraction(JAX_MEMORY_FRACTION if here else GPU_MEMORY_FRACTION)
    chip = find_chip(device.device_kind)
    held = arguments / chip.memory_bytes if chip else 0.0
    held = held if held < min(taken, XLA_MEMORY_FRACTION) else 0.0
    factor = math.floor(100 * (taken - held) / (XLA_MEMORY_FRACTION - held))
    reason = f"{taken:.0%} of the memory may be used; by default XLA recomputes beyond 76 %"
    return XlaFlag("xla_gpu_memory_limit_slop_factor", factor, reason)


def flags_of(device: Any) -> tuple[XlaFlag, ...]:
    """The table's flags for a device, attached or absent."""
    return XLA_FLAGS.get(device.device_kind, XLA_FLAGS.get(device.platform, ()))


def refused_options(flags: Sequence[XlaFlag], sharding: Sharding) -> dict[str, str]:
    """Option -> the error of this version of XLA, for options that it refuses.

    XLA renames and drops options between versions, and does not compile with an unknown one: an
    empty program is compiled with all of them and, if that fails, with each alone.

    Args:
      sharding: names the devices to compile for.
    """
    if not flags:
        return {}
    empty = jax.jit(lambda: jnp.zeros(()), out_shardings=sharding).lower()

    def refusal(tried: Sequence[XlaFlag]) -> str:
        try:
            empty.compile(compiler_options={flag.name: flag.value for flag in tried})
        except jax.errors.JaxRuntimeError as error:
            return str(error)
        return ""

    if not refusal(flags):
        return {}
    return {flag.name: error for flag in flags if (error := refusal([flag]))}


def step_options(
    mesh: Mesh,
    *,
    pipelined: bool = False,
    deterministic: bool = False,
    in_place: bool = False,
    unrolled: bool = False,
    matmul_dtype: str = "",
    layer: LayerBytes | None = None,
    arguments: float = 0.0,
) -> dict[str, bool | int | str]:
    """The compiler options of a step on a mesh's devices; options unknown to this version of XLA
    are logged and left out.

    Args:
      deterministic: whether to add the options for bitwise reproducible steps.
      pipelined, in_place, unrolled, matmul_dtype, layer, arguments: as in `_gpu_step_flags`.

    Raises:
      RuntimeError: XLA refuses one for another reason.
      ValueError: `deterministic` is not possible on these devices.
    """
    device = mesh.devices.flat[0]
    needed = _deterministic(device) if deterministic else ()
    of_step = ()
    if device.platform == "gpu":
        of_step = _gpu_step_flags(
            device, pipelined, in_place, unrolled, matmul_dtype, layer, arguments
        )
    flags = (*flags_of(device), *of_step, *needed)
    refused = refused_options(flags, replicated(mesh))
    for name, error in refused.items():
        if "No such compile option" not in error:
            raise RuntimeError(f"XLA refuses the option {name} of xla_options.py: {error}")
        if name in {flag.name for flag in needed}:
            raise ValueError(
                f"run.deterministic = True: this version of XLA does not know {name}, without "
                "which a step may differ from run to run; set run.deterministic = False, or "
                "install another version of jaxlib"
            )
        log.warning(
            "this version of XLA does not know %s: the step is compiled without it; it may be "
            "slower, with the same results",
            name,
        )
    return {flag.name: flag.value for flag in flags if flag.name not in refused}


def _gpu_step_flags(
    device: Any,
    pipelined: bool,
    in_place: bool,
    unrolled: bool,
    matmul_dtype: str,
    layer: LayerBytes | None,
    arguments: float,
) -> tuple[XlaFlag, ...]:
    """Extra flags of a step on a GPU, except flags that the environment's XLA_FLAGS set.

    Args:
      pipelined: adds `PIPELINED`.
      in_place: adds `IN_PLACE`.
      unrolled: adds `UNROLLED`.
      matmul_dtype: of the model; "float8" adds `FLOAT8`.
      layer: the largest layer, if its collectives are to be combined.
      arguments: bytes of the step's arguments on a device.
    """
    flags = (
        *(PIPELINED if pipelined else ()),
        *(IN_PLACE if in_place else ()),
        *(UNROLLED if unrolled else ()),
        *(FLOAT8 if matmul_dtype == "float8" else ()),
        *(_combining(layer) if layer else ()),
        _memory_limit(device, arguments),
    )
    return tuple(flag for flag in flags if not _is_set(flag))


def init_options(platform: str) -> dict[str, bool | int | str]:
    """The options of `INIT`, except options that the environment's XLA_FLAGS set."""
    flags = INIT if platform == "cpu" else ()
    return {flag.name: flag.value for flag in flags if not _is_set(flag)}


def _is_set(flag: XlaFlag) -> bool:
    """Whether the environment sets a flag, as `--name` or `--name=value`."""
    given = os.environ.get("XLA_FLAGS", "").split()
    return any(one.split("=")[0] == f"--{flag.name}" for one in given)


def _deterministic(device: Any) -> tuple[XlaFlag, ...]:
    """The options of `DETERMINISTIC` for a device; refuses devices without them."""
    platform = device.platform
    if platform == "gpu" and device not in jax.devices():
        raise ValueError(
            "run.deterministic = True: the compiler for absent GPUs finds no matmul kernels in "
            "that mode; compile with run.deterministic = False, which needs about the same"
        )
    if platform not in DETERMINISTIC:
        raise ValueError(
            f"run.deterministic = True is for {', '.join(DETERMINISTIC)}, not for the {platform} "
            "back end; set run.deterministic = False"
        )
    return DETERMINISTIC[platform]
