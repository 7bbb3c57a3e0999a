"""A model reads tokens into a cache of keys and values, in any layout.

Letters: B batch, S slots (places in a sequence and in the cache), T time, D embed, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.decoding.placement import Place
from jaxscale.formatting import gigabytes
from jaxscale.hardware import host_memory_bytes
from jaxscale.models.decoder import Decoder
from jaxscale.models.encoder_decoder import EncoderDecoder
from jaxscale.models.protocol import head_params
from jaxscale.sharding.resolve import weights_in_use

CHUNK = 256
"""Tokens of each row that are read at a time; bounds the memory of their attention."""

Source = tuple[Any, Any]
"""Tokens that an encoder reads, and their segments: 1, or 0 for padding; [B, length] both."""


def round_up(length: int) -> int:
    """To a power of two up to a chunk, then to whole chunks, so that few shapes are compiled."""
    if length > CHUNK:
        return -(-length // CHUNK) * CHUNK
    return max(16, 1 << (length - 1).bit_length())


def begin_cache(
    model: Decoder | EncoderDecoder,
    params: Any,
    source: Source | None,
    batch: int,
    slots: int,
    place: Place,
) -> Any:
    """A cache without a token of the decoder; `source` is what an encoder reads."""
    if isinstance(model, EncoderDecoder):
        assert source is not None, "it has an encoder"
        cache = model.encode(params, *source, slots, place)
    else:
        cache = model.empty_cache(batch, slots)
    return place(cache, model.cache_axes)


def read_chunks(
    model: Decoder | EncoderDecoder,
    params: Any,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    cache: Any,
    place: Place,
    of_chunk: Callable[[jax.Array, jax.Array], Any] = lambda x_BTD, start: None,
) -> tuple[Any, Any]:
    """Reads rows from their beginning, a chunk at a time.

    Args:
      tokens_BT: their length is one that `round_up` gives.
      lengths_B: of each text with the tokens that are still to come.
      of_chunk: what is wanted of a chunk, from what the layers return for it and the place of its
        first token.

    Returns:
      The cache with the tokens, and what is wanted of each chunk, stacked.
    """
    width = tokens_BT.shape[1]
    chunk = min(width, CHUNK)

    def one(cache, start):
        part_BT = jax.lax.dynamic_slice_in_dim(tokens_BT, start, chunk, axis=1)
        positions_BT = jnp.broadcast_to(start + jnp.arange(chunk), part_BT.shape)
        x_BTD, cache = model.decode(params, part_BT, positions_BT, cache, place, lengths_B)
        return place(cache, model.cache_axes), of_chunk(x_BTD, start)

    return jax.lax.scan(one, cache, jnp.arange(0, width, chunk))


def logits_of(model: Decoder | EncoderDecoder, params: Any, x_BTD: jax.Array) -> jax.Array:
    """The model's logits of what its layers return, float32 [B, T, V]."""
    return model.logits(head_params(model, params), x_BTD)


def check_fits_host(
    model: Decoder | EncoderDecoder, params: Any, source: Source | None, batch: int, slots: int
) -> None:
    """Refuses texts whose cache is plainly larger than the memory of a host of CPUs, which would
    kill the process without a word; an accelerator's allocator says so itself.

    Raises:
      ValueError: with both sizes.
    """
    if jax.default_backend() != "cpu":
        return

    def begin(params: Any, source: Source | None) -> Any:
        params = weights_in_use(model.axes, params, model.settings.compute_dtype)
        return begin_cache(model, params, source, batch, slots, lambda tree, axes: tree)

    cache = jax.eval_shape(begin, params, source)
    needs = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    limit = host_memory_bytes()
    if needs / jax.process_count() > limit:
        raise ValueError(
            f"the keys and values of {batch} texts of {slots} tokens need {gigabytes(needs)}, and "
            f"this host has {gigabytes(limit)} of memory: lower --num_tokens, or give fewer prompts"
        )
