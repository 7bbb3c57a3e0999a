"""The `PartitionSpec`s of arrays outside a model: batches, scalars, a pipeline's tables.

Those of parameters and activations follow from their logical axes (`resolve`). Other folders take
specs from here, and build none: a name says what is spread over which mesh axes.
"""

from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.layout import AUTOMATIC_AXES, MANUAL_AXES
from jaxscale.sharding.resolve import ACTIVATIONS, Axes, automatic_part, resolve

REPLICATED = PartitionSpec()
"""Every device has the whole array."""
BATCH_ROWS = PartitionSpec(("data", "fsdp"))
"""A batch [batch, seq] in a `shard_map` over the manual axes."""
FSDP_ROWS = PartitionSpec("fsdp")
"""A matrix whose rows the ranks of fsdp share."""
TABLE_COLUMNS = PartitionSpec(None, "pipeline")
"""The columns of a pipeline's table, [ticks, ranks, 1]."""
LAYER_COUNTS = PartitionSpec("pipeline")
"""Layers in each chunk of each rank, [ranks, chunks]."""
PER_MANUAL_RANK = PartitionSpec(MANUAL_AXES)
"""One entry of the first dimension for every rank of the manual axes."""


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device of a mesh has the whole array."""
    return NamedSharding(mesh, REPLICATED)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of a batch's fields, [batch, seq]."""
    return NamedSharding(mesh, resolve(("batch", "seq"), ACTIVATIONS, mesh.shape))


def kernel_spec(axes: Axes, sizes: Mapping[str, int]) -> PartitionSpec:
    """Of an array that a kernel computes with under a `shard_map` over the automatic axes, in a
    region where the batch is manual.

    Mesh axes of size 1 are put on the batch dimension: the backward pass would sum over those that
    a spec leaves out.

    Args:
      axes: logical; the first one is "batch".
      sizes: mesh axis -> size.
    """
    rest = automatic_part(resolve(axes[1:], ACTIVATIONS, sizes))
    return PartitionSpec(tuple(axis for axis in AUTOMATIC_AXES if sizes[axis] == 1), *rest)
