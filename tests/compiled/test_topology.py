"""Names of absent machines."""

import importlib.util
import math

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

from jaxscale import hardware
from jaxscale.compiled import topology
from jaxscale.config.layout import MESH_AXES
from jaxscale.planner.cost.cluster import NETWORK_OVER_NOMINAL, make_cluster
from jaxscale.planner.cost.collectives import collective_seconds

NEEDS_TPU = pytest.mark.skipif(
    not topology.compiler_installed("tpu"),
    reason="no compiler for TPUs: uv sync --inexact --extra aot",
)
NEEDS_GPU = pytest.mark.skipif(
    not topology.compiler_installed("gpu"),
    reason="no compiler for GPUs: uv sync --inexact --extra aot",
)


@NEEDS_TPU
@pytest.mark.parametrize(
    ("name", "devices", "kind"),
    [
        ("v2:2x2", 8, "TPU v2"),
        ("v3:2x2", 8, "TPU v3"),
        ("v4:2x2x2", 8, "TPU v4"),
        ("v5e:1x1", 1, "TPU v5 lite"),
        ("v5e:16x16", 256, "TPU v5 lite"),
        ("v5e:4x4:2", 32, "TPU v5 lite"),
        ("v5p:8x8x8", 512, "TPU v5"),
        ("v6e:4x4", 16, "TPU v6 lite"),
        ("v7x:2x2x1", 8, "TPU7x"),
    ],
)
def test_a_tpu(name, devices, kind):
    machine = topology.open_topology(name)
    assert len(machine.devices) == devices
    assert {device.device_kind for device in machine.devices} == {kind}
    chip = hardware.find_chip(kind)
    # What libtpu leaves of the memory.
    if chip:
        assert 0.9 * chip.memory_bytes < machine.limit_bytes < 1.1 * chip.memory_bytes


@NEEDS_TPU
@pytest.mark.parametrize(
    ("name", "torus", "slices"),
    [
        ("v5p:2x2x1", (2, 2, 1), 1),
        ("v5e:2x4:2", (2, 4), 2),
        ("v5e:2x2:4", (2, 2), 4),
        ("v3:2x2", (2, 4), 1),  # two devices a chip
        ("v7x:2x2x1:2", (2, 2, 2), 2),
    ],
)
def test_slices_are_joined_by_the_network(name, torus, slices):
    """A collective over `data`, which lies between slices, is as slow as the network."""
    machine = topology.open_topology(name)
    assert machine.node == {"torus": torus}
    chip = hardware.find_chip(machine.devices[0].device_kind)
    assert chip
    links = make_cluster(chip.name, len(machine.devices), **machine.node)
    assert links.num_devices // links.node_devices == slices
    sizes = dict.fromkeys(MESH_AXES, 1) | {"data": slices, "fsdp": math.prod(torus)}
    seconds = collective_seconds(links, sizes, "all-reduce", ("data",), 1e9)
    least = 2 * (1 - 1 / slices) * 1e9 / chip.network_bytes_per_second
    assert seconds >= least
    assert slices == 1 or seconds == pytest.approx(least / NETWORK_OVER_NOMINAL, rel=0.01)


@NEEDS_GPU
@pytest.mark.parametrize("kind", ["a100-40", "a100-80", "h100", "h200", "b200"])
def test_a_gpu(kind):
    machine = topology.open_topology(f"{kind}:2x4")
    assert len(machine.devices) == 8
    # Not the name of the plugin, which is "cuda": tables of kernels and of options have this one.
    assert {device.platform for device in machine.devices} == {"gpu"}
    chip = hardware.find_chip(machine.devices[0].device_kind)
    assert chip
    assert 0.85 * chip.memory_bytes < machine.limit_bytes < chip.memory_bytes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5x:2x2", "did you mean 'v"),
        ("H100:1x8", "did you mean 'h100'"),
        ("h300:8x8", "a100-40:8x8, a100-80:8x8, l4:8x8, h100:8x8"),
        ("", "TPUs .chips along each dimension"),
    ],
)
def test_an_unknown_type_lists_the_known_ones(name, message):
    with pytest.raises(ValueError, match=message):
        topology.open_topology(name)


@NEEDS_TPU
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p:4x4", "2 dimensions, and a torus of v5p has 3"),
        ("v5p", "as in v5p:8x8x8"),
        ("v5e:16", "as in v5e:16x16"),
        ("v5e:4x4:0", "followed by :2 for two such slices"),
        ("v5p:3x2x1", "libtpu refuses it"),
    ],
)
def test_a_shape_that_no_slice_has(name, message):
    with pytest.raises(ValueError, match=message):
        topology.open_topology(name)


@NEEDS_GPU
def test_a_shape_that_no_cluster_has():
    with pytest.raises(ValueError, match="as in h200:8x8"):
        topology.open_topology("h200:8")


def test_without_the_compiler_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"libtpu.*uv sync --inexact --extra aot"):
        topology.open_topology("v5p:2x2x1")
    with pytest.raises(ModuleNotFoundError, match=r"GPUs.*uv sync --inexact --extra aot"):
        topology.open_topology("h200:1x8")


@NEEDS_GPU
@pytest.mark.proof
def test_what_jaxs_cache_has_of_absent_devices_is_not_read(tmp_path):
    """JAX warns of each program that it cannot read, and here warnings are errors."""
    folder = jax.config.jax_compilation_cache_dir
    shortest = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    try:
        place = SingleDeviceSharding(topology.open_topology("h100:1x1").devices[0])
        x = jax.ShapeDtypeStruct((4, 4), np.float32, sharding=place)
        for _ in range(2):
            jax.jit(lambda x: x @ x).trace(x).lower().compile()
        assert not [*tmp_path.iterdir()]
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)
        compilation_cache.reset_cache()
