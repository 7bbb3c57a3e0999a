"""Rows of a spread table: values and gradients are those of indexing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxscale.ops.embedding import spread_lookup


@pytest.mark.proof(but=("None-time3", "None-time2", "tensor-time0"))
@pytest.mark.parametrize(
    ("rows", "time"),
    [
        ("tensor", ("context", "tensor")),
        ("tensor", ("tensor",)),
        (None, ("context", "tensor")),
        (None, ("context",)),
    ],
)
def test_a_spread_lookup_is_indexing(rows, time):
    mesh = jax.make_mesh((1, 2, 4), ("fsdp", "context", "tensor"), axis_types=(AxisType.Auto,) * 3)
    table = jax.random.normal(jax.random.key(0), (12, 8))
    indices = jax.random.randint(jax.random.key(1), (3, 16), 0, 12)
    cotangent = jax.random.normal(jax.random.key(2), (3, 16, 8))

    def ours(table, indices):
        how = {"rows": rows, "time": time, "axes": ("context", "tensor")}
        return spread_lookup(table, indices, table.dtype, **how, scatters=len(time) == 2)

    def with_gradient(lookup):
        def run(table, indices, cotangent):
            x, pullback = jax.vjp(lambda table: lookup(table, indices), table)
            return x, pullback(cotangent)[0]

        return run

    run = jax.shard_map(
        with_gradient(ours),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        axis_names={"fsdp"},
        check_vma=False,
    )
    got = jax.jit(run)(table, indices, cotangent)
    wanted = with_gradient(lambda table, indices: table[indices])(table, indices, cotangent)
    for one, other in zip(got, wanted):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)
    assert got[0].dtype == jnp.float64
