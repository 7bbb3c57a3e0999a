"""Token embedding, with learned positions, token types, and hashed n-grams.

The rows of n-grams are from a table over all devices: at each token those of its last two and last
three tokens are added to its embedding (as in arXiv 2501.16975). N-grams do not cross documents.

Letters: B batch, T time, S the times compared with, D embed.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.models.adapters.lora import rows_of
from jaxscale.models.adapters.prompt import prompt_of
from jaxscale.models.block import Norm
from jaxscale.models.protocol import EmbeddingTable
from jaxscale.models.weights import Weights

TRAINING_MASKS = 0.15 * 0.8
"""The fraction of tokens masked in ESM-2's training."""

NGRAM_LENGTHS = (2, 3)
"""Tokens of the n-grams."""

NGRAM_NAMES = tuple(f"ngram_{length}" for length in NGRAM_LENGTHS)
"""Of their ids in `Batch.extras`, and of their rows in `Batch.vectors`."""


class Embedding(nnx.Module):
    """Embeds tokens, and learned positions and token types if configured."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        weights = Weights(config, key)
        self.tokens = weights.normal("vocab", "embed")
        self.tokens_lora = rows_of(config, weights)
        self.prompt = prompt_of(config, weights, self.tokens)
        learned = config.positions == "learned"
        self.positions = weights.normal("positions", "embed") if learned else None
        types = config.token_types
        self.token_types = weights.normal("token_types", "embed") if types else None
        self.norm = Norm(config, weights) if config.embedding_norm else None
        # MTP modules read the normalised stream, so the norm is here and the head borrows it.
        shares = config.final_norm and config.prediction_depth
        self.final_norm = Norm(config, weights) if shares else None
        self.scale = math.sqrt(config.d_model) if config.scaled_embedding else None
        self.compute_dtype, self.dropped = config.compute_dtype, config.dropped_token
        self.causal = config.causal

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        lookup: Callable,
        segments_BT: jax.Array | None = None,
        types_BT: jax.Array | None = None,
    ) -> jax.Array:
        """The stream [batch, time, d_model].

        Args:
          segments_BT: texts, for `dropped_token`; None where the model is causal.
          types_BT: token types; None is type 0 everywhere.
        """

        def embed(tokens_BT: jax.Array) -> jax.Array:
            return lookup(self.tokens[...], tokens_BT, "vocab", self.compute_dtype)

        if self.prompt is None:
            x_BTD = embed(tokens_BT)
        else:
            x_BTD = self.prompt(tokens_BT, lookup, embed, self.compute_dtype)
        if self.tokens_lora is not None:
            x_BTD += self.tokens_lora(tokens_BT, lookup, self.compute_dtype)
        if self.dropped >= 0:
            # A causal model must not know how many tokens after it are masked.
            texts_BT = None if self.causal else segments_BT
            x_BTD *= dropped_scale(tokens_BT == self.dropped, texts_BT).astype(x_BTD.dtype)
        if self.scale is not None:
            # The factor is rounded to the compute type, as in Gemma's own code.
            x_BTD *= jnp.asarray(self.scale, x_BTD.dtype)
        if self.token_types is not None and types_BT is not None:
            table = self.token_types[...]
            x_BTD += lookup(table, types_BT, "token_types", self.compute_dtype)
        elif self.token_types is not None:
            x_BTD += self.token_types[...][0].astype(x_BTD.dtype)
        if self.positions is not None:
            table = self.positions[...]
            x_BTD += lookup(table, positions_BT, "positions", self.compute_dtype)
        return x_BTD if self.norm is None else self.norm(x_BTD)


def dropped_scale(dropped_BT: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
    """ESM-2's token dropout (Lin et al. 2023): factors of the embeddings, [batch, time, 1].

    Dropped tokens have 0. The others of a text are rescaled as if the fraction dropped in training
    were dropped. Without segments the rescaling ignores how many are dropped.
    """
    kept_BT = 1.0 - TRAINING_MASKS
    if segments_BT is not None:
        # Comparisons, not a scatter: context parallelism spreads a text's tokens over ranks.
        same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
        length_BT = jnp.sum(same_BTS, axis=-1)
        left_BT = jnp.sum(same_BTS & ~dropped_BT[:, None, :], axis=-1)
        kept_BT *= length_BT / jnp.maximum(left_BT, 1)
    return jnp.where(dropped_BT, 0.0, kept_BT)[..., None]


def ngram_tables(num_rows: int, width: int) -> dict[str, EmbeddingTable]:
    """The table, with initial rows of 0: a new model is one without n-grams."""
    return {"ngrams": EmbeddingTable(num_rows, width, NGRAM_NAMES)} if num_rows else {}


def ngram_fields(num_rows: int, seq_len: int) -> dict[str, tuple[int, Any]]:
    """The arrays of `with_ngrams`: name -> (length, type)."""
    return dict.fromkeys(NGRAM_NAMES, (seq_len, jnp.int32)) if num_rows else {}


def with_ngrams(batch: Batch, num_rows: int) -> Batch:
    """Adds the ids of each token's n-grams to a batch on the host; -1 where its document begins
    less than n - 1 tokens before, and for padding."""
    extras = dict(batch.extras)
    for name, length in zip(NGRAM_NAMES, NGRAM_LENGTHS):
        inside = batch.segments != 0
        mixed = np.full(batch.tokens.shape, length, np.uint64)
        for back in range(length):
            earlier = np.roll(batch.tokens, back, axis=1).astype(np.uint64)
            inside &= np.roll(batch.segments, back, axis=1) == batch.segments
            inside[:, :back] = False
            mixed = _mix(mixed + earlier)
        ids = (mixed % np.uint64(num_rows)).astype(np.int32)
        extras[name] = np.where(inside, ids, np.int32(-1))
    return batch._replace(extras=extras)


def ngram_vectors(batch: Batch, dtype: Any) -> jax.Array | None:
    """The sum of the rows of each token's n-grams, [batch, time, width]; None without."""
    found = [
        batch.vectors[name].astype(dtype) for name in NGRAM_NAMES if name in dict(batch.vectors)
    ]
    return functools.reduce(jnp.add, found) if found else None


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit integers that changes half of the bits: splitmix64 (Steele et al.
    2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
