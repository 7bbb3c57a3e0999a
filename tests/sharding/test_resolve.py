"""Logical axes to mesh axes: what is joined, what is refused, and which axes are whose."""

import itertools

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale.config.layout import MESH_AXES
from jaxscale.sharding.resolve import automatic_part, manual_part, resolve, spread_outer
from jaxscale.sharding.rules import ACTIVATIONS, REPLICATED_WEIGHTS, WEIGHTS

ALL = dict.fromkeys(MESH_AXES, 2)


def test_a_dimension_is_spread_over_all_the_axes_of_its_name():
    assert resolve(("batch", "residual_seq", "embed"), ACTIVATIONS, ALL) == PartitionSpec(
        ("data", "fsdp", "expert"), ("context", "tensor"), None
    )
    assert resolve(("layers", "embed", "mlp"), WEIGHTS, ALL) == PartitionSpec(
        "pipeline", ("context", "fsdp", "expert"), "tensor"
    )
    # Of experts each rank of expert has others.
    assert resolve(("experts", "embed", "expert_mlp"), WEIGHTS, ALL) == PartitionSpec(
        "expert", ("context", "fsdp"), "tensor"
    )
    alone = ALL | {"fsdp": 1, "expert": 1, "context": 1}
    assert resolve(("embed", "mlp"), WEIGHTS, alone) == PartitionSpec(None, "tensor")


def test_two_dimensions_on_one_mesh_axis_are_refused():
    with pytest.raises(ValueError, match=r"w: 'heads' and 'mlp' both map to mesh axis 'tensor'"):
        resolve(("heads", "embed", "mlp"), WEIGHTS, ALL, name="w")
    # An axis of size 1 is no axis.
    assert resolve(("heads", "mlp"), WEIGHTS, ALL | {"tensor": 1}) == PartitionSpec(None, None)


def test_a_name_without_a_rule_is_refused():
    with pytest.raises(ValueError, match=r"w: logical axis 'width' has no rule; known: .*embed"):
        resolve(("width",), WEIGHTS, ALL, name="w")


def test_each_axis_of_a_spec_is_either_ours_or_the_compilers():
    """One entry may have several axes, of either kind."""
    spec = PartitionSpec(("data", "fsdp"), ("context", "tensor"), None, ("fsdp", "tensor"))
    assert manual_part(spec) == PartitionSpec(("data", "fsdp"), None, None, "fsdp")
    assert automatic_part(spec) == PartitionSpec(None, ("context", "tensor"), None, "tensor")


@pytest.mark.parametrize(("pipeline", "fsdp"), [(2, 2), (4, 2), (2, 4), (1, 4), (2, 1)])
def test_what_is_outside_the_layers_is_spread_over_a_pipeline_where_it_divides(pipeline, fsdp):
    """By the shapes that JAX allows, in every ZeRO stage."""
    sizes = dict(zip(MESH_AXES, (pipeline, 1, fsdp, 1, 1, 1)))
    devices = jax.devices()[: pipeline * fsdp]
    mesh = jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, devices=devices, axis_types=(AxisType.Auto,) * 6
    )
    tree = {"head": ("embed", "vocab"), "layer": ("layers", "embed")}
    for width, rules in itertools.product(range(4, 40, 2), (WEIGHTS, REPLICATED_WEIGHTS)):
        spread = spread_outer(tree, sizes, width)
        assert spread["layer"] == tree["layer"]
        divides = width % (pipeline * fsdp) == 0
        outer = spread["head"] != tree["head"]
        assert outer == (pipeline > 1 and divides)
        if outer:
            spec = resolve(spread["head"], rules, sizes)
            (shard, _) = NamedSharding(mesh, spec).shard_shape((width, 3))
            assert shard == width // (pipeline * (fsdp if rules is WEIGHTS else 1))
