"""Topologies of absent hardware: `v5p:8x8x8` is a TPU slice, `h200:8x8` is nodes x GPUs.

The compilers for both are packages (the extra `aot`) and do not need the hardware.
"""

import csv
import functools
import importlib.util
import math
import os
import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from jaxscale.choices import did_you_mean
from jaxscale.hardware import GPU_MEMORY_FRACTION, gpu_memory_fraction
from jaxscale.planner.cost.cluster import Cluster

PACKAGES = {"tpu": ("libtpu",), "gpu": ("jax_cuda13_plugin", "jax_plugins.xla_cuda13")}

_ENVIRONMENT = {
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once
    "TPU_SKIP_MDS_QUERY": "1",
    # Values that libtpu would query from the cloud; the topology overrides them.
    "TPU_ACCELERATOR_TYPE": "v5p-128",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

_GPU_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory_per_core}
  shared_memory_per_block_optin: {shared_memory_per_block_optin}
  core_count: {core_count} fpus_per_core: {fpus_per_core} clock_rate_ghz: {clock_rate_ghz}
  memory_bandwidth: {memory_bandwidth} l2_cache_size: {l2_cache_size}
  device_memory_size: {device_memory_size}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{device_kind}"
"""


@dataclass(frozen=True)
class Topology:
    """Absent hardware: devices of a mesh for which programs are compiled but not run."""

    name: str
    platform: str  # "tpu" or "gpu"
    devices: tuple[Any, ...]
    limit_bytes: int  # of device memory, for a program
    clock_hertz: float | None  # of the cycles that the TPU compiler estimates
    node: Mapping[str, Any]  # its nodes or slices, as arguments of `make_cluster`


def leave_hardware_alone() -> None:
    """Sets JAX to this machine's CPU, and keeps libtpu from looking for local TPUs.

    Call it before JAX initialises its back ends.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def open_topology(name: str) -> Topology:
    """Opens a topology by name, such as "v5p:4x4x4", "v5e:16x16:2" (two slices) or "h200:8x8".

    Disables JAX's compilation cache in this process.

    Raises:
      ValueError: an unknown name, or an invalid share of a GPU's memory in the environment.
      ModuleNotFoundError: its compiler is not installed; names the package.
    """
    platform = platform_of(name)
    check_installed(platform)
    leave_hardware_alone()
    # JAX writes programs for absent devices to the compilation cache but cannot read them: every
    # later compile would print a warning (jaxlib 0.12).
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    kind, _, shape = name.partition(":")
    row = _table(platform)[kind]
    return _tpu(name, row, shape) if platform == "tpu" else _gpu(name, row, shape)


def platform_of(name: str) -> str:
    """The platform of a topology's name, "tpu" or "gpu".

    Raises:
      ValueError: an unknown name.
    """
    kind = name.partition(":")[0]
    for platform in PACKAGES:
        if kind in _table(platform):
            return platform
    hint = did_you_mean(kind, topology_kinds())
    sentence = f"topology {name!r} is not known{hint or '.'}"
    raise ValueError(f"{sentence} There are {describe_topologies()}")


def describe_topologies() -> str:
    """A line with an example for every type of hardware."""
    tpus = ", ".join(f"{kind}:{row['example']}" for kind, row in _table("tpu").items())
    gpus = ", ".join(f"{kind}:8x8" for kind in _table("gpu"))
    return f"TPUs (chips along each dimension): {tpus}; GPUs (nodes x GPUs): {gpus}"


def topology_kinds() -> tuple[str, ...]:
    """The types of hardware, with which a name begins."""
    return (*_table("tpu"), *_table("gpu"))


def topology_name(cluster: Cluster) -> str:
    """The topology to compile for on a cluster.

    Raises:
      ValueError: there is no target for the cluster; suggests --topology.
    """
    known = topology_kinds()
    plain = cluster.name.lower().removeprefix("tpu").removesuffix("-sxm")
    if plain not in known:
        raise ValueError(
            f"there is no compiler target for {cluster.name}; give a similar one, such as "
            f"--topology h100:64x8 (types: {', '.join(known)})"
        )
    if cluster.torus:
        slices = cluster.num_devices // math.prod(cluster.torus)
        sides = "x".join(map(str, cluster.torus))
        return f"{plain}:{sides}" + (f":{slices}" if slices > 1 else "")
    devices = cluster.num_devices
    per_node = devices if devices < 8 else math.gcd(devices, 8)
    return f"{plain}:{devices // per_node}x{per_node}"


def compiler_installed(platform: str) -> bool:
    """Whether the compiler for "tpu" or "gpu" is installed."""
    return all(_found(module) for module in PACKAGES[platform])


def check_installed(platform: str) -> None:
    """Refuses a platform whose compiler is not installed.

    Raises:
      ModuleNotFoundError: names the package.
    """
    if not compiler_installed(platform):
        raise ModuleNotFoundError(
            f"the compiler for {platform.upper()}s is not installed ("
            f"{', '.join(module for module in PACKAGES[platform] if not _found(module))}): "
            "uv sync --inexact --extra aot"
        )


def has_cudnn() -> bool:
    """Whether cuDNN is installed, which fused attention needs to compile for GPUs."""
    return _found("nvidia.cudnn")


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _tpu(name: str, row: dict[str, str], shape: str) -> Topology:
    matched = re.fullmatch(r"(\d+(?:x\d+)+)(?::0*([1-9]\d*))?", shape)
    if not matched:
        raise ValueError(
            f"topology {name!r}: give the chips along each dimension of the torus, as in "
            f"{row['name']}:{row['example']}, followed by :2 for two such slices"
        )
    sizes = [int(size) for size in matched[1].split("x")]
    if len(sizes) != len(row["example"].split("x")):
        raise ValueError(
            f"topology {name!r} has {len(sizes)} dimensions, and a torus of {row['name']} has "
            f"{len(row['example'].split('x'))}, as in {row['name']}:{row['example']}"
        )
    # A host has at most 2 x 2 chips.
    host = [min(size, 2) for size in sizes[:2]] + [1]
    options: dict[str, Any] = {"chips_per_host_bounds": tuple(host)}
    if row["chip_config"]:
        options["chip_config_name"] = row["chip_config"]
    if matched[2]:
        options["num_slices"] = int(matched[2])
    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{row['libtpu_name']}:{matched[1]}", **options
        )
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        raise ValueError(f"topology {name!r}: libtpu refuses it: {error}") from error
    limit = int(float(row["memory_gib"]) * 2**30)
    clock = float(row["clock_ghz"]) * 1e9
    devices = tuple(topology.devices)
    # The two devices of a chip are adjacent in the last dimension, as in `hardware.csv`.
    sizes[-1] *= len(devices) // (math.prod(sizes) * int(matched[2] or 1))
    return Topology(name, "tpu", devices, limit, clock, {"torus": tuple(sizes)})


def _gpu(name: str, row: dict[str, str], shape: str) -> Topology:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
        raise ValueError(f"topology {name!r}: give nodes x GPUs per node, as in {row['name']}:8x8")
    limit = int(int(row["device_memory_size"]) * gpu_memory_fraction(GPU_MEMORY_FRACTION))
    major, minor = row["compute_capability"].split(".")
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology=f"1x{shape}",
        target_config=_GPU_TARGET.format(**row, major=major, minor=minor),
    )
    node = {"node_devices": int(shape.split("x")[1])}
    return Topology(name, "gpu", tuple(topology.devices), limit, None, node)


@functools.cache
def _table(platform: str) -> dict[str, dict[str, str]]:
    path = pathlib.Path(__file__).with_name("targets") / f"{platform}.csv"
    with path.open(newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}
