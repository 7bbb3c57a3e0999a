"""Every layout gives the same loss, gradient norm and parameters as one device."""

import functools
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.invariants.layouts import GPT, LLAMA, make_config, open_engine, relative_error, run

INVOLUNTARY = "Involuntary full rematerialization"

FACTORISATIONS = [
    {"data": data, "fsdp": fsdp, "tensor": 8 // (data * fsdp)}
    for data, fsdp in itertools.product((1, 2, 4, 8), repeat=2)
    if data * fsdp <= 8
]
"""All ordered ways to write 8 as data x fsdp x tensor."""


def every_layout():
    """Every factorisation with every ZeRO stage that it can tell apart.

    Micro-batches and remat take turns, so that each meets each stage and each axis.
    """
    turns = itertools.cycle([(1, "none"), (2, "full"), (1, "full"), (2, "none")])
    for axes in FACTORISATIONS:
        for stage in range(4) if axes["fsdp"] > 1 else (3,):
            microbatches, remat = next(turns)
            yield {**axes, "zero_stage": stage, "microbatches": microbatches, "remat": remat}


def name(layout: dict) -> str:
    return "-".join(f"{key}{value}" for key, value in layout.items())


@functools.cache
def one_device(family: str, dtype: str = "float64"):
    model = {"llama": LLAMA, "gpt": GPT}[family]
    return run(open_engine(make_config(model, {}, dtype)))


@pytest.mark.parametrize("layout", list(every_layout()), ids=name)
def test_every_layout_is_one_device_in_float64(layout, capfd):
    losses, norms, params = run(open_engine(make_config(LLAMA, layout)))
    expected_losses, expected_norms, expected_params = one_device("llama")
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10, atol=0)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-10, atol=0)
    assert relative_error(params, expected_params) < 1e-10
    assert np.all(expected_norms > 0.5), "clipping must act for this to test it"
    assert INVOLUNTARY not in capfd.readouterr().err


@pytest.mark.parametrize(
    "layout",
    [
        {"fsdp": 2, "tensor": 4, "zero_stage": 3, "microbatches": 4},
        {"data": 2, "fsdp": 2, "tensor": 2, "zero_stage": 2, "remat": "full"},
        {"data": 4, "tensor": 2, "zero_stage": 0, "microbatches": 2},
        {"data": 2, "fsdp": 4, "zero_stage": 1},
    ],
    ids=name,
)
def test_a_tied_gpt_is_one_device_in_float64(layout, capfd):
    losses, norms, params = run(open_engine(make_config(GPT, layout)))
    expected_losses, expected_norms, expected_params = one_device("gpt")
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10, atol=0)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-10, atol=0)
    assert relative_error(params, expected_params) < 1e-10
    assert INVOLUNTARY not in capfd.readouterr().err


@pytest.mark.parametrize("optimizer", ["adafactor", "lion", "muon"])
def test_every_optimizer_is_one_device_in_float64(optimizer):
    one = run(open_engine(make_config(LLAMA, {}, name=optimizer)))
    layout = {"data": 2, "fsdp": 2, "tensor": 2, "zero_stage": 2}
    losses, norms, params = run(open_engine(make_config(LLAMA, layout, name=optimizer)))
    np.testing.assert_allclose(losses, one[0], rtol=1e-10, atol=0)
    np.testing.assert_allclose(norms, one[1], rtol=1e-10, atol=0)
    assert relative_error(params, one[2]) < 1e-10


@pytest.mark.parametrize(
    "layout",
    [
        {"fsdp": 8, "zero_stage": 3},
        {"tensor": 8},
        {"data": 2, "fsdp": 2, "tensor": 2, "zero_stage": 3, "microbatches": 2},
        {"context": 2, "fsdp": 2, "tensor": 2},
    ],
    ids=name,
)
def test_a_layout_adds_no_more_error_in_bfloat16_than_bfloat16_itself(layout):
    """A layout changes the order of sums, and rounds partial sums over tensor once more. That may
    move losses and norms at most twice as far from those in float64 as bfloat16 on one device
    does, at its farthest in five steps."""
    losses, norms, _ = run(open_engine(make_config(LLAMA, layout, "bfloat16")))
    own_losses, own_norms, _ = one_device("llama", "bfloat16")
    true_losses, true_norms, _ = one_device("llama")
    own = np.max(np.abs(own_losses - true_losses)), np.max(np.abs(own_norms / true_norms - 1))
    assert own[0] < 0.02, "of losses near 5.7: bfloat16 has 8 bits"
    assert np.max(np.abs(losses - true_losses)) < 2 * own[0]
    assert np.max(np.abs(norms / true_norms - 1)) < 2 * own[1]


def test_the_compiler_says_when_it_replicates(capfd):
    """The tests above would notice an involuntary rematerialisation: this program has one."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    before = NamedSharding(mesh, PartitionSpec("a", "b", "c"))
    after = NamedSharding(mesh, PartitionSpec(("c", "b", "a")))
    x = jax.ShapeDtypeStruct((16, 16, 16), np.float32)
    jax.jit(lambda x: x + 1, in_shardings=before, out_shardings=after).lower(x).compile()
    assert INVOLUNTARY in capfd.readouterr().err
