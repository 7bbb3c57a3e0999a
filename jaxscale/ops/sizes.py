"""Block and chunk sizes of the functions of this folder, and of the step. Without JAX: the planner,
which predicts their memory, reads the same numbers."""

from typing import Any

import numpy as np

LANES = 128
"""Width of a TPU's vector register: what sequence lengths must be a multiple of."""

BLOCK_SCORES = 2**20
"""Scores of one block of attention, over batch and heads, are at most about this many: they stay in
cache."""

CHUNK_BYTES = 128 * 2**20
CHUNK_TOKENS = 1024


def loss_chunk_tokens(vocab: Any, features: int = 0) -> Any:
    """The most tokens of a chunk of the loss: as many as have float32 logits of `CHUNK_BYTES`, or
    `CHUNK_TOKENS` or `features` if that is more.

    A chunk of C tokens reads the head twice, and reads and writes its float32 gradient: 12 bytes
    for each of D x V elements, whatever C is, beside 18 for each of C x V logits in programs for
    GPUs. The matmul that adds to the gradient has at most C / 4 operations per byte, and an H200
    needs 206 to be limited by compute. With C = D the first part is a third of the bytes, and the
    float32 logits take as much memory as the head's gradient.

    Args:
      vocab: V, the columns of the head on a rank; an int, or an array for many layouts.
      features: D where chunks are to be as long; 0 for short ones.
    """
    return np.maximum(CHUNK_BYTES // (4 * vocab), max(CHUNK_TOKENS, features))


HIDING_TOKENS = 16_384
"""Tokens of a micro-batch on a rank from which its forward pass through a layer takes longer than
the collectives of one layer, which gather weights in 2 bytes and reduce gradients in 4. By peak
rates a TPU v5p needs 2,600 for that, and a v6e 7,700."""
