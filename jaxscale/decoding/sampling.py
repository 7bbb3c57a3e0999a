"""Sampling of text: a batch of prompts, a cache of keys and values, any layout.

A decoder continues a prompt. An encoder-decoder encodes it, as in training with an end of document,
and the decoder starts with one token, the tokenizer's `decoder_start`.

Letters: B batch, S slots (of a sequence and of the cache), T time, D embed, V vocabulary.
"""

import collections
import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxscale.choices import check_count, check_kind
from jaxscale.config import check_seed
from jaxscale.data.tokens.tokenizer import Tokenizer
from jaxscale.decoding.cache import (
    Source,
    begin_cache,
    check_fits_host,
    logits_of,
    read_chunks,
    round_up,
)
from jaxscale.decoding.placement import row_placement, without_pipeline_or_context
from jaxscale.decoding.prompts import check_decodes, encode_prompts, has_encoder
from jaxscale.models.decoder import Decoder
from jaxscale.models.encoder_decoder import EncoderDecoder
from jaxscale.sharding.resolve import weights_in_use
from jaxscale.sharding.specs import replicated
from jaxscale.training.engine import Engine, check_params

Scalar = float | jax.Array


class Drawing(NamedTuple):
    """Sampling settings, as in `sample`."""

    num_tokens: int
    temperature: float
    top_k: int
    top_p: float


def sample(
    engine: Engine,
    params: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str | np.ndarray],
    *,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[str] = (),
) -> list[str]:
    """Samples a continuation of each prompt, up to the end of the document; of an encoder-decoder,
    the decoder's text.

    Compiles once for each number of prompts and each rounded length. A sample depends on the
    seed and the prompt, not on the other prompts or its position among them; equal prompts get
    different samples.

    Args:
      params: of the engine's state, or in canonical form on any devices, as returned by `fit` and
        `from_pretrained`.
      tokenizer: `tokenizer` of `open_text`.
      prompts: each begins as `data.text_begin` says; "" is a document not yet begun. An encoder's
        are whole documents. Ids, such as those of `encode_messages`, are taken as they are.
      num_tokens: at most this many are added to each prompt.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: samples from the k likeliest tokens only; 0 is all.
      top_p: samples from the likeliest tokens of this total probability only, after temperature
        and top_k (nucleus sampling, arXiv 1904.09751); 1 is all.
      stop: texts or names of special tokens; a continuation ends before the first of them. They do
        not change the tokens before it.

    Returns:
      The text after each prompt, without it.

    Raises:
      ValueError: a setting out of its range, a sequence beyond the model's learned positions, or a
        model that does not decode.

    Examples:
      With `trainer` and `state` of the example of `fit`:

      >>> engine, tokenizer = trainer.engine, trainer.text.tokenizer
      >>> texts = jaxscale.sample(engine, state.params, tokenizer, ["def "], num_tokens=4)
      >>> len(texts)
      1
    """
    drawing = Drawing(num_tokens, temperature, top_k, top_p)
    _check_arguments(engine, params, tokenizer, prompts, drawing, seed, stop)
    # Decoded texts omit special tokens, so these are searched for by their ids.
    named = [tokenizer.special[each] for each in stop if each in tokenizer.special]
    tokenizer = dataclasses.replace(tokenizer, ends=(*tokenizer.ends, *named))
    source, begun = encode_prompts(engine, tokenizer, prompts)
    _check_positions(engine, max(map(len, begun)), num_tokens)
    rows = _draw_rows(engine, params, tokenizer, source, begun, drawing, seed)
    texts = [
        _continuation(tokenizer, row[: len(ids) + num_tokens], len(ids))
        for row, ids in zip(rows, begun)
    ]
    return [_before(text, stop) for text in texts]


def filtered_logits(
    logits_BV: jax.Array, temperature: Scalar, top_k: Scalar, top_p: Scalar
) -> jax.Array:
    """The logits of the distribution that tokens are drawn from, [B, V]; -inf is never drawn.

    Tokens that tie with the least likely kept token are also kept.

    Args:
      temperature: above 0.
      top_k: at least 1.
      top_p: above 0, at most 1.
    """
    scaled_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / temperature
    sorted_BV = jnp.sort(scaled_BV, axis=-1, descending=True)
    in_k_V = jnp.arange(scaled_BV.shape[-1]) < top_k
    p_BV = jax.nn.softmax(sorted_BV, axis=-1, where=in_k_V)
    # A token is kept if the tokens before it do not reach top_p; with top_p = 1 rounding must not
    # drop the last tokens.
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
    kept_BV = in_k_V & ((before_BV < top_p) | (top_p >= 1))
    least_B1 = jnp.min(sorted_BV, axis=-1, keepdims=True, where=kept_BV, initial=0)
    return jnp.where(scaled_BV >= least_B1, scaled_BV, -jnp.inf)


