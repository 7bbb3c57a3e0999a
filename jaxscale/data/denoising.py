"""Span corruption: texts with spans cut out, and the spans, as T5 and UL2 make them.

T5 (Raffel et al. 2020, arXiv 1910.10683, section 3.1.4) replaces spans of 3 tokens on average, 15 %
of all, by one sentinel each, and predicts them behind their sentinels. UL2 (Tay et al. 2022, arXiv
2205.05131, section 3.1.2) mixes seven such denoisers, each text beginning with the token of its
mode.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.data.packing import Uniform, Vocabulary, Window

SHORTEST = 2
"""Tokens of a text that can lose one."""


class Denoiser(NamedTuple):
    """How much of a text is noise, and in how many spans."""

    density: float  # share of the tokens
    mean_span: float | None  # tokens; None: one span, at the end
    mode: int | None = None  # which of the mode tokens begins the text

    def allot(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The noise tokens, and the spans that they form, of texts of these lengths.

        T5's arithmetic for each text on its own; one that is too short has none.
        """
        enough = lengths >= SHORTEST
        noise = np.clip(np.rint(lengths * self.density), 1, lengths - 1).astype(np.int64) * enough
        if self.mean_span is None:
            return noise, enough.astype(np.int64)
        spans = np.maximum(np.rint(noise / self.mean_span), 1).astype(np.int64)
        return noise, np.minimum(spans, np.minimum(noise, lengths - noise)) * enough


T5 = Denoiser(0.15, 3.0)
R, S, X = range(3)
UL2 = (
    Denoiser(0.15, 3.0, R),
    Denoiser(0.15, 8.0, R),
    Denoiser(0.25, None, S),
    Denoiser(0.5, 3.0, X),
    Denoiser(0.5, 8.0, X),
    Denoiser(0.15, 64.0, X),
    Denoiser(0.5, 64.0, X),
)
"""Table 1 of the paper: regular, sequential and extreme denoisers, in equal shares."""
NUM_MODES = 3


class Pieces(NamedTuple):
    """Tokens of several pieces, one after another."""

    ids: np.ndarray
    pieces: np.ndarray  # which piece of the window each belongs to; not decreasing


class Lengths(NamedTuple):
    """The most tokens of an example: of a decoder alone, or of an encoder and its decoder."""

    first: int  # of the sequence, or of the encoder's
    decoder: int = 0  # 0: there is no encoder


def texts_of(window: Window, vocabulary: Vocabulary) -> Pieces:
    """The tokens of a window, without those that begin and end its documents."""
    ids = window.ids[:-1]
    pieces = np.repeat(np.arange(len(window.lengths)), window.lengths)
    begin = vocabulary.boundary if vocabulary.start is None else vocabulary.start
    kept = (ids != vocabulary.boundary) & (ids != begin)
    return Pieces(ids[kept], pieces[kept])


def cut_to_fit(texts: Pieces, denoiser: Denoiser, lengths: Lengths) -> Pieces:
    """The longest beginning of the texts, about, whose corrupted form fits in an example.

    Texts in which there is no room for a span are left out.
    """
    kept = len(texts.ids)
    while True:
        sizes = np.bincount(texts.pieces[:kept], minlength=1)
        over = (sizes_of(sizes, denoiser, lengths).sum(axis=1) - lengths).max()
        if over <= 0:
            enough = sizes[texts.pieces[:kept]] >= SHORTEST
            return Pieces(texts.ids[:kept][enough], texts.pieces[:kept][enough])
        kept -= int(over)


def sizes_of(texts: np.ndarray, denoiser: Denoiser, lengths: Lengths) -> np.ndarray:
    """The tokens that texts of these lengths become: of the first sequence and the decoder's;
    [2, texts].

    Both of two sequences end with a boundary for each text. One sequence begins with one, and the
    boundary at its end is a target only.
    """
    noise, spans = denoiser.allot(texts)
    present = spans > 0
    left = present * (texts + 1 + (denoiser.mode is not None)) - noise + spans
    cut = noise + spans
    return np.stack([left, cut + present] if lengths.decoder else [left + cut, 0 * cut])


def longest(denoisers: Sequence[Denoiser], lengths: Lengths) -> int:
    """The tokens of the longest text that fits in an example by every denoiser; 0 if none does."""
    texts = np.arange(SHORTEST, 4 * max(lengths))
    sizes = np.stack([sizes_of(texts, denoiser, lengths) for denoiser in denoisers])
    over = (sizes > np.array(lengths)[:, None]).any(axis=(0, 1))
    return SHORTEST - 1 + int(over.argmax()) if not over[0] else 0


def num_sentinels(denoisers: Sequence[Denoiser], text: int) -> int:
    """The most sentinels of a text of at most so many tokens."""
    return max(int(denoiser.allot(np.arange(text + 1))[1].max()) for denoiser in denoisers)


def corrupt(texts: Pieces, noise: np.ndarray, vocabulary: Vocabulary) -> tuple[Pieces, Pieces]:
    """The texts with a sentinel in place of each span of noise, and the spans behind theirs.

    Sentinels are numbered from 0 in each piece. Neither has an end mark yet.

    Args:
      noise: bool, for each token; every piece begins with text.
    """
    ids, pieces = texts
    first = noise & ~np.append(False, noise[:-1])
    spans = np.cumsum(first)  # up to here; less those of the pieces before:
    begins = np.flatnonzero(np.diff(pieces, prepend=-1))
    sizes = np.diff(np.append(begins, len(ids)))
    spans -= np.repeat(spans[begins] - first[begins], sizes)
    marked = ids.copy()
    marked[first] = vocabulary.sentinel(spans[first] - 1)
    kept = ~noise | first
    copies = np.where(noise, 1 + first, 0)  # the first token of a span follows its sentinel
    targets = np.repeat(ids, copies)
    targets[(np.cumsum(copies) - copies)[first]] = marked[first]
    return Pieces(marked[kept], pieces[kept]), Pieces(targets, np.repeat(pieces, copies))


def noise_mask(
    lengths: np.ndarray, noise: np.ndarray, spans: np.ndarray, draw: Uniform
) -> np.ndarray:
    """Which tokens of texts of these lengths are noise; bool [sum of the lengths].

    As in T5: text and noise alternate, text first and noise last, each cut into spans at random,
    all ways to cut being equally likely.

    Args:
      noise, spans: of each text.
    """
    parts = np.maximum(spans, 1)  # a piece without noise is one part of text and an empty one
    runs = np.stack([_cut(lengths - noise, parts, draw), _cut(noise, parts, draw)], axis=1)
    return np.repeat(np.tile([False, True], len(runs)), runs.reshape(-1))


def arrange(*parts: Pieces) -> Pieces:
    """The parts of each piece after one another, piece by piece."""
    ids = np.concatenate([part.ids for part in parts])
    pieces = np.concatenate([part.pieces for part in parts])
    order = np.argsort(pieces, kind="stable")
    return Pieces(ids[order].astype(np.int32), pieces[order])


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
