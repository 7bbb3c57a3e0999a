"""Matmuls with weights: values and gradients are those of einsum."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxscale.compiled.topology import compiler_installed, open_topology
from jaxscale.ops.collective_matmul import matmuls_scatter
from jaxscale.ops.matmul import quantised_weight
from jaxscale.ops.tensor_parallel import Spread, columns, linear, rows, spread_columns, spread_rows
from jaxscale.training.xla_options import FLOAT8
from tests.ops.programs import equations

gpu = pytest.mark.skipif(
    not compiler_installed("gpu"), reason="no compiler for GPUs: uv sync --inexact --extra aot"
)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("x_shape", "weight_shape", "contracted", "equation"),
    [
        ((2, 3, 4), (4, 5), 1, "btd,df->btf"),
        ((2, 3, 4), (4, 5, 6), 1, "btd,dnh->btnh"),
        ((2, 3, 4, 5), (4, 5, 6), 2, "btnh,nhd->btd"),
    ],
)
def test_linear_is_einsum(x_shape, weight_shape, contracted, equation):
    keys = jax.random.split(jax.random.key(0), 2)
    x, weight = jax.random.normal(keys[0], x_shape), jax.random.normal(keys[1], weight_shape)

    def ours(platform, x, weight):
        return jnp.sum(jnp.sin(linear(x, weight, contracted=contracted, platform=platform)))

    def plain(x, weight):
        return jnp.sum(jnp.sin(jnp.einsum(equation, x, weight)))

    functions = (plain, functools.partial(ours, "gpu"), functools.partial(ours, "cpu"))
    all_ = [jax.value_and_grad(function, (0, 1)) for function in functions]
    wanted, *got = jax.jit(lambda *args: [function(*args) for function in all_])(x, weight)
    for one in got:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), one, wanted)


@pytest.mark.proof(but=("float8-shapes1-6",))
@pytest.mark.parametrize(
    ("shapes", "matmuls"), [([(16, 4, 8), (16, 1, 8), (16, 1, 8)], 3 + 2), ([(16, 24)] * 2, 2 + 4)]
)
@pytest.mark.parametrize("dtype", ["", "float8"])
def test_narrow_columns_have_their_gradients_side_by_side(shapes, matmuls, dtype):
    keys = iter(jax.random.split(jax.random.key(0), 1 + 2 * len(shapes)))
    x = jax.random.normal(next(keys), (2, 12, 16))
    weights = tuple(jax.random.normal(next(keys), shape) for shape in shapes)
    dys = tuple(jax.random.normal(next(keys), (2, 12, *shape[1:])) for shape in shapes)

    def run(side_by_side, x, weights, dys):
        ours = functools.partial(columns, dtype=dtype, side_by_side=side_by_side)
        ys, pullback = jax.vjp(ours, x, weights)
        return ys, pullback(dys)

    together = functools.partial(run, True)
    got, wanted = together(x, weights, dys), run(False, x, weights, dys)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12), got, wanted)
    if dtype:  # the same of weights that are quantised before
        prepared = tuple(quantised_weight(weight, 1) for weight in weights)
        ys, (dx, dweights) = together(x, prepared, dys)
        got = ys, (dx, tuple(grad.weight for grad in dweights))
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
        some = (prepared[0], *weights[1:])  # a custom model may name one of them only
        np.testing.assert_array_equal(together(x, some, dys)[1][0], wanted[1][0])
    traced = jax.make_jaxpr(together)(x, weights, dys).jaxpr
    names = [one.primitive.name for one, _ in equations(traced)]
    assert names.count("dot_general") == matmuls
    if matmuls == 5 and not dtype:  # one sum in float32, rounded once
        narrow, exact = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (x, weights, dys)), []
        for weight, dy in zip(*jax.tree.map(lambda x: np.asarray(x, np.float64), narrow[1:])):
            exact.append(np.tensordot(dy, weight, (range(2, dy.ndim), range(1, weight.ndim))))
        of_x = np.asarray(together(*narrow)[1][0], np.float64)
        np.testing.assert_allclose(of_x, sum(exact), rtol=2**-8, atol=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("platform", ["", "cpu"])
def test_gradients_of_a_bfloat16_matmul_are_rounded_once(platform):
    """A sum of 4,096 terms in bfloat16 is accurate to its precision: accumulated in float32."""
    x = jax.random.normal(jax.random.key(0), (4096, 3)).astype(jnp.bfloat16)
    weight = jnp.zeros((3, 2), jnp.bfloat16)
    dy = jax.random.normal(jax.random.key(1), (4096, 2)).astype(jnp.bfloat16)
    (got,) = jax.vjp(lambda weight: linear(x, weight, platform=platform), weight)[1](dy)
    wanted = np.asarray(x, np.float64).T @ np.asarray(dy, np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=2**-8, atol=2**-4)


@pytest.mark.proof
@gpu
def test_on_a_gpu_float8_transposes_no_weights_of_all_layers():
    """Two stacks of 16 MiB in float32, which XLA would otherwise transpose before the loop."""
    place = SingleDeviceSharding(open_topology("h100:1x1").devices[0])
    shapes = (8, 512, 1024), (8, 1024, 512), (1024, 512)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place) for shape in shapes]

    def layer(x, weights):
        for weight in weights:
            x = linear(x, weight.astype(x.dtype), dtype="float8", platform="gpu")
        return x, None

    def run(up, down, x):
        return jax.lax.scan(layer, x.astype(jnp.bfloat16), (up, down))[0]

    compiled = jax.jit(run).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**24


@pytest.mark.proof
@gpu
def test_on_a_gpu_sums_of_float8_gradients_are_precise():
    """cuBLAS has all three matmuls, and both operands' precision is DEFAULT in the forward one
    alone: that is where XLA asks for fast accumulation."""
    place = SingleDeviceSharding(open_topology("h100:1x1").devices[0])
    shapes = (256, 128), (128, 512), (256, 512)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]

    def run(x, weight, dy):
        y, pullback = jax.vjp(functools.partial(linear, dtype="float8", platform="gpu"), x, weight)
        return y, pullback(dy)

    options = {flag.name: flag.value for flag in FLOAT8}
    text = jax.jit(run).lower(*args).compile(compiler_options=options).as_text()
    calls = [one for one in text.splitlines() if 'target="__cublas$lt$matmul$f8"' in one]
    precise = {
        re.findall(r"bf16\[\d+,\d+\]", one)[0]: one.count('"HIGHEST","HIGHEST"') for one in calls
    }
    assert precise == {"bf16[256,512]": 0, "bf16[256,128]": 1, "bf16[128,512]": 1}


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_cpu_a_weights_gradient_repeats_no_elementwise_work(dtype):
    """XLA for CPUs multiplies in the loop that transposes, where it is not asked otherwise. And in
    bfloat16 no operand is widened, as it would be for a matmul that reads it by columns."""
    shapes = (4, 64, 96), (96, 32), (4, 64, 32)
    args = [jnp.zeros(shape, dtype) for shape in shapes]

    def compiled(platform):
        def gradient(x, weight, dy):
            of_weight = functools.partial(linear, x * x, platform=platform)
            return jax.vjp(of_weight, weight)[1](dy)

        return jax.jit(gradient).lower(*args).compile().as_text()

    def repeats(text):
        return any(" transpose(" in one and " multiply(" in one for one in text.split("\n\n"))

    assert repeats(compiled(platform=""))
    assert not repeats(text := compiled(platform="cpu"))
    assert dtype == "float32" or "f32[256,32]" not in text


def mesh_of(*sizes):
    names = ("fsdp", "context", "tensor")[-len(sizes) :]
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


@functools.cache
def spread_mlp(ranks, **settings):
    """(values and gradients, what they should be, how often each collective runs) of two matmuls
    out of the stream and one back, on 2 x `ranks` ranks of context and tensor."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (2, 12, 6), (6, 12, 3), (6, 12, 3), (12, 3, 6)
    args = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]
    mesh = mesh_of(1, 2, ranks)
    spread = Spread("tensor", ("context",), ("context", "tensor"), **settings)

    def mlp(columns, rows, x, up, gate, down):
        one, other = columns(x, (up, gate))
        return jnp.sum(jnp.cos(rows(jnp.sin(one) * other, down)))

    ours = functools.partial(
        mlp,
        functools.partial(spread_columns, spread=spread),
        functools.partial(spread_rows, spread=spread),
    )
    ours = jax.value_and_grad(ours, (0, 1, 2, 3))
    ours = jax.jit(
        jax.shard_map(
            ours, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"fsdp"}, check_vma=False
        )
    )
    names = [one.primitive.name for one, _ in equations(jax.make_jaxpr(ours)(*args).jaxpr)]
    plain = (functools.partial(one, dtype=spread.dtype) for one in (columns, rows))
    wanted = jax.jit(jax.value_and_grad(functools.partial(mlp, *plain), (0, 1, 2, 3)))
    return ours(*args), wanted(*args), collections.Counter(names)


