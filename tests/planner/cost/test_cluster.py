"""Clusters from the table and from a user's file, and what is refused."""

import json
import math

import pytest

from jaxscale import hardware
from jaxscale.config.layout import MESH_AXES
from jaxscale.planner.cost import kernels
from jaxscale.planner.cost.cluster import find_device, make_cluster
from jaxscale.planner.cost.collectives import collective_seconds


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("h100", "H100-SXM"),
        ("H100-SXM", "H100-SXM"),
        ("v5p", "TPUv5p"),
        ("gb200", "GB200-NVL72"),
        ("mi250x", "MI250X-GCD"),
        ("A100-40", "A100-40"),
    ],
)
def test_names_are_found_in_any_case_and_without_their_form(name, full):
    assert find_device(name).name == full


def test_an_unknown_device_names_the_nearest_and_all():
    with pytest.raises(ValueError, match=r"TPUv5p.*did you mean 'H100-SXM'"):
        make_cluster("h101", 8)


def test_links_of_unknown_rate_are_refused():
    with pytest.raises(ValueError, match=r"of a network, which 16 devices need; give network_gb_p"):
        make_cluster("h100", 16, network_bytes_per_second=0.0)
    with pytest.raises(ValueError, match="of a torus, which 16 devices need; give torus_gb_p"):
        make_cluster("v5e", 16, torus_bytes_per_second=0.0)
    with pytest.raises(ValueError, match="of a node, which 8 devices need; give node_gb_p"):
        make_cluster("mi250x", 8, node_bytes_per_second=0.0, node_bus_bytes_per_second=0.0)


@pytest.mark.parametrize(
    ("name", "devices", "fields"),
    [
        ("h100", 8, ["network_bytes_per_second"]),
        (
            "h100",
            1,
            ["network_bytes_per_second", "node_bus_bytes_per_second", "node_bytes_per_second"],
        ),
        (
            "mi250x",
            2,
            ["network_bytes_per_second", "node_bus_bytes_per_second", "node_bytes_per_second"],
        ),
        ("v5e", 16, ["network_bytes_per_second"]),
    ],
)
def test_links_that_nothing_crosses_need_no_rate(name, devices, fields):
    sizes = dict.fromkeys(MESH_AXES, 1) | {"fsdp": devices}
    seconds = [
        collective_seconds(make_cluster(name, devices, **given), sizes, kind, ("fsdp",), 1e9)
        for given in ({}, dict.fromkeys(fields, 0.0))
        for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    ]
    assert seconds[:4] == seconds[4:]
    assert all(map(math.isfinite, seconds))


def test_what_a_cluster_cannot_change_is_refused():
    with pytest.raises(ValueError, match="'networks' cannot be overridden"):
        make_cluster("h100", 8, networks=3)
    with pytest.raises(ValueError, match="at least 1"):
        make_cluster("h100", 0)
    with pytest.raises(ValueError, match="not on a torus"):
        make_cluster("h100", 8, torus=(2, 4))
    with pytest.raises(ValueError, match="not a whole number of slices"):
        make_cluster("v5e", 100, torus=(16, 16))


@pytest.mark.parametrize("chip", hardware.chips(), ids=lambda chip: chip.name)
def test_every_device_of_the_table_makes_a_cluster(chip):
    one = make_cluster(chip.name, 64)
    rates = [tier.bytes_per_second for tier in one.tiers]
    # Farther links are slower; a torus' rate is of one of its axes.
    assert rates == sorted(rates, reverse=True)
    assert all(tier.latency_seconds > 0 for tier in one.tiers)
    assert one.tiers[-1].devices == math.inf
    assert one.peak_flops() == chip.bf16_flops_per_second
    assert 0.4 < chip.matmul_fraction < 1
    assert 0.7 < chip.memory_fraction < 1


def test_matmuls_that_a_device_lacks_are_refused():
    with pytest.raises(ValueError, match="no matmuls of 'fp8' operands; it has bfloat16"):
        make_cluster("a100", 8).peak_flops("fp8")


def test_a_slice_is_as_near_to_a_cube_as_can_be():
    assert make_cluster("v5p", 64).torus == (4, 4, 4)
    assert make_cluster("v5p", 512).torus == (8, 8, 8)
    assert make_cluster("v6e", 256).torus == (16, 16)
    assert make_cluster("v5e", 1024).torus == (16, 16)  # four pods
    assert make_cluster("v5e", 1024).node_devices == 256


