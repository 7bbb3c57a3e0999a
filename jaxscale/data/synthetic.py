"""Random batches, for timing."""

import numpy as np

from jaxscale.batch import Batch
from jaxscale.config import Config


def synthetic_batch(config: Config) -> Batch:
    """Random tokens, each row one document; for `Engine.shard`."""
    shape = (config.data.global_batch_size, config.data.seq_len)
    random = np.random.default_rng(config.data.seed)
    tokens = random.integers(0, config.model.vocab_size, (shape[0], shape[1] + 1), np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    ones = np.ones(shape, np.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:], ones, positions, ones.astype(np.float32))
