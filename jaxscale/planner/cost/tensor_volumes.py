"""What tensor parallelism of rows x columns sends (AxoNN, arXiv 2305.13525) in our layers: see
`ops.tensor_parallel`."""

from typing import Any, NamedTuple

import numpy as np

from jaxscale.config.layout import Layout
from jaxscale.planner.model.layout_batch import LayoutBatch
from jaxscale.planner.model.shape import ModelShape

WIDTH = 2
"""Bytes of an activation."""


class StreamCollectives(NamedTuple):
    """Gathers and scatters of the residual stream over columns, of attention and MLP of a layer."""

    forward: Any  # each gathers the stream, and scatters its result
    input: Any  # each gathers its result's gradient, and scatters its input's
    weights: Any  # gathers of the stream again, for gradients of weights
    recompute: Any


def stream_collectives(layout: Layout | LayoutBatch) -> StreamCollectives:
    """How many there are of one layer and micro-batch.

    Without rows a layer saves its part of the stream, and what attention and MLP gathered is
    gathered again for the gradients of weights; with them where it is recomputed. Recompute beside
    the backward pass uses the same two gathers; what attention's matmul adds to the stream is
    scattered again for the MLP. A pipeline's recompute is an operation of its own, and a whole
    forward pass.
    """
    policy, alone = layout.remat_policy, np.asarray(layout.tensor_rows) == 1
    whole = (np.asarray(layout.pipeline) > 1) & (policy.kept_passes is not None)
    again = policy.by_names and "attention_out" not in policy.names
    return StreamCollectives(
        forward=4,
        input=4,
        weights=2 * (alone | (policy.by_names & ~whole)),
        recompute=np.where(whole, 4, int(again)),
    )


def recomputed_features(shape: ModelShape, layout: Layout | LayoutBatch) -> tuple[float, float]:
    """Features of a token that a layer's matmuls out of the stream have, and how many of them are
    recomputed."""
    policy = layout.remat_policy
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    made = {"query": queries, "key": keys, "value": keys}
    made |= dict.fromkeys(("mlp_up", "mlp_gate")[: 1 + shape.gated], shape.d_ff)
    again = sum(size for name, size in made.items() if name not in policy.names)
    return sum(made.values()), again * policy.by_names


class TensorVolumes(NamedTuple):
    """Bytes that a device sends in both passes, and to recompute."""

    rows: float  # all-reduces over rows
    columns: float  # gathers and scatters over columns


def layer_volumes(shape: ModelShape, layout: Layout, sequences: int) -> TensorVolumes:
    """Of one layer of a decoder without experts, and one micro-batch.

    Args:
      sequences: of the global batch.
    """
    r, c = layout.tensor_rows, layout.tensor_columns
    shards = layout.batch_shards * layout.microbatches * layout.context
    stream = sequences * shape.seq_len / shards * shape.d_model  # elements, on all ranks of tensor
    feature = stream / shape.d_model
    gradients = shape.heads * shape.head_dim + shape.d_ff
    over_rows = sum(recomputed_features(shape, layout)) + gradients
    return TensorVolumes(
        WIDTH * 2 * (1 - 1 / r) * feature * over_rows / c,
        WIDTH * (1 - 1 / c) * stream / r * float(sum(stream_collectives(layout))),
    )


def step_volumes(shape: ModelShape, layout: Layout, sequences: int) -> TensorVolumes:
    """Of all layers of a device and all micro-batches; without embedding and head."""
    count = shape.layers / layout.pipeline * layout.microbatches
    return TensorVolumes(*(count * size for size in layer_volumes(shape, layout, sequences)))
