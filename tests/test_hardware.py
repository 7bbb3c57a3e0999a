"""The table of chips: exact names only, plausible figures."""

import pytest

from jaxscale import hardware


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
