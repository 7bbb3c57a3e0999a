"""Matmuls of 8 bits: their errors are those of rounding the operands, and no more."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.config.model import ModelConfig
from jaxscale.config.remat_policy import parse_remat
from jaxscale.models.block import MLP
from jaxscale.models.weights import Weights
from jaxscale.ops.matmul import scaled_float8
from jaxscale.ops.tensor_parallel import columns, linear, rows
from jaxscale.training.remat import rematerialised
from tests.ops.programs import equations

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
BITS = {E4M3: 3, E5M2: 2}
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@functools.cache
def three_matmuls(dtype):
    """(operands, result) of x w, dy w^T and x^T dy, each [A, C] x [C, O]. Sizes of activations and
    gradients are unlike those of a normal distribution's: exponents of all kinds."""
    x, w, dy = normal(0, 2, 96, 160), normal(1, 160, 224) / 13, normal(2, 2, 96, 224)
    x, dy = x * np.exp(normal(3, *x.shape)), 1e-6 * dy * np.exp(normal(4, *dy.shape))
    y, backward = jax.vjp(functools.partial(linear, dtype=dtype), x, w)
    dx, dw = jax.jit(backward)(dy)
    x, dy, y, dx = (array.reshape(-1, array.shape[-1]) for array in (x, dy, y, dx))
    found = ((x, w), y), ((dy, w.T), dx), ((x.T, dy), dw)
    return [
        [[np.asarray(one, np.float64) for one in operands], np.asarray(result, np.float64)]
        for operands, result in found
    ]


def check_errors(operands, result, rounding):
    """A rounding errs by a number between plus and minus half a unit, with a variance of unit^2 /
    12. Errors of the terms of a sum are independent: their variances add up."""
    x, y = operands
    of_x, of_y = rounding
    expected = of_x @ y**2 + x**2 @ of_y + of_x @ of_y
    measured = (result - x @ y) ** 2
    np.testing.assert_allclose(measured.mean(), expected.mean(), rtol=0.1)


@pytest.mark.proof
def test_errors_of_float8_are_those_of_rounding():
    """Half a unit in the last place: 2^-4 of an element at most in e4m3, 2^-3 in e5m2. So are they
    for every element of the results, by the triangle inequality."""
    types = (E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)
    for (operands, result), those in zip(three_matmuls("float8"), types):
        units, most = [], []
        for array, dtype in zip(operands, those):
            scale = 2 ** np.floor(np.log2(float(jnp.finfo(dtype).max) / np.abs(array).max()))
            exponent = np.floor(np.log2(np.abs(array) * scale))
            unit = np.maximum(2.0 ** (exponent - BITS[dtype]), SMALLEST[dtype]) / scale
            units.append(unit**2 / 12)
            most.append(np.maximum(2.0 ** -(BITS[dtype] + 1) * np.abs(array), unit / 2))
        check_errors(operands, result, units)
        x, y = map(np.abs, operands)
        bound = most[0] @ y + x @ most[1] + most[0] @ most[1]
        assert np.all(np.abs(result - operands[0] @ operands[1]) < bound + 1e-6 * x @ y)


@pytest.mark.proof
def test_errors_of_int8_are_those_of_rounding():
    """A step is a 127th of the largest element along what is contracted; a weight's gradient has
    operands in float32."""
    forward, input_gradient, weight_gradient = three_matmuls("int8")
    for operands, result in (forward, input_gradient):
        steps = [np.abs(a).max(1 - i, keepdims=True) / 127 for i, a in enumerate(operands)]
        spread = [np.broadcast_to(s**2 / 12, a.shape) for s, a in zip(steps, operands)]
        check_errors(operands, result, spread)
    (x, dy), dw = weight_gradient
    assert np.all(np.abs(dw - x @ dy) <= 2.0**-20 * np.abs(x) @ np.abs(dy))


@pytest.mark.proof
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_an_element_rounds_as_it_would_among_others(dtype):
    """Power-of-two scales: what another layout scales together rounds to the same numbers, unless
    elements are below the type's smallest normal number."""
    x = normal(0, 64, 64) * np.exp(2 * normal(1, 64, 64))
    x[0, 0] = 3.1 * np.abs(x).max()  # only in the whole

    def rounded(x):
        values, inverse = scaled_float8(jnp.asarray(x), dtype)
        return np.asarray(values.astype(jnp.float32) * inverse), float(inverse)

    (whole, step), (part, finer) = rounded(x), rounded(x[32:])
    assert step > finer
    assert np.log2(step) == round(np.log2(step))
    normals = np.abs(x[32:]) >= float(jnp.finfo(dtype).smallest_normal) * step
    assert normals.mean() > 0.5
    np.testing.assert_array_equal(whole[32:][normals], part[normals])
    assert np.abs(whole[32:] - x[32:])[~normals].max(initial=0) <= SMALLEST[dtype] / 2 * step
    assert float(jnp.finfo(dtype).max) / 2 < np.abs(x).max() / step <= float(jnp.finfo(dtype).max)


@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_zeros_are_exact_and_what_is_not_finite_stays_so(dtype):
    x, w = normal(0, 3, 8), normal(1, 8, 5)
    run = jax.jit(functools.partial(linear, dtype=dtype))
    np.testing.assert_array_equal(run(0 * x, w), 0)
    np.testing.assert_array_equal(run(x, 0 * w), 0)
    for bad in (np.inf, np.nan):
        assert not np.isfinite(run(x, np.where(w == w[2, 3], bad, w))[:, 3]).any()
        assert not np.isfinite(run(np.where(x == x[1, 2], bad, x), w)[1]).any()


@pytest.mark.parametrize("remat", ["none", "full", "save_matmuls"])
def test_a_weight_is_read_for_its_scale_in_the_forward_pass_alone(remat):
    """Those of an MLP, whose last matmul is recomputed under any policy."""
    config, key = ModelConfig(d_model=24, d_ff=40), jax.random.key(0)
    graph, params = nnx.split(nnx.eval_shape(lambda: MLP(config, Weights(config, key))), nnx.Param)
    kernels = [functools.partial(one, dtype="float8") for one in (columns, rows)]

    def layer(params, x):
        return nnx.merge(graph, params)(x, *kernels)

    def loss(params, x):
        return rematerialised(layer, parse_remat(remat))(params, x).sum()

    x = jax.ShapeDtypeStruct((1, 16, 24), jnp.float32)
    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, x).jaxpr
    maxima = (one for one, _ in equations(program) if one.primitive.name == "reduce_max")
    shapes = collections.Counter(one.invars[0].aval.shape for one in maxima)
    assert (shapes[24, 40], shapes[40, 24]) == (2, 1)  # up and gate, and down
