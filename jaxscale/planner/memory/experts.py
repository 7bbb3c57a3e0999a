"""Memory of a layer with experts: the rows of tokens between dispatch and combine.

See `models.experts` and `ops.experts.dispatch`. Without a capacity a rank allocates as many rows as
could arrive; every tensor rank has all rows, and a share of the hidden features.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config.model import ModelConfig
from jaxscale.sharding.model_trace import Ints, maximum, select
from jaxscale.training.tracing.traces import model_trace

PREDICTION = "prediction"
"""The stack of the multi-token prediction (MTP) modules (`models.prediction`)."""


def rows_of_token(model: ModelConfig, layout: Any, length: int) -> Ints:
    """Rows of a rank's experts per token of the rank, all tensor ranks together; a fraction where a
    capacity rounds.

    Args:
      length: tokens of a sequence.
    """
    ranks = np.asarray(layout.expert)
    if not model.capacity_factor:
        own = model.num_experts // ranks
        return ranks * np.minimum(model.experts_per_token, own)
    slots = expert_capacity(model, length)
    return model.num_experts * slots * np.asarray(layout.context) / length


def expert_capacity(model: ModelConfig, length: int) -> int:
    """Rows of an expert for a sequence, as `ops.experts.dispatch.capacity_of`."""
    share = model.capacity_factor * length * model.experts_per_token / model.num_experts
    return min(math.ceil(share), length)


def hidden_features(model: ModelConfig) -> int:
    """Hidden features of an expert."""
    return model.expert_d_ff or model.d_ff


class RowArrays(NamedTuple):
    """Arrays live at once in the backward pass of a layer, where nothing is saved."""

    hidden: float  # [R, F]
    stream: float  # [R, D]
    gradients: float = 0  # of the layer's weights, where they are reduce-scattered


WHOLE = (RowArrays(5, 3, 0.75), RowArrays(3, 4, 0.75))
"""At the gradients of the activation, and while the gradients of the experts' inputs are sent back:
one matmul for all experts, with a capacity."""
ON_USE = tuple(one._replace(gradients=0) for one in WHOLE)
"""The same on TPUs, with or without a capacity: experts are gathered before their tokens are
dispatched, and each matrix's gradients are reduced at once. Counted in steps of Mixtral for 64 v5p
(libtpu 0.0.52)."""
KERNELS = (RowArrays(3, 4),)
"""Kernels of grouped matmuls on GPUs: the gradients of the activation overwrite their operands.
Counted in steps of Mixtral and Qwen3-MoE for eight H100 and H200."""
BLOCKS = (RowArrays(6, 4, 0.75), RowArrays(3, 6, 0.75))
"""A loop over blocks copies its inputs and outputs. Counted in steps of Mixtral (mostly hidden
features) and Qwen3-MoE (mostly rows of the stream) for eight H100."""
UNORDERED = (RowArrays(9, 8, 2.0), RowArrays(6, 10, 2.0))
"""The same in a loop over passes that each reduce-scatter gradients: XLA's scheduler does not know
how long the inner loops take, and leaves the weight gradients to the end."""

AFTER_DENSE = (RowArrays(3, 5, 1.5),)
"""Blocks in layers that follow layers without experts: gradients of the layer above during their
reduction, and the sums of two of the three matrices. Counted in steps of DeepSeek-V3, whose
gradients are large, for 256 H100."""
AFTER_DENSE_UNORDERED = (RowArrays(7, 8, 0.6),)
"""The same where each of several passes reduce-scatters, for 2,048 H100; or as above, with the
gradients of the head before their reduction."""

LONE = (RowArrays(4, 5),)
"""A single MTP module in its stack, while the hidden features are recomputed; the gradients of the
head are added. Counted in a step of DeepSeek-V3 for 256 H200 that
saves everything, and in one that recomputes, which needs less."""
LONE_UNORDERED = (RowArrays(6, 9, 2.0),)
"""The same in each of several passes: without a loop over layers, XLA copies the initial zeros of
the loops over blocks at the beginning of the pass. Counted in two such steps."""

PIPED = RowArrays(3, 3)
"""In a pipeline, in addition to its slots: R, B and W are separate. Counted in steps of Mixtral and
Qwen3-MoE for 16 to 64 H100."""


def row_bytes(loop: Any, head: Ints, grouped: str) -> Ints:
    """Bytes of the rows live at once in a layer's backward pass, without the saved ones, and of
    gradients before their reduction.

    Args:
      loop: a `LayerLoop` of layers with experts.
      head: bytes of the gradients of the head, whole.
      grouped: the back end's matmul of experts (`ops.experts.grouped_matmul`).
    """
    model, remat = loop.model, loop.layout.remat_policy
    matmuls = ("mlp_up", "mlp_gate")[: 1 + model.gated]
    saved = RowArrays(sum(name in remat.names for name in matmuls), int(not remat.by_names))
    hidden = loop.compute * loop.rows * hidden_features(model) // loop.layout.tensor
    stream = loop.compute * loop.rows * model.d_model
    # Gradients of several micro-batches together wait in separate accumulators.
    gradients = select(loop.scatters & (loop.group == 1), loop.accumulated * loop.unreduced)

    def live(counts: tuple[RowArrays, ...]) -> Ints:
        each = [
            max(one.hidden - saved.hidden, 3) * hidden
            + (one.stream - saved.stream) * stream
            + one.gradients * gradients
            for one in counts
        ]
        return maximum(*each)

    pipelined = loop.layout.pipeline > 1
    slots = PIPED.hidden * hidden + PIPED.stream * stream
    if grouped != "blocks" or model.capacity_factor:
        counts = {"ragged_dot": ON_USE, "kernels": WHOLE if model.capacity_factor else KERNELS}
        return select(pipelined, slots, live(counts.get(grouped, WHOLE)))
    several = loop.scatters & loop.repeats
    # Where everything is saved, also in passes without a loop: counted in steps of DeepSeek-V3.
    saved_all = loop.scatters & np.logical_not(loop.single) & (remat.kind == "none")
    if model.dense_layers:
        several = several | saved_all
    if loop.part == PREDICTION and loop.num_layers == 1:
        # Each module runs the head once, and the gradients are added up.
        several = saved_all
        passed = (2 + model.prediction_depth) * head
        found = select(several, live(LONE_UNORDERED) + head, live(LONE) + passed)
    elif model.dense_layers:
        alone = live(AFTER_DENSE)
        found = select(several, maximum(live(AFTER_DENSE_UNORDERED), alone + head), alone)
    else:
        found = select(several, live(UNORDERED), live(BLOCKS))
    return select(pipelined, slots, found)


def restacked_bytes(loop: Any, layers: Ints) -> Ints:
    """A second copy of the gradients of all experts on a device: a GPU's reduce-scatter needs the
    scattered dimension first, so XLA lays the accumulators out both ways."""
    mine = sum(
        array.shard_size(loop.layout, over_fsdp=True)
        for array in model_trace(loop.model).parameters
        if array.part == loop.part and "experts" in array.axes
    )
    scattered = np.asarray(loop.layout.fsdp) * loop.layout.context > 1
    return select(loop.scatters & scattered, layers * loop.accumulated * mine)
