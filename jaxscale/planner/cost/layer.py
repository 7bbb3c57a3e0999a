"""Compute seconds of one device in a layer, and in the head, for one micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from jaxscale.planner.cost import kernels
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.elementwise import elementwise_seconds
from jaxscale.planner.cost.matmuls import matmul_pass_seconds, matmul_sizes
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.sharding.model_trace import ModelWork, StackWork

Floats = Any  # a float, or float [N]


@dataclass(frozen=True)
class ComputeSeconds:
    """Seconds of one pass over one layer, or over the head."""

    matmul: Floats = 0.0
    attention: Floats = 0.0
    elementwise: Floats = 0.0

    @property
    def seconds(self) -> Floats:
        return self.matmul + self.attention + self.elementwise

    def __add__(self, other: "ComputeSeconds") -> "ComputeSeconds":
        return ComputeSeconds(
            *(getattr(self, one.name) + getattr(other, one.name) for one in fields(ComputeSeconds))
        )

    def __mul__(self, factor: Floats) -> "ComputeSeconds":
        return ComputeSeconds(*(getattr(self, one.name) * factor for one in fields(ComputeSeconds)))


Passes = tuple[ComputeSeconds, ComputeSeconds, ComputeSeconds, ComputeSeconds]
"""Forward, B, W and R of an average layer of a stack."""


@dataclass(frozen=True)
class LayerCompute:
    """An average layer, and the head, for one micro-batch."""

    forward: ComputeSeconds
    backward_input: ComputeSeconds  # B
    backward_weights: ComputeSeconds  # W
    recompute: ComputeSeconds  # R, by the remat policy
    head_forward: ComputeSeconds
    head_backward: ComputeSeconds

    @property
    def backward(self) -> ComputeSeconds:
        return self.backward_input + self.backward_weights


def layer_compute(work: ModelWork, cluster: Cluster, parallelism: Parallelism) -> LayerCompute:
    """The compute of an average layer and of the head."""
    return average_layer(
        work,
        [stack_passes(work, stack, cluster, parallelism) for stack in work.stacks],
        head_passes(work, cluster, parallelism),
    )


def average_layer(
    work: ModelWork, stacks: Sequence[Passes], head: tuple[ComputeSeconds, ComputeSeconds]
) -> LayerCompute:
    """An average layer, the compute of all stacks spread over it.

    Args:
      head: its forward and its backward pass.
    """
    total = [ComputeSeconds()] * 4
    for stack, passes in zip(work.stacks, stacks):
        share = work.share(stack)
        total = [sum_ + one * share for sum_, one in zip(total, passes)]
    forward, inputs, weights, recompute = total
    # Multi-token prediction layers are on the rank of the head.
    extra = work.extra_predictions
    up, down = (one * (work.head_passes + extra) for one in head)
    return LayerCompute(
        forward=forward,
        backward_input=inputs,
        backward_weights=weights,
        recompute=recompute,
        head_forward=up + forward * extra,
        head_backward=down + (inputs + weights) * extra,
    )


def local_tokens(seq_len: int, parallelism: Parallelism) -> Floats:
    """Tokens of a micro-batch on a device."""
    return np.asarray(parallelism.microbatch) * seq_len / parallelism.context


def stack_passes(
    work: ModelWork, stack: StackWork, cluster: Cluster, parallelism: Parallelism
) -> Passes:
    """The passes over an average layer of a stack."""
    tokens = local_tokens(stack.seq_len, parallelism)
    if work.side:
        return _passes_beside(work, stack, cluster, parallelism)
    matmuls = matmul_sizes(stack, parallelism, tokens)
    forward, inputs, weights = compute_passes(
        matmul_pass_seconds(matmuls, cluster, parallelism),
        attention_seconds(stack, cluster, parallelism, tokens),
        elementwise_seconds(stack, work.width, cluster, parallelism, tokens),
    )
    return forward, inputs, weights, recomputed_pass(stack, parallelism, forward)


SIDE_BYTES = 8
"""Bytes of a feature of the stream that a side layer's backward pass moves: its input and two
gradients, in 16 bits, and one of them again."""


def _passes_beside(
    work: ModelWork, stack: StackWork, cluster: Cluster, parallelism: Parallelism
) -> Passes:
    """The passes over an average layer without a backward pass, with a side network's."""
    tokens, trained = local_tokens(stack.seq_len, parallelism), replace(parallelism, frozen=False)
    of_side = matmul_pass_seconds(matmul_sizes(stack.side, trained, tokens), cluster, trained)
    every = matmul_pass_seconds(matmul_sizes(stack, parallelism, tokens), cluster, parallelism)
    moved = tokens * SIDE_BYTES * work.width / np.asarray(parallelism.tensor)
    elementwise = elementwise_seconds(stack, work.width, cluster, parallelism, tokens)
    back = kernels.memory_seconds(cluster, moved)
    attention = attention_seconds(stack, cluster, parallelism, tokens)
    return (
        ComputeSeconds(every[0], attention[0], elementwise[0]),
        ComputeSeconds(of_side[1], 0.0, back),
        ComputeSeconds(matmul=of_side[2]),
        ComputeSeconds(matmul=of_side[0] / 2) if parallelism.remat != "none" else ComputeSeconds(),
    )