@pytest.mark.proof(but=("3-settings1", "2-settings3"))
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, {}), (3, {"ring": True}), (3, {"ring": True, "dtype": "float8"}), (2, {"dtype": "int8"})],
)
def test_spread_matmuls_are_the_matmuls(ranks, settings):
    """Of 8 bits too: ranks that have other scales round the same way, or find the same scales."""
    got, wanted, _ = spread_mlp(ranks, **settings)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_spread_matmuls_gather_and_scatter_once_each_way():
    """Forward: one gather before the two matmuls, one scatter after the third. Backward the same
    for gradients, and the stream again, since only its parts were saved."""
    _, _, counts = spread_mlp(2)
    assert counts["all_gather"] == 1 + 2
    assert counts["reduce_scatter"] == 1 + 1
    assert counts["psum"] == counts["psum_invariant"] == 0


def test_ring_steps_send_as_much():
    """A chunk to each other rank, in place of each of those gathers and scatters."""
    _, _, counts = spread_mlp(3, ring=True)
    assert counts["ppermute"] == (1 + 2 + 1 + 1) * (3 - 1)
    assert counts["all_gather"] == counts["reduce_scatter"] == 0


@pytest.mark.proof
def test_sums_that_travel_in_bfloat16_are_rounded_once_a_rank():
    """A rounding of s errs by a number between plus and minus half of s's unit in the last place,
    with a variance of unit^2 / 12, and errors of several roundings add up as those do: here of the
    four and three sums that travel to a rank, and of their sum with its own part. Matmuls that
    were rounded too would make it 1.3 times as much."""
    ranks, size, width = 8, 64, 32
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (1, ranks * size, ranks * width)).astype(jnp.bfloat16)
    weight = jax.random.normal(keys[1], (ranks * width, 16)).astype(jnp.bfloat16)
    run = jax.shard_map(
        lambda x, weight: matmuls_scatter([x], [weight], "tensor", 1),
        mesh=mesh_of(ranks),
        in_specs=(P(None, None, "tensor"), P("tensor")),
        out_specs=P(None, "tensor"),
    )
    got = np.asarray(jax.jit(run)(x, weight), np.float64)[0].reshape(ranks, size, -1)
    by_rank = [
        np.asarray(array, np.float64).reshape(shape)
        for array, shape in ((x, (ranks, size, ranks, width)), (weight, (ranks, width, -1)))
    ]
    parts = np.einsum("otrw,rwd->ortd", *by_rank)  # of the chunk of o, by r
    around = [np.roll(parts[owner], -owner, axis=0) for owner in range(ranks)]
    parts = np.stack(around, 1)  # [r - o, o, size, D]
    rounded = [
        *np.cumsum(parts[4:], axis=0),  # down from a distance of 4: o + 4 to o + 7
        *np.cumsum(parts[3:0:-1], axis=0),
        parts.sum(0),
    ]
    units = [2.0 ** (np.floor(np.log2(np.abs(one))) - 7) for one in rounded]
    expected = np.mean(sum(unit**2 for unit in units)) / 12
    np.testing.assert_allclose(np.mean((got - parts.sum(0)) ** 2), expected, rtol=0.1)
