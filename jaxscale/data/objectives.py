"""Training objectives: each turns a window of documents into an example, its targets and weights.

Every objective is a pure function of the window and of the example's own random bits, and keeps the
window's pieces apart: each is a segment of its own, with positions from 0.

- "causal": every token from those before it in its document.
- "prefix": the same, but a first part of each piece, of random length, carries no loss. The prefix
  is read causally, as the rest; a prefix that sees itself in both directions (T5's prefix language
  model) needs another attention mask than this project's kernels have.
- "span_corruption": T5's (Raffel et al. 2020, arXiv 1910.10683, section 3.1.4): spans of 3 tokens
  on average, 15 % of all, are replaced by one sentinel each, and predicted after the text that is
  left. For a decoder both follow in one sequence, with loss on the second.
- "masked": BERT's (Devlin et al. 2019, arXiv 1810.04805, section 3.1): 15 % of the tokens are to be
  predicted at their own place; 80 % of them are masked, 10 % replaced at random, 10 % left.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxscale.batch import Batch
from jaxscale.data.packing import Window, number

DENSITY = 0.15
"""The share of tokens that span corruption and masking remove from a text."""
MEAN_SPAN = 3.0
"""Tokens of a corrupted span, on average."""
MASKED, RANDOM = 0.8, 0.1
"""Of the tokens to predict, the shares that are replaced by a mask and by a random token."""


class Vocabulary(NamedTuple):
    """The ids of examples; those from `size` on are in the model, but not in the tokenizer.

    Marks (sentinels, the mask) are numbered from the last id of the model downwards, as T5's are.
    """

    size: int
    boundary: int  # the id that ends, and begins, a document
    model_size: int

    def mark(self, i):
        """The id of sentinel `i`; the mask is mark 0."""
        return self.model_size - 1 - i


class Pieces(NamedTuple):
    """Tokens of several pieces, one after another."""

    ids: np.ndarray
    pieces: np.ndarray  # which piece of the window each belongs to; not decreasing


Uniform = Callable[[int], np.ndarray]
"""Returns the next `count` random numbers in [0, 1) of an example."""


def uniform(seed: int, index: int) -> Uniform:
    """The random numbers of example `index`: a function of both, on any machine and version.

    Philox (Salmon et al. 2011) is counter-based: each example has a key of its own. NumPy
    guarantees its raw words across versions, but not the distributions made from them.
    """
    words = np.random.Philox(key=np.array([seed, index], np.uint64))
    return lambda count: (words.random_raw(count) >> np.uint64(11)) * 2.0**-53


def causal(window: Window, draw: Uniform, vocabulary: Vocabulary) -> Batch:
    """Each token from those before it; the target of a document's last is the boundary."""
    del draw
    segments, positions = number(window.lengths)
    targets = window.ids[1:].copy()
    targets[window.bounds[1:-1] - 1] = vocabulary.boundary  # not what begins the next document
    return Batch(window.ids[:-1], targets, segments, positions, window.weights)


def prefix(window: Window, draw: Uniform, vocabulary: Vocabulary) -> Batch:
    """`causal`, with loss only after a prefix of each piece.

    A piece with n targets has a prefix of 1 to n tokens, uniformly distributed: the first target
    with loss is the one that the whole prefix predicts.
    """
    example = causal(window, draw, vocabulary)
    lengths = window.lengths
    targets = lengths - (example.weights[window.bounds[1:] - 1] == 0)  # of some none follows
    begins = np.floor(draw(len(lengths)) * targets)
    counted = example.positions >= np.repeat(begins, lengths)
    return example._replace(weights=example.weights * counted)


