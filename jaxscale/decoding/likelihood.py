"""Log-likelihoods of texts, and multiple choice by them.

Letters: B batch, S slots (of a sequence and of the cache), T time, D embed, V vocabulary, C chunks
of a row.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxscale.data.text.dialogue import Question
from jaxscale.data.tokens.encode import encode_pairs
from jaxscale.data.tokens.tokenizer import Tokenizer
from jaxscale.decoding.cache import Source, begin_cache, logits_of, read_chunks, round_up
from jaxscale.decoding.placement import row_placement, without_pipeline_or_context
from jaxscale.decoding.prompts import check_decodes, has_encoder, prompt_ids, source_rows
from jaxscale.models.decoder import Decoder
from jaxscale.models.encoder_decoder import EncoderDecoder
from jaxscale.sharding.resolve import automatic_axes, weights_in_use
from jaxscale.sharding.specs import replicated
from jaxscale.training.engine import Engine

ROWS = 16
"""The approximate number of sequences in a batch."""


@dataclass(frozen=True)
class ChoiceScores:
    """Accuracy of multiple choice by likelihood."""

    num_questions: int
    accuracy: float  # by log-likelihood
    accuracy_by_length: float  # by log-likelihood per UTF-8 byte of the choice

    def standard_error(self, accuracy: float) -> float | None:
        """The standard error of an accuracy; None for one question."""
        n = self.num_questions
        return math.sqrt(accuracy * (1 - accuracy) / (n - 1)) if n > 1 else None


def score_choices(
    engine: Engine, params: Any, tokenizer: Tokenizer, questions: Sequence[Question]
) -> ChoiceScores:
    """Answers each question with the likeliest choice after its prompt.

    Args:
      params: of the engine's state, or in canonical form, as from `fit` and checkpoints.

    Raises:
      ValueError: as `log_likelihoods`.
    """
    pairs = [(one.prompt, choice) for one in questions for choice in one.choices]
    scores = log_likelihoods(engine, params, tokenizer, pairs)
    num_bytes = np.array([len(choice.encode()) for _, choice in pairs])
    ends = np.cumsum([len(one.choices) for one in questions])[:-1]

    def accuracy(values: np.ndarray) -> float:
        found = [part.argmax() for part in np.split(values, ends)]
        return float(np.mean([i == one.answer for i, one in zip(found, questions)]))

    return ChoiceScores(len(questions), accuracy(scores), accuracy(scores / num_bytes))


def log_likelihoods(
    engine: Engine, params: Any, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]
) -> np.ndarray:
    """The log-probability of each second text after the first, in nats; [pairs].

    The first text begins as a prompt, or is for an encoder. The end of the document is not scored.

    Raises:
      ValueError: a text beyond the model's learned positions, or a model that does not decode.
    """
    check_decodes(engine)
    sources, given, ids = _encode(engine, tokenizer, pairs)
    config, longest = engine.config.model, max(map(len, ids)) - 1
    if config.max_positions is not None and longest > config.max_positions:
        raise ValueError(
            f"a prompt and its choice of {longest} tokens need as many learned positions, and "
            f"model.{config.position_setting} = {config.max_positions}; shorten the prompt"
        )
    params, mesh = without_pipeline_or_context(engine, params)
    replicas = mesh.size // math.prod(mesh.shape[axis] for axis in automatic_axes(mesh.shape))
    num_rows = replicas * max(1, ROWS // replicas)
    found = np.zeros(len(ids))
    # Sorted, so that rows of a batch have about the same length.
    order = np.argsort([len(a) + len(b) for a, b in zip(sources, ids)], kind="stable")
    for first in range(0, len(ids), num_rows):
        chosen = order[first : first + num_rows].tolist()
        width = round_up(max(len(ids[i]) for i in chosen) - 1)
        rows = np.zeros((num_rows, width + 1), np.int32)
        bounds = np.zeros((num_rows, 2), np.int32)  # the targets of each row
        for row, i in enumerate(chosen):
            rows[row, : len(ids[i])] = ids[i]
            bounds[row] = given[i] - 1, len(ids[i]) - 1
        source = None
        if has_encoder(engine):
            source = source_rows([sources[i] for i in chosen], num_rows)
        scores = _score(params, source, rows, bounds, model=engine.model, mesh=mesh)
        found[chosen] = np.asarray(scores, np.float64)[: len(chosen)]
    return found


def _encode(
    engine: Engine, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]
) -> tuple[list[np.ndarray], list[int], list[np.ndarray]]:
    """For each pair: the encoder's ids, the number of given ids, and all ids of the decoder."""
    if has_encoder(engine):
        sources = [prompt_ids(engine, tokenizer, first) for first, _ in pairs]
        texts = tokenizer.encode([second for _, second in pairs])  # separately, as in training
        start = np.int32(tokenizer.decoder_start)
        return sources, [1] * len(pairs), [np.append(start, text) for text in texts]
    encoded = encode_pairs(tokenizer, pairs)
    prompt = tokenizer.prompt
    begins = [np.array((*prompt, *tokenizer.begin(len(one))), np.int32) for one, _ in encoded]
    given = [len(begin) + len(first) for begin, (first, _) in zip(begins, encoded)]
    ids = [np.concatenate([begin, *pair]) for begin, pair in zip(begins, encoded)]
    nothing = [np.zeros(0, np.int32)] * len(pairs)
    return nothing, given, ids


@functools.partial(jax.jit, static_argnames=("model", "mesh"))
def _score(
    params: Any,
    source: Source | None,
    tokens_BS: jax.Array,
    bounds_B2: jax.Array,
    *,
    model: Decoder | EncoderDecoder,
    mesh: Mesh,
) -> jax.Array:
    """Sums of the log-probabilities of the targets within each row's bounds, [B]."""
    batch, width = tokens_BS.shape[0], tokens_BS.shape[1] - 1
    place = row_placement(mesh, batch)
    params = weights_in_use(model.axes, params, model.settings.compute_dtype)
    cache = begin_cache(model, params, source, batch, width, place)

    def sums(x_BTD: jax.Array, start: jax.Array) -> jax.Array:
        chunk = x_BTD.shape[1]
        targets_BT = jax.lax.dynamic_slice_in_dim(tokens_BS, start + 1, chunk, axis=1)
        logits_BTV = logits_of(model, params, x_BTD)
        # Compared and summed: XLA would all-gather a sharded vocabulary for a gather along it.
        is_target_BTV = jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
        own_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0), axis=-1)
        log_p_BT = own_BT - jax.nn.logsumexp(logits_BTV, axis=-1)
        positions_T = start + jnp.arange(chunk)
        inside_BT = (positions_T >= bounds_B2[:, :1]) & (positions_T < bounds_B2[:, 1:])
        return jnp.sum(jnp.where(inside_BT, log_p_BT, 0), axis=-1)

    lengths_B = bounds_B2[:, 1]  # the last target is not read
    _, sums_CB = read_chunks(model, params, tokens_BS[:, :width], lengths_B, cache, place, sums)
    return jax.lax.with_sharding_constraint(jnp.sum(sums_CB, axis=0), replicated(mesh))
