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

STREAM_BYTES = (16, 24)
"""Bytes per element of the residual stream, forward and backward: both norms read the two terms of
the residual addition and write the sum and its norm."""

ROUTED_BYTES = 16
"""Bytes per element of a token's copy for one expert in a pass: permute, sort by expert, sort back
and sum, each a read and a write of 16 bits."""

ROUTER_BYTES = 48
"""Bytes per token and expert score: softmax, top-k, auxiliary loss and routing maps, a dozen passes
over 32 bits."""


def elementwise_seconds(
    work: StackWork, width: int, cluster: Cluster, parallelism: Parallelism, tokens: Floats
) -> tuple[Floats, ...]:
    """Norms, residual, positions, activation, casts: forward and backward of an average layer.

    Args:
      width: of the residual stream.
    """
    copies = copied_elements(work, parallelism)
    routed = ROUTED_BYTES * copies + router_bytes(work)
    stream = [each * width * work.branches / 2 / parallelism.tensor for each in STREAM_BYTES]
    return tuple(
        kernels.memory_seconds(cluster, tokens * (outside + inside + routed))
        + kernels.cast_seconds(cluster, tokens * elements, parallelism.matmul)
        for outside, inside, elements in zip(
            stream, inner_bytes(work, parallelism), cast_elements(work, parallelism, copies)
        )
    )


def inner_bytes(work: StackWork, parallelism: Parallelism) -> tuple[Floats, Floats]:
    """Bytes of a token that activations, positions and scans move, forward and backward."""
    hidden, opened = _inner_elements(work, parallelism)
    # A gate reads two arrays and writes one; backward it reads three and writes two.
    activation = 2 * opened + 2 * hidden, 2 * opened + 6 * hidden
    rotated, columns = 4 * work.rotated, parallelism.tensor_columns
    # A scan's backward pass reads what the forward pass wrote and writes gradients.
    scanned = work.scan_bytes / np.asarray(parallelism.tensor)
    return (
        (activation[0] + rotated) / columns + scanned,
        (activation[1] + rotated) / columns + 2.5 * scanned,
    )


def cast_elements(work: StackWork, parallelism: Parallelism, copies: Floats) -> tuple:
    """Elements of a token that matmuls of narrower operands cast, forward and backward.

    Args:
      copies: `copied_elements`.
    """
    hidden, opened = _inner_elements(work, parallelism)
    t = np.asarray(parallelism.tensor)
    return (
        (work.read + hidden - work.hidden) / t + copies,
        (work.made + opened - work.opened) / t + copies,
    )


def _inner_elements(work: StackWork, parallelism: Parallelism) -> tuple[Floats, Floats]:
    """Elements of a token inside MLPs and experts that activations write and read."""
    inner = [one.choices * parallelism.imbalance * one.hidden * one.share for one in work.experts]
    gated = sum((1 + one.gated) * features for one, features in zip(work.experts, inner))
    return work.hidden + sum(inner), work.opened + gated


def copied_elements(work: StackWork, parallelism: Parallelism) -> Floats:
    """Elements of a token's copies for its experts."""
    return sum(
        (one.share * one.choices * parallelism.imbalance * one.width for one in work.experts), 0.0
    )


def router_bytes(work: StackWork) -> float:
    """Bytes that routing moves per token and pass."""
    return sum(one.share * ROUTER_BYTES * one.count for one in work.experts)
