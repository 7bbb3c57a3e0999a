"""`PartitionSpec`s of arrays outside a model: batches, scalars, a pipeline's tables.

The specs of parameters and activations follow from logical axes (`resolve`). Other folders use the
specs named here and build none.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxscale.config.layout import MANUAL_AXES
from jaxscale.sharding.resolve import automatic_axes, automatic_part, resolve
from jaxscale.sharding.rules import ACTIVATIONS, Axes

REPLICATED = PartitionSpec()
"""Every device has the whole array."""
BATCH_ROWS = PartitionSpec(("data", "fsdp", "expert"))
"""A batch [batch, seq] in a `shard_map` over the manual axes."""
FSDP_ROWS = PartitionSpec("fsdp")
"""A matrix with rows sharded over fsdp."""
TABLE_COLUMNS = PartitionSpec(None, "pipeline")
"""The columns of a pipeline schedule's table, [ticks, ranks, 1]."""
CHUNKS = PartitionSpec("pipeline")
"""Facts about each chunk of each rank, [ranks, chunks]."""
PER_MANUAL_RANK = PartitionSpec(MANUAL_AXES)
"""One entry of the first dimension per rank of the manual axes."""


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device of a mesh has the whole array."""
    return NamedSharding(mesh, REPLICATED)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch's fields, [batch, seq]."""
    return NamedSharding(mesh, resolve(("batch", "seq"), ACTIVATIONS, mesh.shape))


def over_all_ranks(mesh: Mesh) -> NamedSharding:
    """The sharding of an array whose first dimension is over every axis of a mesh."""
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    return NamedSharding(mesh, PartitionSpec(axes or None))


def stacked(sharding: NamedSharding) -> NamedSharding:
    """The sharding of several such arrays in one, along a new first dimension."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def transposed(sharding: Sharding, order: tuple[int, ...]) -> Sharding:
    """The sharding of an array after a transpose of its dimensions to `order`."""
    if not isinstance(sharding, NamedSharding) or order == tuple(range(len(order))):
        return sharding
    spec = (*sharding.spec, *[None] * (len(order) - len(sharding.spec)))
    return NamedSharding(sharding.mesh, PartitionSpec(*(spec[dim] for dim in order)))


def manually(
    function: Callable,
    axes: Iterable[str],
    in_specs: Any,
    out_specs: Any,
    mesh: Mesh | None = None,
) -> Callable:
    """`shard_map` of a function over these mesh axes, without the check that ranks agree on
    replicated values (`check_vma`).

    Args:
      mesh: None is the mesh of the surrounding region.
    """
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=False,
    )


def kernel_spec(axes: Axes, sizes: Mapping[str, int]) -> PartitionSpec:
    """The spec of an array that a kernel computes with under a `shard_map` over the automatic axes,
    in a region where the batch is manual.

    Mesh axes of size 1 are put on the batch dimension: the backward pass would sum over axes that a
    spec omits.

    Args:
      axes: logical; the first one is "batch".
      sizes: mesh axis -> size.
    """
    rest = automatic_part(resolve(axes[1:], ACTIVATIONS, sizes))
    return PartitionSpec(tuple(axis for axis in automatic_axes(sizes) if sizes[axis] == 1), *rest)


def kernel_vector_spec(axis: str, sizes: Mapping[str, int]) -> PartitionSpec:
    """`kernel_spec` of a vector with this logical axis."""
    spec = kernel_spec(("batch", axis), sizes)
    return PartitionSpec(tuple(name for entry in spec for name in mesh_axes_of(entry)))


def across_pipeline(sharding: Any, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
    """Shards a dimension other than the layers over the pipeline, so that each rank has a part of
    every layer: "embed", as over fsdp, or else another dimension that divides. If none does, the
    array is replicated over the pipeline."""
    assert isinstance(sharding, NamedSharding)
    ranks = sharding.mesh.shape["pipeline"]
    spec = [mesh_axes_of(entry) for entry in sharding.spec]
    spec += [()] * (len(shape) - len(spec))
    spec = [tuple(name for name in names if name != "pipeline") for names in spec]
    sizes = sharding.update(spec=PartitionSpec(*spec)).shard_shape(shape)
    free = [d for d, size in enumerate(sizes) if axes[d] != "layers" and size % ranks == 0]
    if free:
        chosen = min(free, key=lambda d: (axes[d] != "embed", len(spec[d])))
        spec[chosen] += ("pipeline",)
    return sharding.update(spec=PartitionSpec(*spec))


def mesh_axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes in an entry of a `PartitionSpec`."""
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()
