"""Bytes sent by tensor parallelism of rows x columns (AxoNN, arXiv 2305.13525) in our layers: see
`ops.tensor_parallel`."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config.layout import Layout
from jaxscale.planner.model.layout_batch import LayoutBatch
from jaxscale.sharding.model_trace import ModelWork, StackWork

WIDTH = 2
"""Bytes of an activation."""


class StreamCollectives(NamedTuple):
    """Gathers and scatters of the residual stream over columns, of attention and MLP of a layer."""

    forward: Any  # each gathers the stream, and scatters its result
    input: Any  # each gathers its result's gradient, and scatters its input's
    weights: Any  # gathers of the stream again, for gradients of weights
    recompute: Any


def stream_collectives(layout: Layout | LayoutBatch) -> StreamCollectives:
    """Numbers of collectives of one layer and micro-batch.

    Without rows a layer saves its part of the stream, and the gathered inputs of attention and MLP
    are gathered again for the gradients of weights; with rows where they are recomputed. Recompute
    within the backward pass uses the same two gathers; the output of attention's matmul is
    scattered again for the MLP. A pipeline's recompute is a separate operation, and a whole forward
    pass.
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


def recomputed_features(stack: StackWork, layout: Layout | LayoutBatch) -> tuple[float, float]:
    """Features per token that a layer's matmuls out of the stream produce, and how many of them are
    recomputed."""
    policy, made, again = layout.remat_policy, 0.0, 0.0
    for one in stack.matmuls:
        if one.over != "outputs":
            continue
        named = itertools.zip_longest(one.outputs, one.names)
        for (units, each), name in named:
            made += units * each * one.tokens * one.share
            again += units * each * one.tokens * one.share * (name not in policy.names)
    return made, again * policy.by_names


def returned_features(stack: StackWork) -> float:
    """Features per token that matmuls back into the stream read."""
    return sum(one.inputs * one.tokens * one.share for one in stack.matmuls if one.over == "inputs")


class TensorVolumes(NamedTuple):
    """Bytes that a device sends in both passes, and to recompute."""

    rows: float  # all-reduces over rows
    columns: float  # gathers and scatters over columns


def layer_volumes(work: ModelWork, layout: Layout, sequences: int) -> TensorVolumes:
    """Volumes of one layer of a model with one stack, for one micro-batch.

    Args:
      sequences: of the global batch.
    """
    r, c = layout.tensor_rows, layout.tensor_columns
    shards = layout.batch_shards * layout.microbatches * layout.context
    feature = sequences * work.seq_len / shards  # elements, on all ranks of tensor
    stream, stack = feature * work.width, work.stacks[0]
    over_rows = sum(recomputed_features(stack, layout)) + returned_features(stack)
    return TensorVolumes(
        WIDTH * 2 * (1 - 1 / r) * feature * over_rows / c,
        WIDTH * (1 - 1 / c) * stream / r * float(sum(stream_collectives(layout))),
    )


def step_volumes(work: ModelWork, layout: Layout, sequences: int) -> TensorVolumes:
    """Volumes of all layers of a device and all micro-batches, without embedding and head."""
    count = work.layers / layout.pipeline * layout.microbatches
    return TensorVolumes(*(count * size for size in layer_volumes(work, layout, sequences)))
