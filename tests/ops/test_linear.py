"""Products with weights: values and gradients are those of einsum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops.linear import linear


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

    def ours(x, weight):
        return jnp.sum(jnp.sin(linear(x, weight, contracted=contracted)))

    def plain(x, weight):
        return jnp.sum(jnp.sin(jnp.einsum(equation, x, weight)))

    np.testing.assert_allclose(ours(x, weight), plain(x, weight), rtol=1e-12)
    for got, wanted in zip(jax.grad(ours, (0, 1))(x, weight), jax.grad(plain, (0, 1))(x, weight)):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_gradients_of_a_bfloat16_product_are_rounded_once():
    """A sum of 4,096 products, in bfloat16 to its own precision: it is accumulated in float32."""
    x = jax.random.normal(jax.random.key(0), (4096, 3)).astype(jnp.bfloat16)
    weight = jnp.zeros((3, 2), jnp.bfloat16)
    dy = jax.random.normal(jax.random.key(1), (4096, 2)).astype(jnp.bfloat16)
    (got,) = jax.vjp(lambda weight: linear(x, weight), weight)[1](dy)
    wanted = np.asarray(x, np.float64).T @ np.asarray(dy, np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=2**-8, atol=2**-4)