def _draw_rows(
    engine: Engine,
    params: Any,
    tokenizer: Tokenizer,
    source: Source | None,
    begun: Sequence[np.ndarray],
    drawing: Drawing,
    seed: int,
) -> np.ndarray:
    """The ids with which each text begins, and the drawn ids after them, [B, S].

    Args:
      source: the rows of an encoder.
    """
    batch, longest = len(begun), max(map(len, begun))
    vocab_size = _num_drawable(engine, tokenizer)
    params, mesh = without_pipeline_or_context(engine, params)
    width = round_up(longest - 1) if longest > 1 else 0
    slots = max(width, round_up(longest + drawing.num_tokens))
    model: Any = engine.model
    check_fits_host(model, params, source, batch, slots)
    rows = np.full((batch, slots), tokenizer.boundary, np.int32)
    for row, ids in zip(rows, begun):
        row[: len(ids)] = ids
    drawn = _extend(
        params,
        source,
        rows,
        np.array([len(ids) for ids in begun], np.int32),
        jax.random.key(seed),
        _numbers(begun if source is None else [ids[real > 0] for ids, real in zip(*source)]),
        drawing._replace(  # of types that one program takes
            temperature=float(drawing.temperature),
            top_k=drawing.top_k or vocab_size,
            top_p=float(drawing.top_p),
        ),
        model=model,
        mesh=mesh,
        width=width,
        vocab_size=vocab_size,
        ends=(tokenizer.boundary, *tokenizer.ends),
    )
    return np.asarray(drawn)


def _numbers(prompts: Iterable[np.ndarray]) -> np.ndarray:
    """uint32 for each prompt, from its ids and the number of equal prompts before it."""
    before, found = collections.Counter[bytes](), []
    for ids in prompts:
        text = np.asarray(ids, np.int32).tobytes()
        digest = hashlib.blake2b(text, digest_size=4, salt=before[text].to_bytes(8)).digest()
        found.append(int.from_bytes(digest))
        before[text] += 1
    return np.array(found, np.uint32)


def _num_drawable(engine: Engine, tokenizer: Tokenizer) -> int:
    """The number of the model's tokens, from the first, that the tokenizer also has; with an
    encoder all, as its sentinels may not be in the tokenizer."""
    vocab_size = engine.config.model.vocab_size
    return vocab_size if has_encoder(engine) else min(vocab_size, tokenizer.vocab_size)


@functools.partial(jax.jit, static_argnames=("model", "mesh", "width", "vocab_size", "ends"))
def _extend(
    params: Any,
    source: Source | None,
    tokens_BS: jax.Array,
    lengths_B: jax.Array,
    key: jax.Array,
    numbers_B: jax.Array,
    drawing: Drawing,
    *,
    model: Decoder | EncoderDecoder,
    mesh: Mesh,
    width: int,
    vocab_size: int,
    ends: tuple[int, ...],
) -> jax.Array:
    """The rows with tokens drawn after the first `lengths_B`; one of `ends` ends a text.

    `numbers_B` seed the draws of each row. The first `width` tokens of each row are prefilled; they
    cover every prompt except its last token.
    """
    batch, slots = tokens_BS.shape
    ends_B = lengths_B + drawing.num_tokens
    place = row_placement(mesh, batch)
    params = weights_in_use(model.axes, params, model.settings.compute_dtype)
    cache = begin_cache(model, params, source, batch, slots, place)
    if width:
        # The slot of a token of padding is overwritten before any query attends to it.
        cache, _ = read_chunks(model, params, tokens_BS[:, :width], ends_B, cache, place)
    rows_B = jnp.arange(batch)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers_B)

    def unfinished(carry):
        step, _, done_B, _ = carry
        return (step < drawing.num_tokens) & ~jnp.all(done_B)

    def one(carry):
        step, tokens_BS, done_B, cache = carry
        positions_B = lengths_B - 1 + step
        last_B1 = tokens_BS[rows_B, positions_B][:, None]
        x_B1D, cache = model.decode(params, last_B1, positions_B[:, None], cache, place, ends_B)
        logits_B1V = logits_of(model, params, x_B1D)
        logits_BV = place(logits_B1V[:, 0, :vocab_size], ("batch", "vocab"))
        next_B = _draw(logits_BV, keys_B, step, drawing)
        tokens_BS = tokens_BS.at[rows_B, positions_B + 1].set(next_B)
        done_B |= jnp.isin(next_B, jnp.array(ends))
        return step + 1, tokens_BS, done_B, place(cache, model.cache_axes)

    start = (jnp.zeros((), jnp.int32), tokens_BS, jnp.zeros(batch, bool), cache)
    tokens_BS = jax.lax.while_loop(unfinished, one, start)[1]
    return jax.lax.with_sharding_constraint(tokens_BS, replicated(mesh))


