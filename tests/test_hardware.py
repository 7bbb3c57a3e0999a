"""The table of chips: exact names only, plausible figures."""

import json
import pathlib

import pytest

from jaxscale import hardware

TABLE = pathlib.Path(hardware.__file__).with_name("hardware.csv")
EVERY_COLUMN = {
    "name": "X1",
    "vendor": "Nobody",
    "year": "2031",
    "generation": "sm90",
    "device_kinds": "NVIDIA X1|X1 PCIe",
    "bf16_tflops": "3",
    "memory_gb": "5",
    "memory_gb_per_second": "7",
    "fp8_tflops": "11",
    "fp4_tflops": "13",
    "matmul_fraction": "0.17",
    "memory_fraction": "0.19",
    "cores": "23",
    "host_gb_per_second": "29",
    "package_devices": "31",
    "package_gb_per_second": "37",
    "node_devices": "41",
    "node_gb_per_second": "43",
    "node_bus_gb_per_second": "47",
    "node_mesh": "1",
    "node_latency_us": "53",
    "torus_axes": "2",
    "torus_gb_per_second": "61",
    "pod_shape": "67x71",
    "wrap_shape": "61x59",
    "network_gb_per_second": "73",
    "network_latency_us": "79",
    "tdp_w": "83",
    "system_w": "89",
    "usd_per_hour": "9.7",
    "confidence": "seen",
    "notes": "no such chip",
}


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250),
        ("AMD Instinct MI300X", 1307),
        ("TPU v3", 61.5),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU v6e", 918),
        ("TPU7x", 1153.5),
    ],
)
def test_peaks_are_those_of_one_device(kind, tflops):
    assert hardware.peak_flops(kind, "bfloat16") == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        "",
        "NVIDIA H100",
        "NVIDIA H100 NVL",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "TPU v9",
        "nvidia h200",
        "NVIDIA GeForce RTX 4090",
    ],
)
def test_an_unknown_device_has_no_peak(kind):
    assert hardware.find_chip(kind) is None
    assert hardware.peak_flops(kind, "bfloat16") is None