def span_corruption(window: Window, draw: Uniform, vocabulary: Vocabulary) -> Batch:
    """Each piece as [text with sentinels, the spans behind their sentinels, boundary].

    Loss is on the tokens after the first sentinel of the second part, which is given. A piece
    without a span (see `allot_spans`) is left out.
    """
    inputs, targets = corrupt(window, draw, vocabulary)
    present = np.unique(targets.pieces)
    inputs = Pieces(*(field[np.isin(inputs.pieces, present)] for field in inputs))
    ids = np.concatenate([inputs.ids, targets.ids, np.full(len(present), vocabulary.boundary)])
    pieces = np.concatenate([inputs.pieces, targets.pieces, present])
    predicted = np.arange(len(ids)) >= len(inputs.ids)
    order = np.argsort(pieces, kind="stable")
    ids, pieces, predicted = ids[order].astype(np.int32), pieces[order], predicted[order]
    # The last token of a piece has no target, and its first token is no target.
    same = pieces[1:] == pieces[:-1]
    segments, positions = number(np.bincount(pieces[1:][same])[present])
    counted = predicted[1:] & predicted[:-1]  # not the first sentinel: it is given
    return Batch(ids[:-1][same], ids[1:][same], segments, positions, counted[same].astype("f4"))


def corrupt(window: Window, draw: Uniform, vocabulary: Vocabulary) -> tuple[Pieces, Pieces]:
    """The inputs and the targets of span corruption, for an encoder and for a decoder.

    Inputs are the pieces with a sentinel in place of each span; targets are the spans, each after
    its sentinel. Sentinels are numbered from 0 in each piece. Neither has an end mark yet.
    """
    ids, lengths = window.ids[:-1], window.lengths
    noise = noise_mask(lengths, draw)
    first = noise & ~np.append(False, noise[:-1])  # every piece begins with text
    pieces = np.repeat(np.arange(len(lengths)), lengths)
    spans = np.cumsum(first)  # up to here; less those of the pieces before:
    begins = window.bounds[:-1]
    spans -= np.repeat(spans[begins] - first[begins], lengths)
    marked = np.where(first, vocabulary.mark(spans - 1), ids)
    kept = ~noise | first
    copies = np.where(noise, 1 + first, 0)  # the first token of a span follows its sentinel
    targets = np.repeat(ids, copies)
    targets[(np.cumsum(copies) - copies)[first]] = marked[first]
    return Pieces(marked[kept], pieces[kept]), Pieces(targets, np.repeat(pieces, copies))


def noise_mask(lengths: np.ndarray, draw: Uniform) -> np.ndarray:
    """Which tokens of pieces of these lengths are noise; bool [sum of the lengths].

    As in T5: text and noise alternate, text first and noise last, each cut into spans at random,
    all ways to cut being equally likely.
    """
    noise, spans = allot_spans(lengths)
    parts = np.maximum(spans, 1)  # a piece without noise is one part of text and an empty one
    runs = np.stack([_cut(lengths - noise, parts, draw), _cut(noise, parts, draw)], axis=1)
    return np.repeat(np.tile([False, True], len(runs)), runs.reshape(-1))


