"""Block and chunk sizes of the functions of this folder. Without JAX: the planner, which predicts
their memory, reads the same numbers."""

LANES = 128
"""Width of a TPU's vector register: what sequence lengths must be a multiple of."""

BLOCK_SCORES = 2**19
"""Scores of one block of attention, over batch and heads, are at most about this many: they stay in
cache."""

CHUNK_BYTES = 128 * 2**20
CHUNK_TOKENS = 1024
"""Tokens of a chunk of the loss: as many as have float32 logits of `CHUNK_BYTES`, or `CHUNK_TOKENS`
if that is more. Each chunk reads the head and updates its gradient: at C tokens that is about
C / 2 operations per byte, and a GPU or TPU needs about 200 to be limited by compute."""