@pytest.mark.parametrize("dtype", ["float32", "float64", "float8_e4m3fn"])
def test_a_type_that_the_table_does_not_hold_has_no_peak(dtype):
    assert hardware.peak_flops("NVIDIA H200", dtype) is None


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_every_column_is_read_in_its_unit(tmp_path, suffix):
    """GB are 10^9 bytes, as datasheets print them, TFLOP 10^12 and microseconds 10^-6 seconds."""
    path = tmp_path / f"chips{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(EVERY_COLUMN))
    else:
        path.write_text("\n".join(",".join(part) for part in zip(*EVERY_COLUMN.items())) + "\n")
    (chip,) = hardware.read_chips(path)
    expected = {
        "name": "X1",
        "vendor": "Nobody",
        "year": 2031,
        "device_kinds": ("NVIDIA X1", "X1 PCIe"),
        "generation": "sm90",
        "bf16_flops_per_second": 3e12,
        "memory_bytes": 5_000_000_000,
        "memory_bytes_per_second": 7e9,
        "confidence": "seen",
        "notes": "no such chip",
        "fp8_flops_per_second": 11e12,
        "fp4_flops_per_second": 13e12,
        "matmul_fraction": 0.17,
        "memory_fraction": 0.19,
        "cores": 23,
        "host_bytes_per_second": 29e9,
        "package_devices": 31,
        "package_bytes_per_second": 37e9,
        "node_devices": 41,
        "node_bytes_per_second": 43e9,
        "node_bus_bytes_per_second": 47e9,
        "node_mesh": True,
        "node_latency_seconds": 53e-6,
        "torus_axes": 2,
        "torus_bytes_per_second": 61e9,
        "pod_shape": (67, 71),
        "wrap_shape": (61, 59),
        "network_bytes_per_second": 73e9,
        "network_latency_seconds": 79e-6,
        "tdp_watts": 83,
        "system_watts": 89,
        "usd_per_hour": 9.7,
    }
    for name, value in vars(chip).items():
        exact = not isinstance(value, float)
        assert value == (expected[name] if exact else pytest.approx(expected[name], rel=1e-15))
    assert set(EVERY_COLUMN) == set(TABLE.read_text().splitlines()[0].split(","))


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("bf16_tflops", "-989", "'-989' is not a number above 0"),
        ("memory_gb", "0", "'0' is not a number above 0"),
        ("memory_gb_per_second", "inf", "'inf' is not a number above 0"),
        ("network_gb_per_second", "1e300", "'1e300' is not a number of at least 0"),
        ("cores", "9" * 400, "'9{400}' is not a whole number of at least 0"),
        ("network_gb_per_second", "nan", "'nan' is not a number of at least 0"),
        ("fp8_tflops", "fast", "'fast' is not a number of at least 0"),
        ("cores", "1.5", "'1.5' is not a whole number of at least 0"),
        ("node_devices", "0", "'0' is not a whole number above 0"),
        ("matmul_fraction", "80", "'80' is not a number above 0 and at most 1"),
        ("pod_shape", "16x-16", "'16x-16' is not the sides of a torus"),
        ("pod_shape", "", "'' has 0 sides and torus_axes is 2; give both"),
        ("pod_shape", "16x16x16", "'16x16x16' has 3 sides and torus_axes is 2"),
        ("wrap_shape", "", "'' has 0 sides and torus_axes is 2"),
    ],
)
def test_what_is_no_figure_of_a_device_is_refused(tmp_path, column, value, said):
    path = tmp_path / "chip.json"
    path.write_text(json.dumps(EVERY_COLUMN | {column: value}))
    with pytest.raises(ValueError, match=f"chip.json: {column} = {said}"):
        hardware.read_chips(path)
    path.write_text(json.dumps(EVERY_COLUMN | {"fp8_tflops": 0, "fp4_tflops": None}))
    (chip,) = hardware.read_chips(path)
    assert chip.fp8_flops_per_second == chip.fp4_flops_per_second == 0


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "a.json is not JSON: "),
        ("a.json", "[]", "a.json has to be one JSON object"),
        ("a.csv", "name,vendor\nX,Y,3\n", "a.csv: row 1 has more cells than the header"),
        ("a.csv", "name,vendor\nX\n", "a.csv: no 'generation'"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        hardware.read_chips(path)


def test_a_device_kind_belongs_to_one_chip():
    kinds = [kind for chip in hardware.chips() for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))
    assert all(kind and kind == kind.strip() for kind in kinds)


@pytest.mark.parametrize("chip", hardware.chips(), ids=lambda chip: chip.name)
def test_figures_have_the_right_order_of_magnitude(chip):
    assert chip.confidence in ("seen", "memory", "seen+memory")
    assert 10e12 < chip.bf16_flops_per_second < 10e15
    assert 10e9 < chip.memory_bytes < 500e9
    # Operations per byte of memory traffic: all training chips lie between these.
    assert 100 < chip.bf16_flops_per_second / chip.memory_bytes_per_second < 650


@pytest.mark.parametrize(
    ("dtype", "name", "instead"),
    [
        ("float8", "A100-80", "''"),
        ("float8", "MI300X", "''"),
        ("float8", "TPUv5p", "'int8' or ''"),
        ("int8", "TPUv4", "''"),
        ("int8", "H100-SXM", "'float8' or ''"),
    ],
)
def test_matmuls_of_8_bits_are_refused_where_they_are_no_faster(dtype, name, instead):
    chip = next(chip for chip in hardware.chips() if chip.name == name)
    with pytest.raises(
        ValueError, match=f"{dtype!r} on {name}, .* model.matmul_dtype = {instead}$"
    ):
        hardware.check_matmul_units(dtype, chip.generation, name)


def test_matmuls_of_8_bits_are_for_chips_that_have_a_higher_peak():
    for generations in hardware.MATMUL_UNITS.values():
        for chip in hardware.chips():
            faster = chip.fp8_flops_per_second > 1.8 * chip.bf16_flops_per_second
            assert faster or chip.generation not in generations
