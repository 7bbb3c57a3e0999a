"""Stop ids of a fine-tuned model: the special tokens that end responses with loss.

A base model's `eos_token_id` ends documents (`<|endoftext|>`), and its chat template may end
responses with another token (`<|im_end|>`). The token that fine-tuning teaches has to stop
`generate`, here and in transformers.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxscale.data.tokens.corpus import Corpus
from jaxscale.data.tokens.tokenizer import Tokenizer

SHARD_TOKENS = 2**18
"""Tokens read of each shard, from its first: hundreds of conversations."""

TAIL = 8
"""Tokens searched at the end of a response, such as `<|end|>`, a line feed, `<|endoftext|>`."""

SHARE = 0.01
"""Share of responses that may be exceptions: a text may contain the name of a special token."""


class ResponseEnds(NamedTuple):
    """The ends of responses with loss."""

    num_responses: int = 0
    num_open: int = 0  # without a special token at the end
    stop_ids: tuple[int, ...] = ()


def find_response_ends(corpus: Corpus, tokenizer: Tokenizer) -> ResponseEnds:
    """The special tokens that end responses with loss.

    A token that also occurs inside responses is not a stop id: Harmony's `<|end|>` closes thoughts,
    and the answer follows it.
    """
    size, begin = tokenizer.vocab_size, 0
    responses: list[np.ndarray] = []
    inside = np.zeros(size, np.int64)
    for shard, marks in zip(corpus.shards, corpus.counted):
        if marks is not None and len(shard):
            last, others = _ends_of(corpus, tokenizer, begin)
            responses.append(last)
            inside += np.bincount(others, minlength=size)
        begin += len(shard)
    every = np.concatenate([[], *responses]).astype(np.int64)
    ends = np.bincount(every[every >= 0], minlength=size)
    found = np.flatnonzero((ends > 0) & (inside <= SHARE * ends))
    return ResponseEnds(len(every), int(np.sum(every < 0)), tuple(found.tolist()))


def with_stop_ids(tokenizer: Tokenizer, ids: Iterable[int]) -> Tokenizer:
    """The tokenizer with further ids that end generated text."""
    ends = {*tokenizer.ends, *ids} - {tokenizer.boundary}
    return dataclasses.replace(tokenizer, ends=tuple(sorted(ends)))


def describe_stop_ids(tokenizer: Tokenizer, found: ResponseEnds) -> tuple[str, str]:
    """A line about a run's stop ids, and a warning; "" without either."""
    if not found.num_responses:
        return "", ""
    names = {i: name for name, i in tokenizer.special.items()}
    stops = (*tokenizer.ends, tokenizer.boundary)
    line = "stop ids: " + ", ".join(f"{i} ({names.get(i) or tokenizer.decode([i])})" for i in stops)
    if found.num_open <= SHARE * found.num_responses:
        return line, ""
    return line, (
        f"{found.num_open:,} of {found.num_responses:,} responses have no end token with loss, so "
        "the model does not learn to stop after them: let the chat template (chat_template.jinja "
        "next to the tokenizer) write a special token, such as eos_token, after each message of "
        "the assistant, and inside {% generation %} if it has such blocks"
    )


def _ends_of(corpus: Corpus, tokenizer: Tokenizer, begin: int) -> tuple[np.ndarray, np.ndarray]:
    """In the first documents of the shard that begins at a token: the last special token of each
    response, -1 without one; and the special tokens with loss inside responses."""
    first, last = np.searchsorted(corpus.offsets, [begin, begin + SHARD_TOKENS])
    bounds = corpus.offsets[first : max(int(last), first + 2)] - begin
    stop = begin + int(bounds[-1])
    ids = corpus.read(begin, stop).astype(np.int64)
    counted = corpus.read_counted(begin, stop)
    lost = np.append(False, counted[:-1])  # whether each token carries loss
    lost[bounds[:-1]] = False
    responses = np.flatnonzero(lost & ~np.append(lost[1:], False))
    # A plain document has its last loss on the following boundary.
    responses = np.setdiff1d(responses, (bounds[1:] - 1)[counted[bounds[1:] - 1]])
    special = np.isin(ids, list(tokenizer.special.values()))
    found, tail = np.full(len(responses), -1), np.zeros(len(ids), bool)
    alive = np.ones(len(responses), bool)
    for places in (np.maximum(responses - i, 0) for i in range(TAIL)):
        alive &= lost[places] & (special[places] | _is_blank(tokenizer, ids[places]))
        found = np.where(alive & special[places] & (found < 0), ids[places], found)
        tail[places[alive]] = True
    return found, ids[lost & special & ~tail]


def _is_blank(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Whether each token is white space, or special."""
    unique, inverse = np.unique(ids, return_inverse=True)
    blank = [not tokenizer.decode([i]).strip() for i in unique.tolist()]
    return np.array(blank, bool)[inverse]
