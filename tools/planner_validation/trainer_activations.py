"""Saved activations of a layer of other trainers: ours, and the values that they save in addition.

A layer with dropout and an ungated MLP is that of Korthikanti et al. (arXiv 2205.05198), whose
tables 2 and 3 are reproduced to the digit.
"""

from typing import Any

import numpy as np

from jaxscale.planner.memory.layer_activations import (
    float_or_array,
    layers_of_stacks,
    mlp_width,
    saved_bytes,
)
from jaxscale.planner.model.shape import ModelShape
from tools.planner_validation.trainer_layout import TrainerLayout

Floats = Any  # a float, or float [N]


def trainer_layer_bytes(
    shape: ModelShape, layout: TrainerLayout, remat: str | None = None
) -> Floats:
    """Saved activations of one layer and micro-batch."""
    traits, remat = layout.traits, remat or layout.remat
    stream, inner, whole = saved_bytes(shape, layout, remat)
    t, both = np.asarray(layout.tensor, float), layers_of_stacks(shape)
    if not remat.startswith(("full", "offload:", "save:")):
        if shape.biases:
            stream = stream + 2 * shape.d_model * traits.dropout  # two masks
        else:  # input and output of an unfused gate
            unfused = shape.gated and not traits.fused
            inner = inner + 2 * unfused * mlp_width(shape, layout) * both
    if traits.attention == "written" and remat == "none":
        inner = inner + 5.0 * shape.heads * shape.seq_len * both
    streams = t if traits.sequence_parallel else 1.0
    whole = whole / t if traits.folded_experts else whole
    tokens = np.asarray(layout.microbatch, float) * shape.seq_len / layout.context
    return float_or_array(tokens * (stream / streams + inner / t + whole))
