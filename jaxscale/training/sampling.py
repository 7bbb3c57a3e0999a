"""Text from a model: a batch of prompts, a cache of keys and values, any layout.

A decoder continues a prompt. Of an encoder-decoder the encoder reads it, as in training with an end
of document, and the decoder begins with one token, the tokenizer's `decoder_start`.

Letters: B batch, S slots (places in a sequence and in the cache), T time, V vocabulary.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxscale.choices import check_count, check_kind
from jaxscale.config import check_seed
from jaxscale.data.text.chat_template import Messages
from jaxscale.data.tokens.tokenizer import SENTINEL, Tokenizer
from jaxscale.formatting import gigabytes
from jaxscale.hardware import host_memory_bytes
from jaxscale.layout import TENSOR_ROWS
from jaxscale.models.decoder import Decoder
from jaxscale.models.encoder_decoder import EncoderDecoder
from jaxscale.models.positions import for_length
from jaxscale.models.protocol import head_params
from jaxscale.sharding.resolve import (
    ACTIVATIONS,
    WEIGHTS,
    Axes,
    is_axes,
    resolve,
    resolve_tree,
    weights_in_use,
    whole_kv_heads,
)
from jaxscale.sharding.specs import replicated
from jaxscale.training.engine import Engine, check_params

CHUNK = 256
"""Tokens of each prompt that are prefilled at a time; bounds the memory of their attention."""

Place = Callable[[Any, Any], Any]
Source = tuple[Any, Any]
"""Tokens that an encoder reads, and their segments: 1, or 0 for padding; [B, length] both."""
Scalar = float | jax.Array


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
    """Continues each prompt with the model, up to the end of the document; with an encoder, writes
    what follows from it.

    Everything is compiled once for each shape: of the batch, and of the lengths rounded up. What
    is drawn for a prompt depends on the seed and its place in the batch, not on the others.

    Args:
      params: of the engine's state, or in canonical form, as `fit` and checkpoints give them.
      prompts: each begins a document; "" is a document not yet begun. An encoder's are whole
        documents. Ids, such as those of `encode_messages`, are taken as they are.
      num_tokens: at most this many are added to each prompt.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: samples only from the k likeliest tokens; 0 is all.
      top_p: samples only from the likeliest tokens that together reach this share of the
        probability, after temperature and top_k (nucleus sampling, arXiv 1904.09751); 1 is all.
      stop: a text ends before the first of these that appears in it. They are looked for at the
        end: what is drawn does not depend on them.

    Returns:
      The text after each prompt, without it.

    Raises:
      ValueError: a setting out of its range, a sequence beyond the model's learned positions, or a
        model that does not decode.
    """
    check_params(engine, params)
    check_kind("tokenizer", tokenizer, Tokenizer, "pass that of what jaxscale.open_text returns")
    for name, texts in (("prompts", prompts), ("stop", stop)):
        if isinstance(texts, str):
            raise ValueError(f"{name} = {texts!r} is one text; pass a list, such as [{texts!r}]")
    check_decodes(engine)
    config, ends = engine.config.model, (tokenizer.boundary, *tokenizer.ends)
    vocab_size = config.vocab_size  # an encoder-decoder's sentinels may not be the tokenizer's
    if not has_encoder(engine):
        vocab_size = min(vocab_size, tokenizer.vocab_size)
    _check_settings(num_tokens, temperature, top_k, top_p, seed, vocab_size)
    if not prompts:
        raise ValueError("there is no prompt; give --prompt TEXT or --prompt_file FILE")
    if "" in stop:
        raise ValueError("--stop '' is in every text; name at least one character")
    source, ids = None, [prompt_ids(engine, tokenizer, prompt) for prompt in prompts]
    _check_ids(ids, config.vocab_size)
    if has_encoder(engine):
        source, ids = source_rows(ids), [np.array([tokenizer.decoder_start])] * len(ids)
    longest = max(map(len, ids))
    # The last token drawn is never read.
    if config.positions == "learned" and longest + num_tokens - 1 > config.max_seq_len:
        raise ValueError(
            f"a prompt of {longest} tokens and --num_tokens {num_tokens} need "
            f"{longest + num_tokens - 1} learned positions, and the model has "
            f"model.max_seq_len = {config.max_seq_len}; shorten the prompt or lower --num_tokens"
        )
    params, mesh = without_pipeline_or_context(engine, params)
    model = for_length(engine.model, longest + num_tokens)
    width = round_up(longest - 1) if longest > 1 else 0
    slots = max(width, round_up(longest + num_tokens))
    _check_room(model, params, source, len(ids), slots)
    rows = np.full((len(ids), slots), tokenizer.boundary, np.int32)
    for row, tokens in zip(rows, ids):
        row[: len(tokens)] = tokens
    rows = _extend(
        params,
        source,
        rows,
        np.array([len(tokens) for tokens in ids], np.int32),
        jax.random.key(seed),
        num_tokens,
        float(temperature),
        top_k or vocab_size,
        float(top_p),
        model=model,
        mesh=mesh,
        width=width,
        vocab_size=vocab_size,
        ends=ends,
    )
    texts = [
        _continuation(tokenizer, row[: len(tokens) + num_tokens], len(tokens))
        for row, tokens in zip(np.asarray(rows), ids)
    ]
    return [
        text[: min((i for s in stop if (i := text.find(s)) >= 0), default=None)] for text in texts
    ]


def has_encoder(engine: Engine) -> bool:
    """Whether the model reads a prompt with an encoder."""
    return isinstance(engine.model, EncoderDecoder)


def check_decodes(engine: Engine) -> None:
    """Refuses a model that does not predict one token after the other.

    Raises:
      ValueError: with what such a model can do.
    """
    model = engine.config.model
    if not getattr(model, "causal", True):
        raise ValueError(
            f"model.family = {model.family!r} is not causal here: it fills in masked tokens, and "
            "neither continues a text nor scores continuations; call jaxscale.from_pretrained(DIR)"
        )
    if not getattr(engine.model, "can_decode", False):
        raise ValueError(
            f"model.family = {model.family!r} neither draws nor scores text: its blocks have no "
            "decode()"
        )


def encode_messages(tokenizer: Tokenizer, messages: Messages) -> np.ndarray:
    """The ids of a conversation by the tokenizer's chat template, up to where the assistant speaks.

    Raises:
      ValueError: there is no template, or it refuses the conversation.
    """
    if tokenizer.template is None or tokenizer.encode_chat is None:
        raise ValueError(
            f"--messages: data.tokenizer = {tokenizer.name!r} has no chat template; it is read "
            "from the chat_template.jinja or tokenizer_config.json beside a tokenizer.json"
        )
    try:
        text = tokenizer.template.render(messages, add_generation_prompt=True)
    except ValueError as error:
        raise ValueError(f"--messages: the conversation {error}") from error
    return tokenizer.encode_chat(text).ids


def prompt_ids(engine: Engine, tokenizer: Tokenizer, prompt: str | np.ndarray) -> np.ndarray:
    """The ids of a prompt as in training: behind the token that begins a document, or, for an
    encoder, before the one that ends it. In what an encoder reads, the name of a sentinel is it."""
    if not isinstance(prompt, str):
        return np.asarray(prompt, np.int32)
    (ids,) = tokenizer.encode([prompt])
    if not has_encoder(engine):
        return np.append(np.int32(tokenizer.start), ids)
    names = map(SENTINEL.format, range(len(tokenizer.sentinels)))
    if tokenizer.encode_chat and any(name in prompt for name in names):
        ids = tokenizer.encode_chat(prompt).ids
    return np.append(ids, np.int32(tokenizer.boundary))


def source_rows(prompts: Sequence[np.ndarray], num_rows: int = 0) -> Source:
    """What an encoder reads, from the ids of each prompt; further rows, up to `num_rows`, are
    padding."""
    width = round_up(max(map(len, prompts)))
    tokens = np.zeros((max(num_rows, len(prompts)), width), np.int32)
    segments = np.zeros_like(tokens)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
    return tokens, segments


def without_pipeline_or_context(engine: Engine, params: Any) -> tuple[Any, Mesh]:
    """The parameters, in canonical form, and a mesh of the same devices without the axes pipeline
    and context: their ranks shard every layer instead, as those of fsdp do.

    Otherwise every rank would fetch each layer from the rank of the pipeline that holds it, and the
    compiler's partitioner crashes on some arrays that are sharded over both axes; and those of
    context would have no tokens of their own.
    """
    params = engine.placement.part("params").to_canonical(params)
    sizes, names = engine.layout.sizes, engine.mesh.axis_names
    if sizes["pipeline"] == sizes["context"] == 1:
        return params, engine.mesh
    # Weights are divided by context before fsdp.
    devices = np.moveaxis(engine.mesh.devices, names.index("context"), names.index("fsdp"))
    sizes["fsdp"], sizes["context"] = sizes["context"] * sizes["fsdp"], 1
    rules = engine.zero.state_rules
    if sizes["pipeline"] > 1:
        ranks, sizes["pipeline"] = sizes["pipeline"] * sizes["data"], 1
        shards = sizes.get(TENSOR_ROWS, 1) * ranks * sizes["fsdp"]
        if engine.config.model.d_model % shards == 0:
            sizes["data"], sizes["fsdp"], rules = 1, ranks * sizes["fsdp"], WEIGHTS
        else:
            sizes["data"] = ranks
    mesh = Mesh(
        devices.reshape([sizes[axis] for axis in names]), names, axis_types=engine.mesh.axis_types
    )
    axes = whole_kv_heads(engine.model.axes, params, mesh.shape)
    shardings = resolve_tree(axes, rules, mesh, params)
    return jax.device_put(params, shardings), mesh


def printable(text: str) -> str:
    """The text with control characters escaped, which a terminal would obey."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def filtered_logits(
    logits_BV: jax.Array, temperature: Scalar, top_k: Scalar, top_p: Scalar
) -> jax.Array:
    """The logits of the distribution that tokens are drawn from, [B, V]; -inf is never drawn.

    Tokens that tie with the least likely one that is kept are kept too.

    Args:
      temperature: above 0.
      top_k: at least 1.
      top_p: above 0, at most 1.
    """
    scaled_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / temperature
    sorted_BV = jnp.sort(scaled_BV, axis=-1, descending=True)
    in_k_V = jnp.arange(scaled_BV.shape[-1]) < top_k
    p_BV = jax.nn.softmax(sorted_BV, axis=-1, where=in_k_V)
    # A token is kept as long as those before it do not reach top_p; with top_p = 1 rounding must
    # not drop the last tokens.
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
    kept_BV = in_k_V & ((before_BV < top_p) | (top_p >= 1))
    least_B1 = jnp.min(sorted_BV, axis=-1, keepdims=True, where=kept_BV, initial=0)
    return jnp.where(scaled_BV >= least_B1, scaled_BV, -jnp.inf)


