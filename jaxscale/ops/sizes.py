"""Block and chunk sizes of this folder's functions and of the step.

Without JAX, since the planner reads the same numbers.
"""

from typing import Any

import numpy as np

LANES = 128
"""Width of a TPU's vector register, of which sequence lengths must be a multiple."""

BLOCK_SCORES = 2**20
"""Approximate maximum of scores of one attention block, over batch and heads, to fit a CPU's
cache."""

CHUNK_BYTES = 128 * 2**20
CHUNK_TOKENS = 1024


def loss_chunk_tokens(vocab: Any, features: int = 0) -> Any:
    """Maximum tokens of a chunk of the loss: float32 logits of `CHUNK_BYTES`, but at least
    `CHUNK_TOKENS` and `features`.

    A chunk of C tokens reads the head twice, and reads and writes its float32 gradient: 12 bytes
    for each of D x V elements for any C, plus, in programs for GPUs, 18 bytes for each of C x V
    logits. The matmul that adds to the gradient has at most C / 4 operations per byte, and an H200
    needs 206 to be compute bound. With C = D the first part is a third of the bytes, and the
    float32 logits need as much memory as the head's gradient.

    Args:
      vocab: V, the columns of the head on a rank; an int, or an array for many layouts.
      features: D for chunks of at least D tokens; 0 for short chunks.
    """
    return np.maximum(CHUNK_BYTES // (4 * vocab), max(CHUNK_TOKENS, features))


HIDING_TOKENS = 16_384
"""Tokens of a micro-batch on a rank above which a layer's forward pass takes longer than its
collectives (weights gathered in 2 bytes, gradients reduced in 4). By peak rates a TPU v5p needs
2,600 tokens for that, and a v6e 7,700."""