def compute_passes(
    matmuls: Sequence[Floats], attention: Sequence[Floats], elementwise: Sequence[Floats]
) -> tuple[ComputeSeconds, ComputeSeconds, ComputeSeconds]:
    """Forward, B and W.

    Args:
      matmuls: of each of them.
      attention: forward and backward, as `elementwise`.
    """
    return (
        ComputeSeconds(matmuls[0], attention[0], elementwise[0]),
        ComputeSeconds(matmuls[1], attention[1], elementwise[1] * 0.7),
        ComputeSeconds(matmuls[2], 0.0, elementwise[1] * 0.3),
    )


def attention_seconds(
    stack: StackWork,
    cluster: Cluster,
    parallelism: Parallelism,
    tokens: Floats,
    rates: kernels.Rates = kernels.FLASH,
) -> tuple[Floats, Floats]:
    """Core attention and scans, forward and backward, of an average layer.

    Args:
      rates: of the attention kernel.
    """
    # Tensor rows repeat everything between the projections.
    t = np.asarray(parallelism.tensor_columns)
    scans = kernels.scan_seconds(cluster, tokens * stack.scan_flops / t)
    seconds = [scans, kernels.FLASH_BACKWARD * scans]
    for one in stack.attention:
        length = one.length / np.asarray(parallelism.context)
        for n, back in enumerate((False, True)):
            seconds[n] = seconds[n] + kernels.flash_seconds(
                cluster, tokens * one.flops / t, one.features, back, length, rates
            )
    return seconds[0], seconds[1]


def recomputed_pass(
    stack: StackWork, parallelism: Parallelism, forward: ComputeSeconds
) -> ComputeSeconds:
    """Part of a forward pass that a remat policy recomputes."""
    remat = parallelism.remat
    if remat == "none":
        return ComputeSeconds()
    if remat == "save_all_but_attention":
        return ComputeSeconds(attention=forward.attention)
    if remat == "save_matmuls":
        return ComputeSeconds(elementwise=forward.elementwise)
    names = remat.partition(":")[2].split(",") if ":" in remat else []
    again = stack.recomputed_matmuls(names)
    return ComputeSeconds(
        matmul=forward.matmul * again / stack.matmul_flops,
        attention=forward.attention * (0.0 if "attention" in names else 1.0),
        elementwise=forward.elementwise,
    )


LOSS_BYTES = (8, 6)
"""Bytes per logit beyond what the matmul writes, forward and backward: fused cross entropy reads 16
bits twice."""


def head_passes(
    work: ModelWork, cluster: Cluster, parallelism: Parallelism
) -> tuple[ComputeSeconds, ComputeSeconds]:
    """The head and the loss, forward and backward."""
    tokens = local_tokens(work.seq_len, parallelism)
    ranks = np.asarray(parallelism.tensor_columns) * parallelism.head_ranks
    local = work.vocab / ranks
    width = work.width / parallelism.tensor_rows
    matmul = kernels.matmul_seconds(cluster, tokens, local, width)
    up, down = (kernels.memory_seconds(cluster, tokens * local * each) for each in LOSS_BYTES)
    return (
        ComputeSeconds(matmul=matmul, elementwise=up),
        ComputeSeconds(matmul=matmul * (1 if parallelism.frozen else 2), elementwise=down),
    )