@functools.partial(jax.jit, static_argnames=("model", "mesh", "width", "vocab_size", "ends"))
def _extend(
    params: Any,
    source: Source | None,
    tokens_BS: jax.Array,
    lengths_B: jax.Array,
    key: jax.Array,
    num_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    *,
    model: Decoder | EncoderDecoder,
    mesh: Mesh,
    width: int,
    vocab_size: int,
    ends: tuple[int, ...],
) -> jax.Array:
    """The rows with the tokens drawn after the first `lengths_B`; one of `ends` ends a text.

    The first `width` tokens of each row are prefilled; they cover every prompt but its last token.
    """
    batch, slots = tokens_BS.shape
    place = row_placement(mesh, batch)
    params = weights_in_use(model.axes, params, model.settings.compute_dtype)
    cache = begin_cache(model, params, source, batch, slots, place)
    if width:
        cache = _prefill(model, params, tokens_BS[:, :width], cache, place)
    rows_B = jnp.arange(batch)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, rows_B)

    def unfinished(carry):
        step, _, done_B, _ = carry
        return (step < num_tokens) & ~jnp.all(done_B)

    def one(carry):
        step, tokens_BS, done_B, cache = carry
        places_B = lengths_B - 1 + step
        last_B1 = tokens_BS[rows_B, places_B][:, None]
        x_B1D, cache = model.decode(params, last_B1, places_B[:, None], cache, place)
        logits_B1V = logits_of(model, params, x_B1D)
        logits_BV = place(logits_B1V[:, 0, :vocab_size], ("batch", "vocab"))
        next_B = _draw(logits_BV, keys_B, step, temperature, top_k, top_p)
        tokens_BS = tokens_BS.at[rows_B, places_B + 1].set(next_B)
        done_B |= jnp.isin(next_B, jnp.array(ends))
        return step + 1, tokens_BS, done_B, place(cache, model.cache_axes)

    start = (jnp.zeros((), jnp.int32), tokens_BS, jnp.zeros(batch, bool), cache)
    tokens_BS = jax.lax.while_loop(unfinished, one, start)[1]
    return jax.lax.with_sharding_constraint(tokens_BS, replicated(mesh))


