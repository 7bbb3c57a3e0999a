"""Stop ids of a fine-tuned model: the special tokens with which the turns that carry loss end.

A base model's `eos_token_id` ends documents (`<|endoftext|>`), and its chat template may end turns
with another token (`<|im_end|>`): what fine-tuning teaches the model to end with has to stop
`generate`, here and in transformers.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxscale.data.tokens.corpus import Corpus
from jaxscale.data.tokens.tokenizer import Tokenizer

SHARD_TOKENS = 2**18
"""Tokens read of each shard, from its first on: hundreds of conversations."""

TAIL = 8
"""Tokens searched at the end of a turn, such as `<|end|>`, a line feed and `<|endoftext|>`."""

SHARE = 0.01
"""Of turns that may be another way: a text may hold the name of a special token by accident."""


class TurnEnds(NamedTuple):
    """How the turns that carry loss end."""

    num_turns: int = 0
    num_open: int = 0  # that end with no special token
    stop_ids: tuple[int, ...] = ()


def find_turn_ends(corpus: Corpus, tokenizer: Tokenizer) -> TurnEnds:
    """The special tokens that end turns, or responses, with loss on them.

    A token that also stands inside turns is not a stop id: Harmony's `<|end|>` closes thoughts, and
    the answer comes after it.
    """
    size, begin = tokenizer.vocab_size, 0
    turns: list[np.ndarray] = []
    inside = np.zeros(size, np.int64)
    for shard, marks in zip(corpus.shards, corpus.counted):
        if marks is not None and len(shard):
            last, others = _ends_of(corpus, tokenizer, begin)
            turns.append(last)
            inside += np.bincount(others, minlength=size)
        begin += len(shard)
    every = np.concatenate([[], *turns]).astype(np.int64)
    ends = np.bincount(every[every >= 0], minlength=size)
    found = np.flatnonzero((ends > 0) & (inside <= SHARE * ends))
    return TurnEnds(len(every), int(np.sum(every < 0)), tuple(found.tolist()))


def with_stop_ids(tokenizer: Tokenizer, ids: Iterable[int]) -> Tokenizer:
    """The tokenizer with further ids that end what a model generates."""
    ends = {*tokenizer.ends, *ids} - {tokenizer.boundary}
    return dataclasses.replace(tokenizer, ends=tuple(sorted(ends)))


def describe_stop_ids(tokenizer: Tokenizer, found: TurnEnds) -> tuple[str, str]:
    """A line about a run's stop ids, and a warning; "" where there is nothing to say."""
    if not found.num_turns:
        return "", ""
    names = {i: name for name, i in tokenizer.special.items()}
    stops = (*tokenizer.ends, tokenizer.boundary)
    line = "stop ids: " + ", ".join(f"{i} ({names.get(i) or tokenizer.decode([i])})" for i in stops)
    if found.num_open <= SHARE * found.num_turns:
        return line, ""
    return line, (
        f"{found.num_open:,} of {found.num_turns:,} turns have no end token with loss, so that the "
        "model does not learn to stop after them: let the chat template (chat_template.jinja "
        "beside the tokenizer) write a special token, such as eos_token, after what the assistant "
        "says, and inside {% generation %} where it has such blocks"
    )


def _ends_of(corpus: Corpus, tokenizer: Tokenizer, begin: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the first documents of the shard that begins at a token: the last special token of each
    turn, -1 where it has none; and the special tokens with loss that do not end a turn."""
    first, last = np.searchsorted(corpus.offsets, [begin, begin + SHARD_TOKENS])
    bounds = corpus.offsets[first : max(int(last), first + 2)] - begin
    stop = begin + int(bounds[-1])
    ids = corpus.read(begin, stop).astype(np.int64)
    counted = corpus.read_counted(begin, stop)
    lost = np.append(False, counted[:-1])  # whether a token carries loss
    lost[bounds[:-1]] = False
    turns = np.flatnonzero(lost & ~np.append(lost[1:], False))
    # A plain document has its last loss on the boundary that follows it.
    turns = np.setdiff1d(turns, (bounds[1:] - 1)[counted[bounds[1:] - 1]])
    special = np.isin(ids, list(tokenizer.special.values()))
    found, tail = np.full(len(turns), -1), np.zeros(len(ids), bool)
    alive = np.ones(len(turns), bool)
    for places in (np.maximum(turns - i, 0) for i in range(TAIL)):
        alive &= lost[places] & (special[places] | _is_blank(tokenizer, ids[places]))
        found = np.where(alive & special[places] & (found < 0), ids[places], found)
        tail[places[alive]] = True
    return found, ids[lost & special & ~tail]


def _is_blank(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Whether each token is white space, or special."""
    unique, inverse = np.unique(ids, return_inverse=True)
    blank = [not tokenizer.decode([i]).strip() for i in unique.tolist()]
    return np.array(blank, bool)[inverse]
