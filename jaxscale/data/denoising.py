"""Span corruption as in T5 and UL2: texts with spans replaced by sentinels, and these spans.

T5 (Raffel et al. 2020, arXiv 1910.10683, section 3.1.4) replaces spans of 3 tokens on average, 15 %
of all tokens, by one sentinel each, and predicts them after their sentinels. UL2 (Tay et al. 2022,
arXiv 2205.05131, section 3.1.2) mixes seven such denoisers; each text begins with the token of its
mode.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.data.packing import Uniform, Vocabulary, Window

SHORTEST = 2
"""The shortest text, in tokens, that can lose one."""


class Denoiser(NamedTuple):
    """The share of noise in a text, and the length of its spans."""

    density: float  # share of the tokens
    mean_span: float | None  # tokens; None: one span, at the end
    mode: int | None = None  # index of the mode token that begins the text

    def allot(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of noise tokens and of spans for texts of these lengths.

        T5's arithmetic for each text separately; 0 for a text that is too short.
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
"""Table 1 of the UL2 paper: regular, sequential and extreme denoisers, in equal shares."""
NUM_MODES = 3


class Pieces(NamedTuple):
    """Tokens of several pieces, one after another."""

    ids: np.ndarray
    pieces: np.ndarray  # index of each token's piece in the window; not decreasing


class Lengths(NamedTuple):
    """The maximal tokens of an example: of a single decoder, or of an encoder and its decoder."""

    first: int  # of the sequence, or of the encoder's
    decoder: int = 0  # 0: there is no encoder


def texts_of(window: Window, vocabulary: Vocabulary) -> Pieces:
    """The tokens of a window, without the boundaries of its documents."""
    ids = window.ids[:-1]
    pieces = np.repeat(np.arange(len(window.lengths)), window.lengths)
    begin = vocabulary.boundary if vocabulary.start is None else vocabulary.start
    kept = (ids != vocabulary.boundary) & (ids != begin)
    return Pieces(ids[kept], pieces[kept])


def cut_to_fit(texts: Pieces, denoiser: Denoiser, lengths: Lengths) -> Pieces:
    """Approximately the longest prefix of the texts whose corrupted form fits in an example.

    Texts that are too short for a span are left out.
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
    """The lengths after corruption of texts of these lengths, in the first sequence and the
    decoder's; [2, texts].

    With two sequences, both end with a boundary for each text. A single sequence begins with one,
    and the boundary at its end is a target only.
    """
    noise, spans = denoiser.allot(texts)
    present = spans > 0
    left = present * (texts + 1 + (denoiser.mode is not None)) - noise + spans
    cut = noise + spans
    return np.stack([left, cut + present] if lengths.decoder else [left + cut, 0 * cut])


def longest(denoisers: Sequence[Denoiser], lengths: Lengths) -> int:
    """The longest text, in tokens, that fits in an example with every denoiser; 0 if none does."""
    texts = np.arange(SHORTEST, 4 * max(lengths))
    sizes = np.stack([sizes_of(texts, denoiser, lengths) for denoiser in denoisers])
    over = (sizes > np.array(lengths)[:, None]).any(axis=(0, 1))
    return SHORTEST - 1 + int(over.argmax()) if not over[0] else 0


def num_sentinels(denoisers: Sequence[Denoiser], text: int) -> int:
    """The maximal sentinels of a text of at most `text` tokens."""
    return max(int(denoiser.allot(np.arange(text + 1))[1].max()) for denoiser in denoisers)


def corrupt(texts: Pieces, noise: np.ndarray, vocabulary: Vocabulary) -> tuple[Pieces, Pieces]:
    """The texts with a sentinel for each span of noise, and the spans after their sentinels.

    Sentinels are numbered from 0 in each piece. Neither result has end marks yet.

    Args:
      noise: bool, for each token; every piece begins with text.
    """
    ids, pieces = texts
    first = noise & ~np.append(False, noise[:-1])
    spans = np.cumsum(first)  # so far in the window; minus those of earlier pieces:
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
    """Marks the noise tokens in texts of these lengths; bool [sum of the lengths].

    As in T5, text and noise alternate, text first and noise last. Each is cut into spans at random,
    uniformly over all ways to cut.

    Args:
      noise, spans: of each text.
    """
    parts = np.maximum(spans, 1)  # a piece without noise is one span of text and an empty one
    runs = np.stack([_cut(lengths - noise, parts, draw), _cut(noise, parts, draw)], axis=1)
    return np.repeat(np.tile([False, True], len(runs)), runs.reshape(-1))


def arrange(*parts: Pieces) -> Pieces:
    """Concatenates the parts of each piece, piece by piece."""
    ids = np.concatenate([part.ids for part in parts])
    pieces = np.concatenate([part.pieces for part in parts])
    order = np.argsort(pieces, kind="stable")
    return Pieces(ids[order].astype(np.int32), pieces[order])


def _cut(items: np.ndarray, parts: np.ndarray, draw: Uniform) -> np.ndarray:
    """Cuts each group of items into its number of parts at random; returns the parts' lengths.

    No part is empty, unless a group has no items and one part.
    """
    gaps = np.maximum(items - 1, 0)  # possible cuts between two items of a group
    group = np.repeat(np.arange(len(items)), gaps)
    # Random numbers below 1 keep the groups in order; the first gaps of each group are cut.
    order = np.argsort(group + draw(len(group)))
    rank = np.arange(len(group)) - np.repeat(np.cumsum(gaps) - gaps, gaps)
    cuts = order[rank < np.repeat(parts - 1, gaps)]
    first = np.cumsum(items) - items
    in_group = cuts - (np.cumsum(gaps) - gaps)[group[cuts]]
    begins = np.sort(np.concatenate([first, first[group[cuts]] + in_group + 1]))
    return np.diff(np.append(begins, items.sum()))
