"""Records of batches, which data produces and models consume."""

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Packed sequences; every field but the last two is [batch, seq] (NumPy or JAX arrays).

    Tokens attend only to tokens of the same segment; segment 0 is padding. The loss of a position
    is multiplied by its weight, which is 0 where there is nothing to predict.
    """

    tokens: Any  # int32
    targets: Any  # int32, the token that follows in the same document
    segments: Any  # int32, from 1 in each row; 0 is padding
    positions: Any  # int32, from 0 in each document
    weights: Any  # float32
    extras: Any = ()  # or more arrays by name, [batch, a length of their own], for the model
    noise: Any = ()  # or uint32 [batch], made by a step whose model drops activations


class ShardedBatch(Batch):
    """A batch on the mesh, as `Engine.shard` returns it; `Engine.step` and `Engine.evaluate` take
    nothing else.

    With context parallelism the tokens of a sequence are not in the order of the text.
    """
