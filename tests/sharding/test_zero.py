"""The collectives of every ZeRO stage, against what a stage means."""

import dataclasses
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxscale.compiled.topology import open_topology
from jaxscale.config.layout import MANUAL_AXES, MESH_AXES
from jaxscale.sharding.resolve import is_axes, manual_part, resolve
from jaxscale.sharding.zero import Zero
from jaxscale.training.xla_options import XLA_FLAGS, has_sparse_cores
from tests.compiled.test_topology import NEEDS_TPU

SIZES = dict(zip(MESH_AXES, (1, 2, 2, 2, 1, 1)))
AXES = {"in": ("embed", "mlp"), "out": ("mlp", "embed"), "bias": ("mlp",), "scale": ("embed",)}
AXES["router"] = ("embed", "routes")
AXES["experts"] = ("experts", "embed", "mlp")
SHAPES = {"embed": 8, "mlp": 3, "routes": 5, "experts": 4}
EVERY_RANK = PartitionSpec(("data", "fsdp", "expert"))


def run(zero, function, *specs):
    """`function` with the mesh manual, compiled."""
    *arguments, result = specs
    sizes = tuple(zero.sizes.values())
    devices = jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 6, devices=devices)
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=tuple(arguments),
            out_specs=result,
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
    )


def specs(zero, rules):
    return jax.tree.map(
        lambda axes: manual_part(resolve(axes, rules, SIZES)), AXES, is_leaf=is_axes
    )


def make(stage, accumulation="float32"):
    return Zero(stage, SIZES, AXES, jnp.dtype("bfloat16"), jnp.dtype(accumulation))


def integers(seed, leading=()):
    """Whole numbers that bfloat16 has, and whose sums it has not."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(129, 256, (*leading, *(SHAPES[axis] for axis in axes))).astype("f4")
        for name, axes in AXES.items()
    }


def own_experts(name, grad):
    """Of the gradient of all experts, where there are several ranks of expert, a rank's."""
    own = SHAPES["experts"] // jax.lax.axis_size("expert")
    first = own * jax.lax.axis_index("expert")
    return jax.lax.dynamic_slice_in_dim(grad, first, own) if name == "experts" else grad


def expected(name, each):
    """The sum of gradients [rank, visit, ...], of experts over the ranks that have them."""
    total = each.sum(1)
    if name != "experts":
        return total.sum(0)
    own, ranks = SHAPES["experts"] // SIZES["expert"], SIZES["expert"]
    parts = [total[n::ranks, own * n : own * (n + 1)].sum(0) for n in range(ranks)]
    return np.concatenate(parts)


def summed(zero, each, single):
    """The gradients [rank, visit, ...] of a step of one or two visits, reduced."""

    def local(params, each):
        total = zero.zeros(params, AXES)
        for visit in range(1 if single else 2):
            grads = {
                name: own_experts(name, x[0, visit]).astype("bfloat16") for name, x in each.items()
            }
            total = jax.tree.map(jnp.add, total, zero.reduce(grads, AXES))
        done = zero.finish(total, AXES)
        finished = zero.zeros(params, AXES, finished=True)
        assert jax.tree.map(jnp.shape, done) == jax.tree.map(jnp.shape, finished)
        return done

    step = run(
        zero, local, specs(zero, zero.state_rules), EVERY_RANK, specs(zero, zero.state_rules)
    )
    return step(integers(1), each)


@pytest.mark.parametrize(
    ("stage", "single"), list(itertools.product(range(4), (True, False))), ids=str
)
def test_gradients_are_summed_once_over_every_rank_and_exactly(stage, single):
    """Two visits of eight ranks, each with separate gradients in the compute type, leave their
    sum in the accumulation type, on the shards that the optimizer sees."""
    each = integers(0, (8, 2))
    # Stage 3 as on TPUs with sparse cores, the others as elsewhere.
    zero = dataclasses.replace(make(stage), ranks_as_dimension=stage == 3)
    for name, got in summed(zero, each, single).items():
        assert got.dtype == jnp.float32
        visits = 1 if single else 2
        np.testing.assert_array_equal(got, expected(name, each[name][:, :visits]))


@pytest.mark.parametrize(("stage", "single"), [(0, False), (1, False), (2, True)], ids=str)
def test_gradients_may_be_summed_in_bfloat16(stage, single):
    """XLA for CPUs ends the process over such a sum where an axis is left to the compiler."""
    each = {name: x % 4 for name, x in integers(0, (8, 2)).items()}
    for name, got in summed(make(stage, "bfloat16"), each, single).items():
        assert got.dtype == jnp.bfloat16
        visits = 1 if single else 2
        np.testing.assert_array_equal(got, expected(name, each[name][:, :visits]))


