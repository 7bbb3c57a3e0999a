"""Matmuls and attention: measured rates, and how they depend on sizes."""

import numpy as np
import pytest

from jaxscale.planner.cost import kernels
from jaxscale.planner.cost.cluster import make_cluster

H100, A100, V5P = make_cluster("h100", 8), make_cluster("a100-80", 8), make_cluster("v5p", 8)


def rate(machine, m, n, k, matmul="bfloat16"):
    seconds = kernels.matmul_seconds(machine, m, n, k, matmul=matmul)
    return 2 * m * n * k / seconds / machine.peak_flops(matmul)


def test_large_matmuls_reach_the_sustained_share_of_the_best():
    best = H100.chip.matmul_fraction * kernels.SUSTAINED["sm90"]
    assert 0.93 * best < rate(H100, 16384, 16384, 16384) < best
    best = V5P.chip.matmul_fraction * kernels.COMPILED
    assert rate(V5P, 16384, 16384, 16384) == pytest.approx(best)


def test_short_matmuls_lose_what_was_measured():
    """XLA's table for H100, 4 x [2048, k] x [k, 4096]: 459, 689 and 802 TFLOP/s."""
    measured = {256: 459, 1024: 689, 4096: 802}
    got = {k: rate(H100, 8192, 4096, k) for k in measured}
    for k, teraflops in measured.items():
        assert got[k] / got[4096] == pytest.approx(teraflops / measured[4096], rel=0.08)


def test_waves_of_tiles_are_whole():
    """One tile more than there are cores takes another wave."""
    n, k = 128, 8192
    full = kernels.matmul_seconds(A100, 256 * 108, n, k)
    more = kernels.matmul_seconds(A100, 256 * 108 + 1, n, k)
    assert more > 1.05 * full


def test_small_matmuls_wait_for_memory_and_launches():
    assert rate(H100, 8, 8192, 8192) < 0.03
    tiny = kernels.matmul_seconds(H100, 8, 8, 8)
    assert tiny >= kernels.LAUNCH_SECONDS
    assert kernels.matmul_seconds(H100, 0, 8, 8) == 0


@pytest.mark.parametrize("machine", [H100, A100, V5P])
def test_time_grows_with_every_side(machine):
    sides = 2 ** np.arange(7, 14)
    for m, n, k in ((sides, 4096, 4096), (4096, sides, 4096), (4096, 4096, sides)):
        seconds = kernels.matmul_seconds(machine, m, n, k)
        assert (np.diff(seconds) >= 0).all()


def test_half_the_bits_are_not_half_the_time():
    half = kernels.matmul_seconds(H100, 8192, 8192, 8192, matmul="fp8")
    whole = kernels.matmul_seconds(H100, 8192, 8192, 8192)
    assert 0.5 < half / whole < 0.75


@pytest.mark.parametrize(("matmul", "share"), [("bfloat16", 0.631), ("fp4", 0.597)])
def test_power_limits_blackwell_with_all_operands(matmul, share):
    """torchao's benchmark of matmuls of 8192 sides on B200."""
    b200, n = make_cluster("b200", 8), 8192
    assert rate(b200, n, n, n, matmul) == pytest.approx(share, rel=0.05)


def test_casts_reach_what_was_measured():
    """MXFP8 of [4096, 14336] on B200, both ways: 58 us."""
    b200 = make_cluster("b200", 8)
    assert kernels.cast_seconds(b200, 4096 * 14336, "fp8") == pytest.approx(58e-6, rel=0.05)
    assert kernels.cast_seconds(b200, 1.0, "bfloat16") == 0


@pytest.mark.parametrize(
    ("length", "forward", "backward"),
    [(1024, 111.7, 59.8), (2048, 136.5, 76.2), (16384, 164.3, None)],
)
def test_attention_is_faster_on_longer_sequences(length, forward, backward):
    """Triton's tutorial on A100, over its rates at 4k: 150.0 and 87.5 TFLOP/s."""
    for back, measured, at_4k in ((False, forward, 150.0), (True, backward, 87.5)):
        here, there = (kernels.flash_seconds(A100, 1e12, 64, back, n) for n in (length, 4096))
        if measured:
            assert there / here == pytest.approx(measured / at_4k, rel=0.12)


def test_attention_takes_two_matmuls_forward_and_five_backward():
    """FlashAttention-2 (arXiv 2307.08691, section 4.1): 4 s^2 d operations a head forward, and 2.5
    times that backward: scores again, and the gradients of scores, queries, keys and values."""
    s, d, heads = 4096, 128, 16
    product = 2.0 * s**2 * d * heads
    forward, backward = (
        kernels.flash_seconds(A100, 2 * product, d, back) for back in (False, True)
    )
    # At shares of 312 TFLOP/s that are of this length and head dimension.
    assert forward == pytest.approx(2 * product / (0.58 * 312e12), rel=1e-12)
    assert backward == pytest.approx(5 * product / (0.50 * 312e12), rel=1e-12)


def test_attention_takes_longer_with_small_heads_and_backward():
    forward = kernels.flash_seconds(H100, 1e12, 128)
    assert kernels.flash_seconds(H100, 1e12, 64) > forward
    # 80 elements take the place of 96.
    assert kernels.flash_seconds(H100, 80.0, 80) >= kernels.flash_seconds(H100, 96.0, 96)
    backward = kernels.flash_seconds(H100, 1e12, 128, backward=True)
    assert backward > kernels.FLASH_BACKWARD * forward
