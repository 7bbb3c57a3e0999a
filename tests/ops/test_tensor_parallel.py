"""Products with weights: values and gradients are those of einsum."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxscale.ops.tensor_parallel import Spread, columns, linear, rows, spread_columns, spread_rows


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


@pytest.fixture(scope="module")
def spread_mlp():
    """(values and gradients, what they should be, how often each collective runs) of two products
    out of the stream and one back, on 2 x 2 ranks of context and tensor."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (2, 8, 6), (6, 4, 3), (6, 4, 3), (4, 3, 6)
    args = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]
    mesh = jax.make_mesh(
        (1, 2, 2),
        ("fsdp", "context", "tensor"),
        axis_types=(AxisType.Auto,) * 3,
        devices=jax.devices()[:4],
    )
    spread = Spread("tensor", ("context",), ("context", "tensor"))

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
    names = [equation.primitive.name for equation in _equations(jax.make_jaxpr(ours)(*args).jaxpr)]
    wanted = jax.value_and_grad(functools.partial(mlp, columns, rows), (0, 1, 2, 3))
    return ours(*args), wanted(*args), collections.Counter(names)


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(tuple(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def test_spread_products_are_the_products(spread_mlp):
    got, wanted, _ = spread_mlp
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_spread_products_gather_and_scatter_once_each_way(spread_mlp):
    """Forward: one gather before the two products, one scatter after the third. Backward the same
    of gradients, and the stream once more, since only its parts were kept."""
    _, _, counts = spread_mlp
    assert counts["all_gather"] == 1 + 2
    assert counts["reduce_scatter"] == 1 + 1
    assert counts["psum"] == counts["psum_invariant"] == 0