@pytest.mark.proof
@pytest.mark.parametrize(
    ("stage", "single"), [(0, False), (1, False), (2, False), (3, True)], ids=str
)
def test_gradients_may_be_summed_over_ranks_in_bfloat16_and_over_visits_in_float32(stage, single):
    """To first order each term is rounded by 2^-9 of a partial sum once as it is sent, in up to
    seven additions, and between two reductions; stages 2 and 3 send every visit's own."""
    rng = np.random.default_rng(2)
    each = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f4"), integers(0, (8, 2)))
    zero = dataclasses.replace(make(stage), reduction_dtype=jnp.dtype("bfloat16"))
    for name, got in summed(zero, each, single).items():
        assert got.dtype == jnp.float32
        terms = np.asarray(each[name][:, : 1 if single else 2].astype(jnp.bfloat16), "f8")
        size = expected(name, abs(terms))
        error = abs(got - expected(name, terms))
        assert (error <= 10 * 2**-9 * size).all()
        assert error.max() > 2**-14 * size.max(), "summed in float32"
    # With nobody to sum with, nothing is rounded.
    first = jax.tree.map(lambda x: x[:1].astype("bfloat16").astype("f4"), each)
    alone = summed(dataclasses.replace(zero, sizes=dict.fromkeys(MESH_AXES, 1)), first, single)
    for name, x in first.items():
        np.testing.assert_array_equal(alone[name], x[0, : 1 if single else 2].sum(0))


@pytest.mark.parametrize("stage", range(4))
def test_weights_are_whole_and_in_the_compute_type_wherever_they_are_used(stage):
    zero, params = make(stage), integers(0)

    def local(params):
        return jax.tree.map(lambda x: x[None], zero.gather(params, AXES))

    used = run(zero, local, specs(zero, zero.state_rules), EVERY_RANK)(params)
    for name, weight in params.items():
        assert used[name].dtype == (jnp.float32 if name == "router" else jnp.bfloat16)
        parts = np.split(weight, SIZES["expert"]) if name == "experts" else [weight]
        whole = np.stack([parts[rank % len(parts)] for rank in range(8)])
        np.testing.assert_array_equal(used[name], whole)


@pytest.mark.parametrize("compute", ["bfloat16", "float32", "float64"])
def test_losses_are_summed_in_float32_or_wider(compute):
    zero = Zero(0, SIZES, AXES, jnp.dtype(compute), jnp.dtype("bfloat16"))
    assert zero.loss_dtype == {"float64": "float64"}.get(compute, "float32")


@pytest.mark.proof
@NEEDS_TPU
def test_no_gradient_is_all_reduced_on_a_torus_whose_sides_do_not_divide_it():
    """Of a reduce-scatter along a matrix's own dimension XLA makes an all-reduce here: 11,008 has
    86 tiles, and a side of the torus 4 chips."""
    machine = open_topology("v5p:4x4x4")
    sizes = SIZES | {"data": 1, "fsdp": 64, "expert": 1}
    mesh = Mesh(np.reshape(machine.devices, tuple(sizes.values())), MESH_AXES)
    axes = {
        "in": ("embed", "mlp"),
        "out": ("mlp", "embed"),
        "query": ("embed", "heads", "head_dim"),
    }
    shapes = {"in": (4096, 11008), "out": (11008, 4096), "query": (4096, 32, 128)}
    narrow, wide = jnp.dtype("bfloat16"), jnp.dtype("float32")
    assert has_sparse_cores(machine.devices[0].device_kind)
    zero = Zero(3, sizes, axes, narrow, wide, ranks_as_dimension=True)
    reduced = {
        name: manual_part(resolve(each, zero.state_rules, sizes)) for name, each in axes.items()
    }
    here = NamedSharding(mesh, PartitionSpec())
    grads = {n: jax.ShapeDtypeStruct(s, jnp.float32, sharding=here) for n, s in shapes.items()}
    step = jax.shard_map(
        lambda grads: zero.reduce(grads, axes),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=reduced,
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )
    options = {flag.name: flag.value for flag in XLA_FLAGS["TPU v5"]}
    text = jax.jit(step).lower(grads).compile(compiler_options=options).as_text()
    assert len(re.findall(r" reduce-scatter\(", text)) == len(axes)
    assert not re.findall(r" all-reduce\(", text)


def test_the_heads_columns_are_divided_where_context_divides_them():
    """Not of a custom model's other arrays, a scalar among them."""
    axes = {"output": ("embed", "vocab"), "odd": ("embed", "vocab"), "scale": ("embed",), "s": ()}
    shapes = {"output": (8, 12), "odd": (8, 9), "scale": (8,), "s": ()}
    head = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    zero = dataclasses.replace(make(3), sizes={**SIZES, "context": 4})
    expected = axes | {"output": ("embed", "loss_vocab")}
    assert zero.divide_columns(axes, head) == expected
    assert make(3).divide_columns(axes, head) == axes
