"""Bytes that tensor parallelism of rows x columns sends (AxoNN, arXiv 2305.13525): see
`ops.tensor_parallel`."""

from typing import NamedTuple

from jaxscale.layout import Layout
from jaxscale.planner.model.shape import ModelShape

WIDTH = 2
"""Bytes of an activation."""


class TensorVolumes(NamedTuple):
    """Bytes that a device sends in both passes, and to recompute."""

    rows: float  # all-reduces over rows
    columns: float  # gathers and scatters over columns


def layer_volumes(shape: ModelShape, layout: Layout, sequences: int) -> TensorVolumes:
    """Of one layer of a decoder without experts, and one micro-batch.

    Args:
      sequences: of the global batch.
    """
    r, c, remat = layout.tensor_rows, layout.tensor_columns, layout.remat_policy
    shards = layout.batch_shards * layout.microbatches * layout.context
    stream = sequences * shape.seq_len / shards * shape.d_model  # elements, on all ranks of tensor
    feature = stream / shape.d_model
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    made = {"query": queries, "key": keys, "value": keys}
    made |= dict.fromkeys(("mlp_up", "mlp_gate")[: 1 + shape.gated], shape.d_ff)
    # In a pipeline the operations of `keep` recompute whole layers.
    named = remat.by_names
    forward = sum(made.values())
    again = sum(size for name, size in made.items() if named and name not in remat.names)
    over_rows = forward + again + queries + shape.d_ff  # the last two of gradients
    # Attention and MLP each gather the stream and scatter their result, and the reverse. What they
    # gathered is at hand for the gradient of weights where tensor has rows and nothing is
    # recomputed; what attention's matmul adds to the stream is scattered again for the MLP.
    gathers = 8 + 2 * (named or r == 1) + (named and "attention_out" not in remat.names)
    return TensorVolumes(
        WIDTH * 2 * (1 - 1 / r) * feature * over_rows / c,
        WIDTH * (1 - 1 / c) * stream / r * gathers,
    )


def step_volumes(shape: ModelShape, layout: Layout, sequences: int) -> TensorVolumes:
    """Of all layers of a device and all micro-batches; without embedding and head."""
    count = shape.layers / layout.pipeline * layout.microbatches
    return TensorVolumes(*(count * size for size in layer_volumes(shape, layout, sequences)))