def test_slices_of_too_few_devices_are_refused():
    said = r"514 TPUv5e devices do not divide .* another number, such as 512$"
    with pytest.raises(ValueError, match=said):
        make_cluster("v5e", 514)


@pytest.mark.parametrize(
    ("name", "devices", "torus", "wraps"),
    [
        ("v5p", 4, (1, 2, 2), "---"),
        ("v5p", 32, (2, 4, 4), "---"),  # switches join whole cubes only
        ("v5p", 64, (4, 4, 4), "ooo"),
        ("v5p", 128, (4, 4, 8), "ooo"),
        ("v4", 192, (4, 4, 12), "ooo"),
        ("TPUv7-Ironwood", 64, (4, 4, 4), "---"),  # 4 x 4 x 2 chips
        ("TPUv7-Ironwood", 128, (4, 4, 8), "ooo"),
        ("v5e", 8, (2, 4), "--"),
        ("v5e", 128, (8, 16), "-o"),
        ("v6e", 256, (16, 16), "oo"),
        ("v6e", 512, (16, 16), "oo"),
        ("v6e", 768, (16, 16), "oo"),  # three pods
        ("v3", 64, (8, 8), "--"),
        ("v3", 2048, (32, 64), "oo"),
    ],
)
def test_a_small_slice_is_no_torus(name, devices, torus, wraps):
    """Google's slices: jax-ml.github.io/scaling-book/tpus."""
    one = make_cluster(name, devices)
    assert one.torus == torus
    assert one.wraps == tuple(mark == "o" for mark in wraps)
    assert one.wraps == make_cluster(name, devices, torus=torus[::-1]).wraps


def test_a_users_device_comes_from_a_file(tmp_path):
    columns = {
        "name": "mine",
        "generation": "sm90",
        "cores": 100,
        "bf16_tflops": 500,
        "memory_gb": 64,
        "memory_gb_per_second": 2000,
        "node_devices": 4,
        "node_gb_per_second": 100,
        "node_latency_us": 10,
        "network_gb_per_second": 10,
        "network_latency_us": 20,
    }
    as_json, as_csv = tmp_path / "device.json", tmp_path / "device.csv"
    as_json.write_text(json.dumps(columns))
    as_csv.write_text(",".join(columns) + "\n" + ",".join(map(str, columns.values())) + "\n")
    assert find_device(str(as_json)) == find_device(str(as_csv))
    mine = make_cluster(str(as_json), 16)
    assert mine.node_devices == 4
    assert mine.tiers[0].bytes_per_second == pytest.approx(78e9)  # of 100 nominal
    as_json.write_text(json.dumps({**columns, "tflops": 1}))
    with pytest.raises(ValueError, match="column 'tflops' is not known"):
        make_cluster(str(as_json), 16)
    as_json.write_text(json.dumps({**columns, "bf16_tflops": None}))
    with pytest.raises(ValueError, match="no 'bf16_tflops'"):
        make_cluster(str(as_json), 16)


def test_a_generation_is_stated_and_known(tmp_path):
    path = tmp_path / "device.json"
    columns = {"name": "mine", "bf16_tflops": 500, "memory_gb": 64, "memory_gb_per_second": 2000}
    path.write_text(json.dumps(columns))
    with pytest.raises(ValueError, match="no 'generation'"):
        find_device(str(path))
    path.write_text(json.dumps({**columns, "generation": "sm120"}))
    with pytest.raises(ValueError, match=r"generation 'sm120' is not known.*one of sm70, sm80"):
        find_device(str(path))


def test_a_gpu_says_its_cores(tmp_path):
    """Without them its matmuls would be those of a TPU, which has no tiles to spread."""
    path = tmp_path / "device.json"
    columns = {"name": "mine", "bf16_tflops": 500, "memory_gb": 64, "memory_gb_per_second": 2000}
    for generation in ("sm90", "gfx942"):
        for cores in ({}, {"cores": 0}):
            path.write_text(json.dumps({**columns, **cores, "generation": generation}))
            with pytest.raises(ValueError, match=f"no 'cores'; .* generation '{generation}'"):
                find_device(str(path))
    path.write_text(json.dumps({**columns, "generation": "tpu6"}))
    assert find_device(str(path)).cores == 0


def test_every_generation_has_rates():
    assert set(kernels.MEASURED) == set(hardware.GENERATIONS)
    assert set(kernels.MEASURED.values()) == set(kernels.FLASH)
