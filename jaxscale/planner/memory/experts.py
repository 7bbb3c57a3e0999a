"""Memory of a layer with experts: the rows that tokens are in on their way to experts and back.

See `models.experts` and `ops.experts.dispatch`. Without a capacity a rank has room for as many rows
as could arrive, whatever arrives; all ranks of tensor have the rows, and each some of the hidden
features.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config.model import ModelConfig
from jaxscale.sharding.model_trace import Ints, maximum, select
from jaxscale.training.tracing.traces import model_trace

PREDICTION = "prediction"
"""The stack of the modules that predict further tokens (`models.prediction`)."""


def rows_of_token(model: ModelConfig, layout: Any, length: int) -> Ints:
    """Rows of a rank's experts for each token of the rank, of all tensor ranks together; a fraction
    where a capacity rounds.

    Args:
      length: tokens of a sequence.
    """
    ranks = np.asarray(layout.expert)
    if not model.capacity_factor:
        own = model.num_experts // ranks
        return ranks * np.minimum(model.experts_per_token, own)
    places = expert_capacity(model, length)
    return model.num_experts * places * np.asarray(layout.context) / length


def expert_capacity(model: ModelConfig, length: int) -> int:
    """Rows of an expert for a sequence, as `ops.experts.dispatch.capacity_of`."""
    share = model.capacity_factor * length * model.experts_per_token / model.num_experts
    return min(math.ceil(share), length)


def hidden_features(model: ModelConfig) -> int:
    """Of an expert."""
    return model.expert_d_ff or model.d_ff


class RowArrays(NamedTuple):
    """Arrays that are live at once in the backward pass of a layer, where nothing is saved."""

    hidden: float  # [R, F]
    stream: float  # [R, D]
    gradients: float = 0  # of the layer's weights, where they are reduce-scattered


WHOLE = (RowArrays(5, 3, 0.75), RowArrays(3, 4, 0.75))
"""At the gradients of the activation, and as those of what the experts read travel back: one matmul
for all experts, with a capacity, or a kernel for groups."""
BLOCKS = (RowArrays(6, 4, 0.75), RowArrays(3, 6, 0.75))
"""A loop over blocks copies what it reads and what it writes. Counted in steps of Mixtral (hidden
features are most) and Qwen3-MoE (rows of the stream are) for eight H100."""
UNORDERED = (RowArrays(9, 8, 2.0), RowArrays(6, 10, 2.0))
"""The same in a loop over passes each of which reduce-scatters gradients: the scheduler does not
know how long the loops take, and leaves the gradients of weights to the end."""

AFTER_DENSE = (RowArrays(3, 5, 1.5),)
"""Blocks in layers that come after others without experts: gradients of the layer above, as they
are reduced, and the sums of two of the three matrices. Counted in steps of DeepSeek-V3, whose
gradients are large, for 256 H100."""
AFTER_DENSE_UNORDERED = (RowArrays(7, 8, 0.6),)
"""The same where each of several passes reduce-scatters, for 2,048 H100; or those above, and the
gradients of the head before they are reduced."""

LONE = (RowArrays(4, 5),)
"""Of a module that predicts further tokens, alone in its stack, as the hidden features are
recomputed; beside the gradients of the head. Counted in a step of DeepSeek-V3 for 256 H200 that
saves everything, and in one that recomputes, which needs less."""
LONE_UNORDERED = (RowArrays(6, 9, 2.0),)
"""The same in each of several passes: the loops over blocks begin with zeros, which the compiler
copies at the beginning of the pass, as there is no loop over layers. Counted in two such steps."""

PIPED = RowArrays(3, 3)
"""In a pipeline, beside its slots: R, B and W are apart. Counted in steps of Mixtral and Qwen3-MoE
for 16 to 64 H100."""


def row_bytes(loop: Any, head: Ints, *, blocks: bool) -> Ints:
    """Bytes of the rows that are live at once in a layer's backward pass, beside saved ones, and of
    gradients on their way.

    Args:
      loop: a `LayerLoop` of layers with experts.
      head: bytes of the gradients of the head, whole.
      blocks: whether the back end's matmuls of experts are loops over blocks.
    """
    model, remat = loop.model, loop.layout.remat_policy
    matmuls = ("mlp_up", "mlp_gate")[: 1 + model.gated]
    saved = RowArrays(sum(name in remat.names for name in matmuls), int(not remat.by_names))
    hidden = loop.compute * loop.rows * hidden_features(model) // loop.layout.tensor
    stream = loop.compute * loop.rows * model.d_model
    # Those of several micro-batches together wait in accumulators of their own.
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
    if not blocks or model.capacity_factor:
        return select(pipelined, slots, live(WHOLE))
    several = loop.scatters & loop.repeats
    # Where everything is saved, also in passes without a loop: counted in steps of DeepSeek-V3.
    saved_all = loop.scatters & np.logical_not(loop.single) & (remat.kind == "none")
    if model.dense_layers:
        several = several | saved_all
    if loop.part == PREDICTION and loop.num_layers == 1:
        # The head is passed through once for each, and the gradients are added up.
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
    """Gradients of all of a device's layers' experts once more: a GPU's reduce-scatter wants the
    dimension that it scatters to be the first, and the accumulators are laid out both ways."""
    mine = sum(
        array.shard_size(loop.layout, over_fsdp=True)
        for array in model_trace(loop.model).parameters
        if array.part == loop.part and "experts" in array.axes
    )
    return select(loop.scatters, layers * loop.accumulated * mine)
