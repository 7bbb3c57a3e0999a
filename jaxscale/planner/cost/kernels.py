"""Seconds of compute kernels on one device, in closed form over arrays of layouts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxscale.planner.cost.cluster import Cluster

Floats = Any  # a float, or float [N]

TILES = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.75), (64, 64, 0.55))
"""Rows and columns of a GPU matmul's output tile, and its rate over that of the best kernel while
all cores are busy: arithmetic intensity against the cache falls with the tile size (NVIDIA, Matrix
Multiplication Background User's Guide, tables for A100)."""

DEPTH_PER_INTENSITY = 0.73
"""Overhead of starting and writing a tile, in steps along the contracted dimension over the
device's FLOPs per byte of memory bandwidth. XLA's table of measured matmuls has 459, 689 and 802
TFLOP/s on H100 for 4 x [2048, k] x [k, 4096] at k = 256, 1024 and 4096, which is 205 steps at 295
FLOPs per byte; 8-bit matmuls of [8192, k] x [k, 8192] on H800 (TileLang's benchmark: 1129, 1467 and
1541 at k = 1024, 4096 and 16384) 454 steps at 591."""

MATRIX_UNIT = 128
"""Side of a TPU's systolic array, to which dimensions are padded (256 from v6e on, which makes no
difference for usual widths)."""

LAUNCH_SECONDS = 4e-6
"""Launch latency between two dependent, queued kernels on a GPU (2.2 to 5 us by NVIDIA)."""

SUSTAINED = {"sm80": 0.95, "sm90": 0.9, "fp8 on sm90": 0.8, "sm100": 0.84, "sm103": 0.84}
"""Sustained rate of matmuls over that of the best single one, on a GPU whose power limit lowers the
clock: A100 258 of 271 TFLOP/s on random numbers (He, Strangely, Matrix
Multiplications on GPUs Run Faster When Given "Predictable" Data), H100 720 against 794, and of
8-bit operands 1280 against 1600 (SemiAnalysis and ml-engineering; cuBLASLt). Blackwell with any
operands: matmuls of 8192 sides on one B200 reached 1,420 TFLOP/s in 16 bits and 5,370 in 4
(torchao's benchmark, its pull request 2427) where 1,745 are the best. Blackwell Ultra is
assumed to have the same limit."""


COMPILED = 0.92
"""Rate of matmuls inside a compiled step over that of the best single one, on a TPU, where operands
have the layouts of their neighbours: MaxText's 66.9 % MFU on v5e with full recompute is 87 % of the
peak in matmuls, of 95 % at best."""


def matmul_seconds(
    cluster: Cluster,
    m: Floats,
    n: Floats,
    k: Floats,
    batch: Floats = 1,
    matmul: str = "bfloat16",
) -> Floats:
    """`batch` matmuls of [m, k] and [k, n]: waves of tiles over the cores, or memory bandwidth."""
    flops = 2.0 * m * n * k * batch
    peak = cluster.peak_flops(matmul) * cluster.chip.matmul_fraction
    peak = peak * (_sustained(cluster, matmul) if cluster.chip.cores else COMPILED)
    if cluster.chip.cores:
        seconds = _tiled_seconds(cluster, m, n, k, batch, peak, matmul)
    else:
        # A TPU pads rows to 8 sublanes, columns and depth to its systolic array.
        padded = 2.0 * batch * _pad(m, 8) * _pad(n, MATRIX_UNIT) * _pad(k, MATRIX_UNIT)
        seconds = padded / peak
    # NVFP4 (arXiv 2509.25149) has an 8-bit scale for each 16 elements of 4 bits.
    width = {"bfloat16": 2.0, "fp8": 1.0, "fp4": 0.56}[matmul]
    read = width * batch * (m * k + k * n) + 2.0 * batch * m * n
    seconds = np.maximum(seconds, memory_seconds(cluster, read))
    return np.where(flops > 0, seconds + (LAUNCH_SECONDS if cluster.chip.cores else 0.0), 0.0)


def _sustained(cluster: Cluster, matmul: str) -> float:
    generation = MEASURED[cluster.chip.generation]
    return SUSTAINED.get(f"{matmul} on {generation}", SUSTAINED[generation])


def _tiled_seconds(cluster, m, n, k, batch, peak, matmul) -> Floats:
    intensity = cluster.peak_flops(matmul) / cluster.chip.memory_bytes_per_second
    deep, fastest = k + DEPTH_PER_INTENSITY * intensity, np.inf
    # The last wave may leave cores idle, so that smaller, slower tiles can be faster in all.
    for rows, columns, rate in TILES:
        tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
        waves = np.ceil(tiles / cluster.chip.cores)
        per_core = peak / cluster.chip.cores * rate
        fastest = np.minimum(fastest, waves * 2.0 * rows * columns * deep / per_core)
    return fastest


def _pad(size: Floats, multiple: int) -> Floats:
    return np.ceil(size / multiple) * multiple


Rates = Mapping[str, tuple[float, float]]

FLASH: Rates = {
    "sm80": (0.58, 0.50),
    "sm90": (0.58, 0.48),
    "sm100": (0.50, 0.37),
    "sm103": (0.62, 0.46),
    "tpu": (0.45, 0.40),
    "tpu6": (0.27, 0.24),
}
"""Utilisation of fused attention on the FLOPs that it executes, forward and backward, for head
dimension 128 and sequences of 4k, by generation. Each vendor's best: FlashAttention-2 on A100
(arXiv 2307.08691, figures 4 to 7), FlashAttention-3 and cuDNN 9 on H100 (2407.08608, figures 5 and
6), cuDNN on Blackwell (1,100 to 1,200 and 800 to 900 TFLOP/s on causal sequences of 4k), a quarter
more on Blackwell Ultra (estimated: it exponentiates twice as fast), and splash attention on TPUs.
From v6e on a TPU's matrix units have grown 4.7 times and its vector units, which exponentiate,
about 2.8 times."""

FLASH_BACKWARD = 2.5
"""Matmuls of the backward pass over those of the forward pass: five for two."""


MEASURED = {
    "sm70": "sm80",
    "sm80": "sm80",
    "sm89": "sm90",
    "sm90": "sm90",
    "sm100": "sm100",
    "sm103": "sm103",
    "gfx90a": "sm80",
    "gfx942": "sm90",
    "gfx950": "sm100",
    "tpu3": "tpu",
    "tpu4": "tpu",
    "tpu5e": "tpu",
    "tpu5p": "tpu",
    "tpu6": "tpu6",
    "tpu7": "tpu6",
    "trn2": "tpu",
    "cpu": "tpu",
}
"""Generation whose measurements are used for each generation: its own, or a similar one where too
little is published."""


FLASH_LENGTH, HALF_RATE = 4096, 500
"""The sequence length of `FLASH`, and the length at which causal attention has half of its
asymptotic rate: whole blocks are computed along the diagonal, and few blocks run at the end. On
A100 112, 136, 150, 160 and 164 TFLOP/s forward from 1k to 16k, and 60, 76 and 88 backward from 1k
to 4k (Triton's tutorial on fused attention, heads of 64)."""


def flash_seconds(
    cluster: Cluster,
    flops: Floats,
    head_dim: int,
    backward: bool = False,
    length: Floats = FLASH_LENGTH,
    rates: Rates = FLASH,
) -> Floats:
    """Fused attention of `flops` forward FLOPs, on causal sequences of `length`.

    Heads are padded to multiples of 32 elements.
    """
    generation = MEASURED[cluster.chip.generation]
    shorter = (1 + HALF_RATE / length) / (1 + HALF_RATE / FLASH_LENGTH)
    rate = rates[generation][backward] * cluster.peak_flops() / shorter
    small = SMALL_HEAD[generation] * max(0.0, (128 - head_dim) / 64)
    padded = _pad(head_dim, 32) / head_dim * (1 + small)
    return flops * padded * (FLASH_BACKWARD if backward else 1.0) / rate


SCAN_RATE = {"core": 0.45e12, "tpu": 0.12}
"""FLOP/s of a state-space scan: of one GPU multiprocessor in Triton's warp-level matmuls (Mamba-2's
SSD kernels, arXiv 2405.21060: about 50 TFLOP/s on the 108 of an A100; their rate has not grown
since). On TPUs, without a measurement, a share of the peak."""


def scan_seconds(cluster: Cluster, flops: Floats) -> Floats:
    """State-space scans of `flops` FLOPs."""
    if cluster.chip.cores:
        return flops / (SCAN_RATE["core"] * cluster.chip.cores)
    return flops / (SCAN_RATE["tpu"] * cluster.peak_flops())


SMALL_HEAD = {"sm80": 0.25, "sm90": 0.4, "sm100": 0.8, "sm103": 0.4, "tpu": 0.5, "tpu6": 0.8}
"""Slowdown of attention from heads of 128 to heads of 64: as many exponentials for half of the
matmuls. A100 a fifth (arXiv 2307.08691), H100 a third (2407.08608, figure 5); Blackwell's
exponential units did not grow with its matmul units."""

PLAIN_KERNEL = 0.85
"""Bandwidth of elementwise kernels of eager trainers (norms, softmax, dropout, activations) over
that of a long copy (Megatron's and Apex's kernels on A100: 1.3 to 1.5 of 1.75 TB/s)."""


def memory_seconds(cluster: Cluster, num_bytes: Floats) -> Floats:
    """Memory traffic of `num_bytes`, at the rate of a long copy."""
    chip = cluster.chip
    return num_bytes / (chip.memory_bytes_per_second * chip.memory_fraction)


CAST_BYTES = {"bfloat16": 0.0, "fp8": 4.0, "fp4": 7.0}
"""Bytes per element of a cast operand: read in 16 bits, written by rows and by columns in 8 bits;
for 4 bits read three times, for the maximum, the rows, and rotated for the columns (NVFP4, arXiv
2509.25149)."""

CAST_KERNEL = {"sm100": 0.58, "sm103": 0.58}
"""Bandwidth of those kernels over that of a long copy: 4.1 of 7.0 TB/s on B200, in both directions
with scales (Transformer Engine's MXFP8 benchmark, pull request 3137). Elsewhere they are plain
kernels."""


def cast_seconds(cluster: Cluster, elements: Floats, matmul: str) -> Floats:
    """Casts of 16-bit operands to the type of `matmul`."""
    chip = cluster.chip
    rate = CAST_KERNEL.get(MEASURED[chip.generation], PLAIN_KERNEL)
    rate = rate * chip.memory_bytes_per_second * chip.memory_fraction
    return CAST_BYTES[matmul] * elements / rate
