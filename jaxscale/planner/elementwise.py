"""Bytes that a layer moves beside its products: norms, residual, positions, activations, casts, and
the copies that experts need. Counted kernel by kernel, of a token, in 16-bit activations."""

from typing import Any

import numpy as np

from jaxscale.planner import compute
from jaxscale.planner.choice import Choice
from jaxscale.planner.machine import Cluster
from jaxscale.planner.shape import Shape

Floats = Any  # a float, or float [N]


def elementwise_seconds(shape: Shape, cluster: Cluster, choice: Choice, tokens: Floats) -> tuple:
    """Norms, residual, positions, activation, casts: forward and backward of a mean layer."""
    traits, t, d = choice.traits, np.asarray(choice.tensor), shape.d_model
    streams = t if traits.sequence_parallel else 1.0
    heads = shape.head_dim * (shape.heads + shape.kv_heads)
    stream, back = STREAM_BYTES[
        "fused" if traits.fused else "dropout" if traits.dropout else "plain"
    ]
    stream, back = stream * d, back * d
    moe = shape.expert_layers / shape.layers
    dense = (shape.with_mlp - shape.expert_layers) / shape.layers
    wide = shape.d_ff * dense + moe * (
        shape.expert_ff * shape.top_k * traits.imbalance
        + shape.shared_experts * (shape.shared_ff or shape.expert_ff)
    )
    gated = shape.expert_gated if shape.experts else shape.gated
    activation = (6 * wide, 10 * wide) if gated else (4 * wide, 8 * wide)
    rotated = 0 if shape.learned_positions else 4 * heads
    copies = moe * shape.top_k * traits.imbalance * shape.routed_width
    copies = copies / (t if traits.folded_experts else 1)
    routed = ROUTED_BYTES[traits.fused_experts] * copies + moe * ROUTER_BYTES * shape.experts
    quantised = _quantised_bytes(shape, choice, wide / t + copies)
    mixed, mixed_back = _mixer_bytes(shape)
    forward = stream / streams + (activation[0] + rotated + mixed) / t + routed + quantised
    backward = back / streams + (activation[1] + rotated + mixed_back) / t + routed + quantised
    return tuple(
        compute.memory_seconds(cluster, tokens * width, plain=traits.eager)
        for width in (forward, backward)
    )


STREAM_BYTES = {"fused": (16, 24), "dropout": (22, 44), "plain": (32, 44)}
"""Of an element of the residual stream, forward and backward. Fused: both norms read what they add
and write it and its norm. With fused bias, dropout and addition (Megatron): two norms 4 each, two
additions 7 each; back, norms 10, dropouts 5, additions 6 and sums for biases. Plain kernels: norms
4, additions 6, and copies of queries, keys and values 12; back, norms 10 and additions 6 each."""

ROUTED_BYTES = {True: 8, False: 16}
"""Of an element of a token's copy for one expert, that a pass moves on its way there and back:
permuted, sorted by expert, sorted back and summed, each a read and a write of 16 bits; half of
them where the exchange does it."""

ROUTER_BYTES = 48
"""Of a token's score for one expert: softmax, choice of the best, auxiliary loss and maps, a dozen
passes over 32 bits."""

SCAN_CHUNK = 128
"""Tokens between the states that a state-space scan writes (Mamba-2's SSD kernels)."""


def _mixer_bytes(shape: Shape) -> tuple[float, float]:
    """Convolution, scan with its 32-bit states, and gated norm of state-space mixers; the way back
    reads what the way there wrote, and writes gradients: two and a half times as much."""
    if not shape.mixer:
        return 0.0, 0.0
    inner = shape.mixer.heads * shape.mixer.head_dim
    states = 2 * shape.mixer.groups * shape.mixer.state
    convolution = 4 * (inner + states)
    scan = 2 * (2 * inner + states) + 3 * 4 * inner * shape.mixer.state / SCAN_CHUNK
    share = shape.mixer.layers / shape.layers
    forward = share * (convolution + scan + 6 * inner)
    return forward, 2.5 * forward


QUANTISED_BYTES = {"bfloat16": 0.0, "fp8": 4.0, "fp4": 7.0}
"""Of an operand's element: read in 16 bits, written along rows and along columns in 8; in 4 bits
read three times, for the largest, for the rows, and rotated for the columns (NVFP4's recipe,
arXiv 2509.25149)."""


def _quantised_bytes(shape: Shape, choice: Choice, wide: Floats) -> Floats:
    """Casts of operands to 8 bits or fewer."""
    operands = (2 * shape.d_model + shape.heads * shape.head_dim) / choice.tensor + wide
    return QUANTISED_BYTES[choice.traits.matmul] * operands