def _check_room(
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
        return begin_cache(model, params, source, batch, slots, _unplaced)

    cache = jax.eval_shape(begin, params, source)
    needs = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    limit = host_memory_bytes()
    if needs / jax.process_count() > limit:
        raise ValueError(
            f"the keys and values of {batch} texts of {slots} tokens need {gigabytes(needs)}, and "
            f"this host has {gigabytes(limit)} of memory: lower --num_tokens, or give fewer prompts"
        )


def _unplaced(tree: Any, axes: Any) -> Any:
    return tree


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


def logits_of(model: Decoder | EncoderDecoder, params: Any, x_BTD: jax.Array) -> jax.Array:
    """The model's logits of what its layers return, float32 [B, T, V]."""
    return model.logits(head_params(model, params), x_BTD)


def _prefill(
    model: Decoder | EncoderDecoder, params: Any, tokens_BT: jax.Array, cache: Any, place: Place
) -> Any:
    """The cache filled with the prompts, and with the padding of the shorter ones.

    The slot of a padding token is overwritten before any query attends to it.
    """
    width = tokens_BT.shape[1]
    chunk = min(width, CHUNK)

    def one(cache, start):
        part_BT = jax.lax.dynamic_slice_in_dim(tokens_BT, start, chunk, axis=1)
        positions_BT = jnp.broadcast_to(start + jnp.arange(chunk), part_BT.shape)
        _, cache = model.decode(params, part_BT, positions_BT, cache, place)
        return place(cache, model.cache_axes), None

    return jax.lax.scan(one, cache, jnp.arange(0, width, chunk))[0]


def _draw(logits_BV, keys_B, step, temperature, top_k, top_p) -> jax.Array:
    """The next token of each row; noise belongs to a row, a step and a token."""
    greedy = temperature == 0
    kept_BV = filtered_logits(logits_BV, jnp.where(greedy, 1, temperature), top_k, top_p)
    keys_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, step)
    drawn_B = jax.vmap(jax.random.categorical)(keys_B, kept_BV)
    return jnp.where(greedy, jnp.argmax(logits_BV, axis=-1), drawn_B).astype(jnp.int32)


