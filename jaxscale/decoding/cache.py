"""Prefill of the cache of keys and values, in any layout.

Letters: B batch, S slots (of a sequence and of the cache), T time, D embed, V vocabulary.
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
"""Tokens of each row that are read at a time, which bounds the memory of attention."""

Source = tuple[Any, Any]
"""Tokens for an encoder, and their segments, 1 or 0 for padding; both [B, length]."""


def round_up(length: int) -> int:
    """Rounds up to a power of two up to a chunk, then to whole chunks, to compile few shapes."""
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
    """A cache without tokens of the decoder; `source` is for an encoder."""
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
    """Reads rows from their start, a chunk at a time.

    Args:
      tokens_BT: with a length from `round_up`.
      lengths_B: of each text, with the tokens to be generated.
      of_chunk: function of the layers' output for a chunk and the position of its first token.

    Returns:
      The cache with the tokens, and the stacked results of `of_chunk`.
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
    """The logits of the layers' output, float32 [B, T, V]."""
    return model.logits(head_params(model, params), x_BTD)


def check_fits_host(
    model: Decoder | EncoderDecoder, params: Any, source: Source | None, batch: int, slots: int
) -> None:
    """Refuses texts whose cache exceeds the memory of a host of CPUs, which would kill the process
    silently; an accelerator's allocator raises an error.

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
