"""Memory traffic of a layer outside its matmuls: norms, residual additions, positions, activations,
casts, and the permutation of tokens for experts. Counted per kernel and token, for 16-bit
activations."""

from typing import Any

import numpy as np

from jaxscale.planner.cost import kernels
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.sharding.model_trace import StackWork

Floats = Any  # a float, or float [N]


def elementwise_seconds(
    work: StackWork, width: int, cluster: Cluster, parallelism: Parallelism, tokens: Floats
) -> tuple:
    """Norms, residual, positions, activation, casts: forward and backward of an average layer.

    Args:
      width: of the residual stream.
    """
    traits, t = parallelism.traits, np.asarray(parallelism.tensor)
    streams = t if traits.sequence_parallel else 1.0
    stream, back = STREAM_BYTES[
        "fused" if traits.fused else "dropout" if traits.dropout else "plain"
    ]
    stream, back = (each * width * work.branches / 2 for each in (stream, back))
    inner = [one.choices * parallelism.imbalance * one.hidden * one.share for one in work.experts]
    hidden = work.hidden + sum(inner)
    opened = work.opened + sum(
        (1 + one.gated) * features for one, features in zip(work.experts, inner)
    )
    # A gate reads two arrays and writes one; backward it reads three and writes two.
    activation = 2 * opened + 2 * hidden, 2 * opened + 6 * hidden
    rotated = 4 * work.rotated
    copies, (routed, routed_back) = _expert_bytes(work, parallelism)
    columns = parallelism.tensor_columns
    # A scan's backward pass reads what the forward pass wrote and writes gradients.
    scanned = work.scan_bytes / t
    forward = stream / streams + (activation[0] + rotated) / columns + scanned + routed
    backward = back / streams + (activation[1] + rotated) / columns + 2.5 * scanned + routed_back
    casts = (
        (work.read + hidden - work.hidden) / t + copies,
        (work.made + opened - work.opened) / t + copies,
    )
    return tuple(
        kernels.memory_seconds(cluster, tokens * moved, plain=traits.eager)
        + kernels.cast_seconds(cluster, tokens * elements, parallelism.matmul)
        for moved, elements in zip((forward, backward), casts)
    )


def _expert_bytes(work: StackWork, parallelism: Parallelism) -> tuple:
    """Elements of a token's copies for its experts, and the bytes that routing and unfused kernels
    of experts move, forward and backward."""
    traits = parallelism.traits
    share, copies, moved = parallelism.tensor if traits.folded_experts else 1, 0.0, [0.0, 0.0]
    for one in work.experts:
        each = one.share * one.choices * parallelism.imbalance / share
        copies = copies + each * one.width
        routed = ROUTED_BYTES[traits.fused_experts] * each * one.width
        routed = routed + one.share * ROUTER_BYTES * one.count
        plain = PLAIN_EXPERT_BYTES if traits.plain_experts else ((0, 0), (0, 0))
        for n, (inside, out) in enumerate(plain):
            moved[n] = moved[n] + routed + inside * each * one.hidden + out * each * one.width
    return copies, tuple(moved)


STREAM_BYTES = {"fused": (16, 24), "dropout": (22, 44), "plain": (32, 44)}
"""Bytes per element of the residual stream, forward and backward. Fused: both norms read the two
terms of the residual addition and write the sum and its norm. With fused bias, dropout and addition
(Megatron): two norms 4 each, two additions 7 each; backward, norms 10, dropouts 5, additions 6 and
bias reductions. Plain kernels: norms 4, additions 6, copies of queries, keys and values 12;
backward, norms 10 and additions 6 each."""

ROUTED_BYTES = {True: 8, False: 16}
"""Bytes per element of a token's copy for one expert in a pass: permute, sort by expert, sort back
and sum, each a read and a write of 16 bits; half of that where the all-to-all kernel sorts."""

PLAIN_EXPERT_BYTES = ((54, 28), (80, 36))
"""Bytes per element inside a routed expert beyond a fused activation, and per output element, where
each bias addition, clamp, sigmoid and multiplication is a kernel, and 32-bit routing weights make
those 32-bit (`TEGroupedMLP._apply_bias` and the unfused branch beside it). Forward: bias and
concatenation 16, clamps 8, gate 14, offset 4, multiplication 6, weight and cast 12; outputs 28."""

ROUTER_BYTES = 48
"""Bytes per token and expert score: softmax, top-k, auxiliary loss and routing maps, a dozen passes
over 32 bits."""