def allot_spans(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of noise tokens, and of the spans that they form, in each piece.

    The cumulative counts are T5's for the cumulative lengths, so that pieces too short for a span
    of their own still contribute; for a single piece the counts are exactly T5's. A piece keeps at
    least as many text tokens as it has spans; noise and spans that do not fit in it are dropped.
    """
    noise_so_far, spans_so_far = _span_counts(np.cumsum(lengths))
    spans = np.minimum(np.diff(spans_so_far, prepend=0), lengths // 2)
    if not spans.any():
        longest = lengths.argmax()
        spans[longest] = min(lengths[longest] // 2, 1)
    has_spans = spans > 0
    noise = np.zeros_like(lengths)
    noise[has_spans] = np.diff(noise_so_far[has_spans], prepend=0)
    return np.clip(noise, spans, lengths - spans) * has_spans, spans


def encoder_lengths(inputs_length: int) -> tuple[int, int]:
    """The most tokens whose corrupted form fits in `inputs_length`, and the length of the targets.

    T5's arithmetic: both sides end with one more token, the end mark. 512 gives (568, 114).
    """
    tokens = np.arange(2, 2 * inputs_length + 2)
    noise, spans = (np.maximum(number, 1) for number in _span_counts(tokens))
    i = np.flatnonzero(tokens - noise + spans + 1 <= inputs_length)[-1]
    return int(tokens[i]), int(noise[i] + spans[i] + 1)


def joined_tokens(seq_len: int) -> int:
    """The most tokens of a window whose corrupted form, inputs and targets, fits in a row.

    Every span adds its sentinel twice; the boundary at the end is a target only.
    """
    tokens = np.arange(2, seq_len)
    fits = tokens + 2 * np.maximum(_span_counts(tokens)[1], 1) <= seq_len
    return int(tokens[fits][-1]) if fits.any() else 0


def masked(window: Window, draw: Uniform, vocabulary: Vocabulary) -> Batch:
    """Tokens to predict at their own place, from both sides: for a model that is not causal.

    Boundaries are never masked, and never replace a token.
    """
    ids = window.ids[:-1]
    segments, positions = number(window.lengths)
    (places,) = np.nonzero(ids != vocabulary.boundary)
    count = max(round(DENSITY * len(places)), min(len(places), 1))
    chosen = places[np.argsort(draw(len(places)))[:count]]
    fate, replacements = draw(count), np.floor(draw(count) * (vocabulary.size - 1))
    replacements += replacements >= vocabulary.boundary
    shown = np.where(fate < MASKED + RANDOM, replacements, ids[chosen])
    tokens, weights = ids.copy(), np.zeros(len(ids), np.float32)
    tokens[chosen] = np.where(fate < MASKED, vocabulary.mark(0), shown)
    weights[chosen] = 1
    return Batch(tokens, ids, segments, positions, weights)


@dataclass(frozen=True)
class Objective:
    """An objective, and its requirements for rows of `seq_len` tokens."""

    example: Callable[[Window, Uniform, Vocabulary], Batch]  # at most seq_len tokens
    window: Callable[[int], int]  # tokens of its windows
    num_marks: Callable[[int], int]  # ids in addition to those of the tokenizer
    shortest: int = 1  # least tokens of a window that has a target
    keeps_marks: bool = False  # whether only tokens that the source marks carry loss


OBJECTIVES = {
    "causal": Objective(causal, lambda seq_len: seq_len, lambda seq_len: 0, keeps_marks=True),
    "prefix": Objective(prefix, lambda seq_len: seq_len, lambda seq_len: 0, keeps_marks=True),
    "span_corruption": Objective(
        span_corruption,
        joined_tokens,
        lambda seq_len: max(int(_span_counts(np.array(joined_tokens(seq_len)))[1]), 1),
        shortest=2,
    ),
    "masked": Objective(masked, lambda seq_len: seq_len, lambda seq_len: 1),
}


def _span_counts(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """T5's noise tokens, and spans, of texts of these lengths; none where a text is too short."""
    noise = np.rint(lengths * DENSITY)
    return noise.astype(np.int64), np.rint(noise / MEAN_SPAN).astype(np.int64)


def _cut(items: np.ndarray, parts: np.ndarray, draw: Uniform) -> np.ndarray:
    """Cuts each group of items into its number of parts at random; the lengths of all parts.

    No part is empty, except where a group has no items and one part.
    """
    gaps = np.maximum(items - 1, 0)  # places between two items of a group, where a cut can be
    group = np.repeat(np.arange(len(items)), gaps)
    # Numbers below 1 keep the groups in order; within one, the gaps that come first are cut.
    order = np.argsort(group + draw(len(group)))
    rank = np.arange(len(group)) - np.repeat(np.cumsum(gaps) - gaps, gaps)
    cuts = order[rank < np.repeat(parts - 1, gaps)]
    first = np.cumsum(items) - items
    in_group = cuts - (np.cumsum(gaps) - gaps)[group[cuts]]
    begins = np.sort(np.concatenate([first, first[group[cuts]] + in_group + 1]))
    return np.diff(np.append(begins, items.sum()))
