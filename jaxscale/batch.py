"""Records of batches, which data produces and models consume."""

from typing import Any, NamedTuple


class Within(NamedTuple):
    """The place of a batch whose rows are parts of longer rows."""

    begin: Any  # int32, position of the parts' first tokens in their rows
    segments: Any  # as in `Batch`, of the longer rows


class Batch(NamedTuple):
    """A batch of packed sequences: NumPy or JAX arrays of shape [batch, seq].

    Tokens attend only to tokens of the same segment.

    Attributes:
      tokens: int32 token ids.
      targets: int32, the next token of the same document.
      segments: int32 document numbers, from 1 in each row; 0 is padding.
      positions: int32, from 0 in each document.
      weights: float32 factors of each position's loss; 0 without a target.
      extras: name -> further array [batch, length] for the model; () without.
      noise: uint32 [batch], made by the step of a model with dropout; () without.
      within: `Within`, in a pipeline that splits sequences; () for whole rows.
      vectors: name in `extras` -> [batch, length, width], the rows of a model's tables, made by the
        step for `Stack.enter`; () without.

    Examples:
      >>> tokens = np.array([[5, 6, 7, 8]], np.int32)
      >>> segments, weights = np.ones_like(tokens), np.float32([[1, 1, 1, 0]])
      >>> targets, positions = np.roll(tokens, -1), np.arange(4, dtype=np.int32)[None]
      >>> jaxscale.Batch(tokens, targets, segments, positions, weights).weights.sum()
      np.float32(3.0)
    """

    tokens: Any
    targets: Any
    segments: Any
    positions: Any
    weights: Any
    extras: Any = ()
    noise: Any = ()
    within: Any = ()
    vectors: Any = ()


class ShardedBatch(Batch):
    """A batch on the mesh: the result of `Engine.shard`, the argument of `Engine.step`.

    With context parallelism the tokens of a sequence are in the order of the ranks' chunks, not in
    the order of the text.

    Examples:
      >>> config, engine = jaxscale.open_engine(jaxscale.load("tiny"))
      >>> rows = np.ones((config.data.global_batch_size, config.data.seq_len), np.int32)
      >>> batch = jaxscale.Batch(rows, rows, rows, 0 * rows, np.ones(rows.shape, np.float32))
      >>> type(engine.shard(batch)).__name__
      'ShardedBatch'
    """