def _draw(logits_BV: jax.Array, keys_B: jax.Array, step: jax.Array, drawing: Drawing) -> jax.Array:
    """The next token of each row; its noise depends on row, step and token."""
    greedy = drawing.temperature == 0
    temperature = jnp.where(greedy, 1, drawing.temperature)
    kept_BV = filtered_logits(logits_BV, temperature, drawing.top_k, drawing.top_p)
    keys_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, step)
    drawn_B = jax.vmap(jax.random.categorical)(keys_B, kept_BV)
    return jnp.where(greedy, jnp.argmax(logits_BV, axis=-1), drawn_B).astype(jnp.int32)


def _continuation(tokenizer: Tokenizer, row: np.ndarray, length: int) -> str:
    """The text of a row after its first `length` ids, up to the end of the document."""
    ends = np.flatnonzero(np.isin(row[length:], (tokenizer.boundary, *tokenizer.ends)))
    end = length + int(ends[0]) if len(ends) else len(row)
    given, whole = (ids[ids < tokenizer.vocab_size] for ids in (row[:length], row[:end]))
    # Decoded together: a token alone may lose a space, or half of a character, at its edge.
    return tokenizer.decode(whole)[len(tokenizer.decode(given)) :]


def _before(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of `stop` that appears in it."""
    found = [i for each in stop if (i := text.find(each)) >= 0]
    return text[: min(found, default=None)]


def _check_arguments(
    engine: Engine,
    params: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str | np.ndarray],
    drawing: Drawing,
    seed: int,
    stop: Sequence[str],
) -> None:
    check_params(engine, params)
    advice = "pass `tokenizer` of the result of jaxscale.open_text"
    check_kind("tokenizer", tokenizer, Tokenizer, advice)
    for name, texts in (("prompts", prompts), ("stop", stop)):
        if isinstance(texts, str):
            raise ValueError(f"{name} = {texts!r} is a string; pass a list, such as [{texts!r}]")
    check_decodes(engine)
    _check_drawing(drawing, _num_drawable(engine, tokenizer))
    check_seed("--seed", seed)
    if not prompts:
        raise ValueError("there is no prompt; give --prompt TEXT or --prompt_file FILE")
    if "" in stop:
        raise ValueError("--stop '' is in every text; give at least one character")


def _check_drawing(drawing: Drawing, vocab_size: int) -> None:
    num_tokens, temperature, top_k, top_p = drawing
    check_count("--num_tokens", num_tokens, 1)
    check_count("--top_k", top_k, 0)
    if not 0 <= temperature < math.inf:
        raise ValueError(
            f"--temperature = {temperature} must be at least 0 (the likeliest token), and finite"
        )
    if top_k > vocab_size:
        raise ValueError(
            f"--top_k = {top_k} must be at least 0 (all tokens) and at most the "
            f"{vocab_size} tokens of the vocabulary"
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"--top_p = {top_p} must be above 0 and at most 1 (all tokens)")


def _check_positions(engine: Engine, longest: int, num_tokens: int) -> None:
    """Refuses texts longer than the learned positions.

    Args:
      longest: tokens of the longest prompt.
    """
    config = engine.config.model
    needs = longest + num_tokens - 1  # the last token drawn is never read
    if config.max_positions is not None and needs > config.max_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and --num_tokens {num_tokens} need {needs} learned "
            f"positions, and model.{config.position_setting} = {config.max_positions}; shorten the "
            "prompt or lower --num_tokens"
        )
