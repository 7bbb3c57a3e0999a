"""Slices of the head: gathered as parts of the whole, their gradients summed as of the whole."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxscale.config.layout import MANUAL_AXES, MESH_AXES
from jaxscale.sharding.head_slices import finish_slices, gather_slices, slice_shapes
from jaxscale.sharding.resolve import is_axes, manual_part, spread_outer
from jaxscale.sharding.specs import PER_MANUAL_RANK, REPLICATED
from jaxscale.sharding.zero import Zero

COLUMNS = 10
AXES = {"output": ("embed", "vocab"), "tied": ("vocab", "embed"), "bias": ("vocab",)}
AXES["norm"] = ("embed",)


def arrays(d_model, leading=()):
    sizes, rng = {"embed": d_model, "vocab": COLUMNS}, np.random.default_rng(0)
    return {
        name: rng.integers(-99, 99, (*leading, *(sizes[a] for a in axes))).astype("f4")
        for name, axes in AXES.items()
    }


# Pipeline ranks divide 10 columns, 5 on a rank of tensor, with padding; d_model of 16 is divided
# over the pipeline, that of 12 not.
@pytest.mark.parametrize(
    ("sizes", "d_model", "stage"),
    [
        ({"pipeline": 4, "fsdp": 2}, 16, 1),
        ({"pipeline": 2, "fsdp": 2, "tensor": 2}, 16, 3),
        ({"pipeline": 2, "fsdp": 2, "context": 2}, 16, 3),
        ({"pipeline": 4, "data": 2}, 12, 0),
        ({"pipeline": 4, "fsdp": 2}, 12, 2),
    ],
    ids=str,
)
def test_slices_are_parts_of_the_whole_and_gradients_are_summed(sizes, d_model, stage):
    sizes = {axis: sizes.get(axis, 1) for axis in MESH_AXES}
    axes = spread_outer(AXES, sizes, d_model)
    zero = Zero(stage, sizes, axes, jnp.dtype("float32"), jnp.dtype("float32"))
    specs = jax.tree.map(
        lambda one: manual_part(zero.blocked_spec(one, zero.state_rules)), axes, is_leaf=is_axes
    )
    tensor, ranks = sizes["tensor"], sizes["pipeline"]
    share = -(-COLUMNS // (tensor * ranks))

    def part(whole, dim, rank):
        """A slice of the columns of each rank of tensor."""
        missing = share * ranks - COLUMNS // tensor
        blocks = jnp.moveaxis(whole, dim, 0).reshape(tensor, COLUMNS // tensor, -1)
        blocks = jnp.pad(blocks, [(0, 0), (0, missing), (0, 0)])
        own = jax.lax.dynamic_slice_in_dim(blocks, rank * share, share, 1)
        others = whole.shape[:dim] + whole.shape[dim + 1 :]
        return jnp.moveaxis(own.reshape(tensor * share, *others), 0, dim)

    def parts(whole):
        rank = jax.lax.axis_index("pipeline")
        return {
            name: part(x, AXES[name].index("vocab"), rank) if "vocab" in AXES[name] else x
            for name, x in whole.items()
        }

    def local(params, whole, each):
        found, wanted = gather_slices(zero, params, axes), parts(whole)
        wrong = sum(jnp.sum(x != wanted[name]) for name, x in found.items())
        shapes = slice_shapes(zero, params, axes)
        total = jax.tree.map(
            jnp.add,
            zero.zeros(shapes, axes),
            zero.reduce(parts({n: x[0] for n, x in each.items()}), axes),
        )
        return finish_slices(zero, total, axes, params), jax.lax.psum(wrong, MANUAL_AXES)

    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * 6, devices=devices
    )
    run = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, REPLICATED, PER_MANUAL_RANK),
            out_specs=(specs, REPLICATED),
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
    )
    whole, each = arrays(d_model), arrays(d_model, (len(devices) // tensor // sizes["context"],))
    grads, wrong = run(zero.split_blocks(whole), whole, each)
    assert wrong == 0
    by_rank = {name: x.reshape(ranks, -1, *x.shape[1:]).sum(1) for name, x in each.items()}
    for name, grad in zero.join_blocks(grads).items():
        wanted = by_rank[name].sum(0)
        if "vocab" in AXES[name]:
            # Of each column the gradient is that of the rank that has it.
            dim = AXES[name].index("vocab")
            owner = np.arange(COLUMNS) % (COLUMNS // tensor) // share
            columns = np.moveaxis(by_rank[name], dim + 1, 1)
            wanted = np.moveaxis(columns[owner, np.arange(COLUMNS)], 0, dim)
        np.testing.assert_array_equal(grad, wanted, err_msg=name)
