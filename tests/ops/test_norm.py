"""Norms: against plain NumPy, in every type, and what they keep for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops.norm import layer_norm, rms_norm


def numpy_rms_norm(x, scale, bias, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def numpy_layer_norm(x, scale, bias, eps):
    deviation = x - x.mean(-1, keepdims=True)
    return deviation / np.sqrt(x.var(-1, keepdims=True) + eps) * scale + bias


NORMS = [
    (lambda x, scale, bias, eps: rms_norm(x, scale, eps=eps), numpy_rms_norm),
    (lambda x, scale, bias, eps: layer_norm(x, scale, bias, eps=eps), numpy_layer_norm),
]


def arguments(shape, seed=0):
    rng = np.random.default_rng(seed)
    return 3 + 2 * rng.normal(size=shape), rng.normal(size=shape[-1]), rng.normal(size=shape[-1])


@pytest.mark.proof(but=("shape0-layer", "shape1-layer", "shape2-layer"))
@pytest.mark.parametrize(("norm", "numpy_norm"), NORMS, ids=["rms", "layer"])
@pytest.mark.parametrize("shape", [(7,), (2, 3, 8), (2, 3, 4, 16)])
def test_norm_is_the_formula_over_the_last_dimension(norm, numpy_norm, shape):
    x, scale, bias = arguments(shape)
    np.testing.assert_allclose(
        norm(jnp.asarray(x), scale, bias, 1e-3), numpy_norm(x, scale, bias, 1e-3), rtol=1e-13
    )


@pytest.mark.proof(but=("float32-layer", "float32-rms", "bfloat16-layer"))
@pytest.mark.parametrize(("norm", "numpy_norm"), NORMS, ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_statistics_are_wider_than_bfloat16_and_the_type_is_kept(norm, numpy_norm, dtype):
    x, scale, bias = (jnp.asarray(value, dtype) for value in arguments((4, 512)))
    got = norm(x, scale, bias, 1e-5)
    exact = numpy_norm(*(np.asarray(value, np.float64) for value in (x, scale, bias)), 1e-5)
    assert got.dtype == dtype
    # Only the result is rounded to bfloat16; what is before has at least float32's rounding.
    rounding = float(jnp.finfo(dtype).eps)
    wide = min(rounding, float(jnp.finfo(jnp.float32).eps))
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=rounding, atol=16 * wide)


@pytest.mark.proof
@pytest.mark.parametrize(("norm", "numpy_norm"), NORMS, ids=["rms", "layer"])
def test_gradients_are_those_of_finite_differences(norm, numpy_norm):
    x, scale, bias = arguments((3, 5))
    weights = np.random.default_rng(1).normal(size=(3, 5))
    grads = jax.grad(lambda *args: jnp.sum(weights * norm(*args, 1e-5)), (0, 1, 2))(x, scale, bias)
    values, step = [x, scale, bias], 1e-6
    for which, grad in enumerate(grads):
        for index in np.ndindex(values[which].shape):
            ends = []
            for sign in (1, -1):
                moved = [value.copy() for value in values]
                moved[which][index] += sign * step
                ends.append((weights * numpy_norm(*moved, 1e-5)).sum())
            assert grad[index] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-7)


def test_only_the_arguments_are_kept_for_the_backward_pass():
    x = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)
    scale = bias = jax.ShapeDtypeStruct((64,), jnp.float32)
    for norm, args in ((rms_norm, (x, scale)), (layer_norm, (x, scale, bias))):
        pullback = jax.eval_shape(lambda *args, norm=norm: jax.vjp(norm, *args)[1], *args)
        kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))
        assert kept <= sum(leaf.size * leaf.dtype.itemsize for leaf in args)
