"""Memory traffic of a layer outside its matmuls: norms, residual additions, positions, activations,
casts, and the permutation of tokens for experts. Counted per kernel and token, for 16-bit
activations."""

from typing import Any

import numpy as np

from jaxscale.planner.cost import kernels
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.model.shape import ModelShape

Floats = Any  # a float, or float [N]


def elementwise_seconds(
    shape: ModelShape, cluster: Cluster, parallelism: Parallelism, tokens: Floats
) -> tuple:
    """Norms, residual, positions, activation, casts: forward and backward of an average layer of a
    decoder."""
    traits, t, d = parallelism.traits, np.asarray(parallelism.tensor), shape.d_model
    streams = t if traits.sequence_parallel else 1.0
    heads = shape.head_dim * (shape.heads + shape.kv_heads)
    stream, back = STREAM_BYTES[
        "fused" if traits.fused else "dropout" if traits.dropout else "plain"
    ]
    blocks = 3 if shape.encoder_layers else 2  # with cross attention
    stream, back = stream * d * blocks / 2, back * d * blocks / 2
    moe = shape.expert_layers / shape.layers
    dense = (shape.with_mlp - shape.expert_layers) / shape.layers
    wide = shape.d_ff * dense + moe * (
        shape.expert_ff * shape.top_k * parallelism.imbalance + shape.shared_width
    )
    gated = shape.expert_gated if shape.experts else shape.gated
    activation = (6 * wide, 10 * wide) if gated else (4 * wide, 8 * wide)
    rotated = 0 if shape.learned_positions else 4 * heads
    copies, (routed, routed_back) = _expert_bytes(shape, parallelism)
    mixed, mixed_back = _mixer_bytes(shape)
    columns = parallelism.tensor_columns
    forward = stream / streams + (activation[0] + rotated) / columns + mixed / t + routed
    backward = back / streams + (activation[1] + rotated) / columns + mixed_back / t + routed_back
    casts = _cast_elements(shape, parallelism, wide / t, (2 if gated else 1) * wide / t, copies)
    return tuple(
        kernels.memory_seconds(cluster, tokens * width, plain=traits.eager)
        + kernels.cast_seconds(cluster, tokens * elements, traits.matmul)
        for width, elements in zip((forward, backward), casts)
    )


def _expert_bytes(shape: ModelShape, parallelism: Parallelism) -> tuple:
    """Elements of a token's copies for its experts, and the bytes that routing and unfused kernels
    of experts move, forward and backward."""
    traits = parallelism.traits
    share = parallelism.tensor if traits.folded_experts else 1
    each = shape.expert_layers / shape.layers * shape.top_k * parallelism.imbalance / share
    copies = each * shape.routed_width
    router = shape.expert_layers / shape.layers * ROUTER_BYTES * shape.experts
    routed = ROUTED_BYTES[traits.fused_experts] * copies + router
    if not traits.plain_experts:
        return copies, (routed, routed)
    inner = each * shape.expert_ff
    return copies, tuple(routed + a * inner + b * copies for a, b in PLAIN_EXPERT_BYTES)


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

SCAN_CHUNK = 128
"""Chunk length of a state-space scan, whose states are written (Mamba-2's SSD kernels)."""


def _mixer_bytes(shape: ModelShape) -> tuple[float, float]:
    """Convolution, scan with its 32-bit states, and gated norm of state-space mixers; the backward
    pass reads what the forward pass wrote and writes gradients: two and a half times as much."""
    if not shape.mixer:
        return 0.0, 0.0
    inner = shape.mixer.heads * shape.mixer.head_dim
    states = 2 * shape.mixer.groups * shape.mixer.state
    convolution = 4 * (inner + states)
    scan = 2 * (2 * inner + states) + 3 * 4 * inner * shape.mixer.state / SCAN_CHUNK
    share = shape.mixer.layers / shape.layers
    forward = share * (convolution + scan + 6 * inner)
    return forward, 2.5 * forward


def _cast_elements(
    shape: ModelShape, parallelism: Parallelism, wide: Floats, opened: Floats, copies: Floats
):
    """Elements of a token that are cast to fewer bits: inputs of matmuls in the forward pass,
    output gradients in the backward pass. `wide` enter an MLP's last matmul, `opened` leave its
    first."""
    d, t = shape.d_model, parallelism.tensor
    heads = shape.heads * shape.head_dim
    keys = 2 * shape.kv_heads * shape.head_dim
    return (2 * d + heads) / t + wide + copies, (2 * d + heads + keys) / t + opened + copies