def row_placement(mesh: Mesh, batch: int) -> Place:
    """Spreads arrays by logical axes: heads over tensor, slots of a cache over context, and rows
    where they divide.

    What it returns takes a tree of arrays, and their axes: those of all of them, or a tree of axes
    for parts of it.
    """
    replicas = math.prod(mesh.shape[axis] for axis in ACTIVATIONS["batch"])
    rules = {**ACTIVATIONS, "layers": (), "vocab": (), "whole_kv_heads": ()}
    # The tokens of a row that are read together are not spread, those in the cache are.
    rules |= {"slots": ACTIVATIONS["seq"], "seq": (), "residual_seq": ()}
    if batch % replicas:
        rules["batch"] = ()

    def constrain(axes: Axes, leaf: jax.Array) -> jax.Array:
        spec = resolve(whole_kv_heads(axes, leaf, mesh.shape), rules, mesh.shape)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    def place(tree: Any, axes: Any) -> Any:
        def part(axes: Axes, leaves: Any) -> Any:
            return jax.tree.map(functools.partial(constrain, axes), leaves)

        return jax.tree.map(part, axes, tree, is_leaf=is_axes)

    return place


def round_up(length: int) -> int:
    """To a power of two up to a chunk, then to whole chunks, so that few shapes are compiled."""
    if length > CHUNK:
        return -(-length // CHUNK) * CHUNK
    return max(16, 1 << (length - 1).bit_length())


def _continuation(tokenizer: Tokenizer, row: np.ndarray, length: int) -> str:
    ends = np.flatnonzero(np.isin(row[length:], (tokenizer.boundary, *tokenizer.ends)))
    end = length + int(ends[0]) if len(ends) else len(row)
    given, whole = (ids[ids < tokenizer.vocab_size] for ids in (row[:length], row[:end]))
    # Decoded together: a token alone may lose a space, or half of a character, at its edge.
    return tokenizer.decode(whole)[len(tokenizer.decode(given)) :]


def _check_ids(prompts: Sequence[np.ndarray], vocab_size: int) -> None:
    """Refuses what a lookup on a device would clip without a word."""
    for i, ids in enumerate(prompts):
        if ids.ndim != 1 or not ids.size:
            raise ValueError(f"prompts[{i}] has shape {ids.shape}; ids are of shape [at least 1]")
        if not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(
                f"prompts[{i}] has ids from {ids.min()} to {ids.max()}; they must be at least 0 "
                f"and below model.vocab_size = {vocab_size}"
            )


def _check_settings(
    num_tokens: int, temperature: float, top_k: int, top_p: float, seed: int, vocab_size: int
) -> None:
    check_count("--num_tokens", num_tokens, 1)
    check_count("--top_k", top_k, 0)
    if not 0 <= temperature < math.inf:
        raise ValueError(
            f"--temperature = {temperature} must be a number from 0 (the likeliest token) up"
        )
    if top_k > vocab_size:
        raise ValueError(
            f"--top_k = {top_k} must be at least 0 (all tokens) and at most the "
            f"{vocab_size} tokens of the vocabulary"
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"--top_p = {top_p} must be above 0 and at most 1 (all tokens)")
    check_seed("--seed", seed)
