"""Training objectives: functions from a window of documents to inputs, targets and loss weights.

Every objective is a pure function of the window and the example's random bits. All except
"causal_across_documents" make each piece of the window a separate segment with positions from 0.

- "causal": every token from the tokens before it in its document.
- "causal_across_documents": every token from all tokens before it in the row, which is one segment,
  as in GPT-3 (Brown et al. 2020, arXiv 2005.14165, appendix B). Attention then needs no mask of
  documents.
- "prefix": as "causal", but a first part of each piece, of random length, carries no loss. A
  decoder reads the prefix causally, like the rest; an encoder reads it in both directions (T5's
  prefix language model). If the source has prompts and responses, an encoder reads the prompt, and
  its decoder writes the response.
- "span_corruption": T5's (see `denoising`).
- "ul2": UL2's mixture of denoisers, one of the seven for each example.
- "masked": BERT's (Devlin et al. 2019, arXiv 1810.04805, section 3.1): 15 % of the tokens are
  predicted at their position; 80 % of them are masked, 10 % replaced at random, 10 % unchanged.

A single decoder reads inputs and targets in one sequence, with loss on the targets. An encoder and
its decoder have a sequence each: the encoder's is in the example's extra arrays, and a piece has
the same segment number in both.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxscale.batch import Batch
from jaxscale.data.denoising import (
    NUM_MODES,
    T5,
    UL2,
    Denoiser,
    Lengths,
    Pieces,
    arrange,
    corrupt,
    cut_to_fit,
    longest,
    noise_mask,
    num_sentinels,
    texts_of,
)
from jaxscale.data.packing import Uniform, Vocabulary, Window, number

DENSITY = 0.15
"""The share of tokens that masking predicts."""
MASKED, RANDOM = 0.8, 0.1
"""Shares of the predicted tokens that are replaced by a mask and by a random token."""


def causal(window: Window, draw: Uniform, vocabulary: Vocabulary) -> Batch:
    """Each token from the ones before it; the target of a document's last token is the boundary."""
    del draw
    segments, positions = number(window.lengths)
    targets = window.ids[1:].copy()
    targets[window.bounds[1:-1] - 1] = vocabulary.boundary  # not what begins the next document
    return Batch(window.ids[:-1], targets, segments, positions, window.weights)


def causal_across_documents(window: Window, draw: Uniform, vocabulary: Vocabulary) -> Batch:
    """`causal` with the whole row as one segment: a document sees the documents before it."""
    example = causal(window, draw, vocabulary)
    segments, positions = number(np.array([len(example.tokens)]))
    return example._replace(segments=segments, positions=positions)


def prefix(window: Window, draw: Uniform, vocabulary: Vocabulary) -> Batch:
    """`causal`, with loss only after a prefix of each piece.

    A piece with n targets has a prefix of 1 to n tokens, uniformly distributed: the first target
    with loss is the one that the whole prefix predicts.
    """
    example = causal(window, draw, vocabulary)
    lengths = window.lengths
    targets = lengths - (example.weights[window.bounds[1:] - 1] == 0)  # some have no successor
    begins = np.floor(draw(len(lengths)) * targets)
    counted = example.positions >= np.repeat(begins, lengths)
    return example._replace(weights=example.weights * counted)


def span_corruption(window: Window, draw: Uniform, vocabulary: Vocabulary) -> Batch:
    """Each piece as [text with sentinels, the spans after their sentinels, boundary].

    Loss is on the tokens after the first sentinel of the second part, which is an input. A piece
    without a span (see `allot_spans`) is left out.
    """
    inputs, targets = corrupt_window(window, draw, vocabulary)
    present = np.isin(inputs.pieces, targets.pieces)
    return _one_sequence(Pieces(*(field[present] for field in inputs)), targets, vocabulary)


def corrupt_window(window: Window, draw: Uniform, vocabulary: Vocabulary) -> tuple[Pieces, Pieces]:
    """`corrupt` of whole pieces, including the boundaries at which they begin."""
    lengths = window.lengths
    noise = noise_mask(lengths, *allot_spans(lengths), draw)
    pieces = np.repeat(np.arange(len(lengths)), lengths)
    return corrupt(Pieces(window.ids[:-1], pieces), noise, vocabulary)


def allot_spans(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of noise tokens, and of the spans that they form, in each piece.

    The cumulative counts are T5's for the cumulative lengths, so that pieces too short for a whole
    span also contribute; for a single piece the counts are exactly T5's. A piece keeps at least as
    many text tokens as it has spans; noise and spans that do not fit in it are dropped.
    """
    noise_so_far, spans_so_far = _span_counts(np.cumsum(lengths))
    spans = np.minimum(np.diff(spans_so_far, prepend=0), lengths // 2)
    if not spans.any():
        longest_piece = lengths.argmax()
        spans[longest_piece] = min(lengths[longest_piece] // 2, 1)
    has_spans = spans > 0
    noise = np.zeros_like(lengths)
    noise[has_spans] = np.diff(noise_so_far[has_spans], prepend=0)
    return np.clip(noise, spans, lengths - spans) * has_spans, spans


def joined_tokens(seq_len: int) -> int:
    """The longest window, in tokens, whose corrupted form (inputs and targets) fits in a row.

    Every span adds its sentinel twice; the boundary at the end is a target only.
    """
    tokens = np.arange(2, seq_len)
    fits = tokens + 2 * np.maximum(_span_counts(tokens)[1], 1) <= seq_len
    return int(tokens[fits][-1]) if fits.any() else 0


def masked(window: Window, draw: Uniform, vocabulary: Vocabulary) -> Batch:
    """Masked tokens, predicted at their position from both sides, for a bidirectional model.

    Special tokens are never masked, and never replace a token.
    """
    ids = window.ids[:-1]
    segments, positions = number(window.lengths)
    special = np.unique([vocabulary.boundary, *vocabulary.special])
    (places,) = np.nonzero(~np.isin(ids, special))
    count = max(round(DENSITY * len(places)), min(len(places), 1))
    chosen = places[np.argsort(draw(len(places)))[:count]]
    fate = draw(count)
    replacements = np.floor(draw(count) * (vocabulary.size - len(special))).astype(np.int64)
    for i in special.tolist():
        replacements += replacements >= i
    shown = np.where(fate < MASKED + RANDOM, replacements, ids[chosen])
    mask = vocabulary.sentinel(0) if vocabulary.mask is None else vocabulary.mask
    tokens, weights = ids.copy(), np.zeros(len(ids), np.float32)
    tokens[chosen] = np.where(fate < MASKED, mask, shown)
    weights[chosen] = 1
    return Batch(tokens, ids, segments, positions, weights)


def denoised(
    denoisers: Sequence[Denoiser],
    lengths: Lengths,
    window: Window,
    draw: Uniform,
    vocabulary: Vocabulary,
) -> Batch:
    """The window's texts, corrupted by one of the denoisers, drawn with equal shares.

    An encoder reads [mode, text with sentinels, boundary] of each, and its decoder writes [spans
    after their sentinels, boundary]. One sequence is [boundary, mode, text with sentinels, spans
    after their sentinels], with the boundary as its last target. Tokens at the end of a window
    that do not fit are left out, and so are texts too short to lose a token.
    """
    chosen = denoisers[int(draw(1)[0] * len(denoisers))] if len(denoisers) > 1 else denoisers[0]
    texts = cut_to_fit(texts_of(window, vocabulary), chosen, lengths)
    present, sizes = np.unique(texts.pieces, return_counts=True)
    noise = noise_mask(sizes, *chosen.allot(sizes), draw)
    inputs, targets = corrupt(texts, noise, vocabulary)
    modes = [] if chosen.mode is None else [_each(present, vocabulary.mode(chosen.mode))]
    if lengths.decoder:
        return _two_sequences(arrange(*modes, inputs), targets, vocabulary)
    begin = vocabulary.boundary if vocabulary.start is None else vocabulary.start
    return _one_sequence(arrange(_each(present, begin), *modes, inputs), targets, vocabulary)


def pairs_for_encoder(window: Window, draw: Uniform, vocabulary: Vocabulary) -> Batch:
    """Whole prompts with their responses: an encoder reads a prompt, a decoder writes the rest."""
    del draw
    assert window.counted is not None, "prompts carry no loss"
    begin = vocabulary.boundary if vocabulary.start is None else vocabulary.start
    ids, pieces = window.ids[:-1], np.repeat(np.arange(len(window.lengths)), window.lengths)
    text = (ids != vocabulary.boundary) & (ids != begin)
    written = text & np.append(False, window.counted[:-1])
    read = text & ~written
    return _two_sequences(
        Pieces(ids[read], pieces[read]), Pieces(ids[written], pieces[written]), vocabulary
    )


def prefix_for_encoder(window: Window, draw: Uniform, vocabulary: Vocabulary) -> Batch:
    """T5's prefix language model: an encoder reads a text's beginning, a decoder writes the rest.

    The beginning of a text of n tokens has 1 to n - 1 of them, uniformly distributed.
    """
    texts = texts_of(window, vocabulary)
    lengths = np.bincount(texts.pieces, minlength=1)
    texts = Pieces(*(field[lengths[texts.pieces] > 1] for field in texts))
    sizes = np.unique(texts.pieces, return_counts=True)[1]
    begins = np.cumsum(sizes) - sizes
    cuts = begins + 1 + np.floor(draw(len(sizes)) * (sizes - 1)).astype(np.int64)
    given = np.arange(len(texts.ids)) < np.repeat(cuts, sizes)
    inputs, targets = (Pieces(texts.ids[part], texts.pieces[part]) for part in (given, ~given))
    return _two_sequences(inputs, targets, vocabulary)


@dataclass(frozen=True)
class Objective:
    """An objective for examples of certain lengths."""

    example: Callable[[Window, Uniform, Vocabulary], Batch]  # within the lengths
    window: int  # tokens of its windows; 0 if the lengths are too short
    num_sentinels: int = 0  # of the pieces of a window
    num_modes: int = 0
    masks: bool = False  # whether it needs a mask token
    shortest: int = 1  # least tokens of a window that has a target
    keeps_marks: bool = False  # whether only tokens that the source marks carry loss


@functools.cache
def find_objective(name: str, seq_len: int, target_len: int = 0) -> Objective:
    """The objective that `data.objective` names.

    Args:
      seq_len: tokens of an example: of the one sequence, or of the encoder's.
      target_len: of the decoder's, if there are two.
    """
    lengths = Lengths(seq_len, target_len)
    if name == "ul2" or (name == "span_corruption" and target_len):
        denoisers = UL2 if name == "ul2" else (T5,)
        window = longest(denoisers, lengths)
        return Objective(
            functools.partial(denoised, denoisers, lengths),
            window,
            num_sentinels(denoisers, window),
            NUM_MODES if name == "ul2" else 0,
            shortest=2,
        )
    if target_len:
        assert name == "prefix", "`DataConfig` refuses the others"
        return Objective(prefix_for_encoder, min(lengths), shortest=2)
    if name == "span_corruption":
        window = joined_tokens(seq_len)
        spans = max(int(_span_counts(np.array(window))[1]), 1)
        return Objective(span_corruption, window, spans, shortest=2)
    if name == "masked":
        return Objective(masked, seq_len, masks=True)
    examples = {
        "causal": causal,
        "causal_across_documents": causal_across_documents,
        "prefix": prefix,
    }
    return Objective(examples[name], seq_len, keeps_marks=True)


def nothing(lengths: Lengths) -> Batch:
    """An example without tokens."""
    ids = np.zeros(0, np.int32)
    extras = _encoder_arrays(ids, ids, ids) if lengths.decoder else ()
    return Batch(ids, ids, ids, ids, ids.astype(np.float32), extras)


def _one_sequence(inputs: Pieces, targets: Pieces, vocabulary: Vocabulary) -> Batch:
    """[inputs, targets, boundary] of each piece, with loss after the first of the targets."""
    present = np.unique(targets.pieces)
    ends = _each(present, vocabulary.boundary)
    ids, pieces = (np.concatenate(field) for field in zip(inputs, targets, ends))
    order = np.argsort(pieces, kind="stable")
    ids, pieces, predicted = ids[order].astype(np.int32), pieces[order], order >= len(inputs.ids)
    # The last token of a piece has no target, and its first token is not a target.
    same = pieces[1:] == pieces[:-1]
    segments, positions = number(np.bincount(pieces[1:][same])[present])
    counted = predicted[1:] & predicted[:-1]  # not the first target, which is an input
    return Batch(ids[:-1][same], ids[1:][same], segments, positions, counted[same].astype("f4"))


def _two_sequences(inputs: Pieces, targets: Pieces, vocabulary: Vocabulary) -> Batch:
    """The targets of each piece for a decoder, with its inputs for an encoder as extra arrays.

    Both end with a boundary. The decoder reads its targets shifted by one, after a begin token,
    which in T5 is the padding token.
    """
    present = np.unique(targets.pieces)
    ends = _each(present, vocabulary.boundary)
    read, written = arrange(inputs, ends), arrange(targets, ends)
    segments, positions = number(np.unique(written.pieces, return_counts=True)[1])
    begin = vocabulary.boundary if vocabulary.pad is None else vocabulary.pad
    tokens = np.roll(written.ids, 1)
    tokens[positions == 0] = begin
    numbers = number(np.unique(read.pieces, return_counts=True)[1])
    weights = np.ones(len(tokens), np.float32)
    extras = _encoder_arrays(read.ids, *numbers)
    return Batch(tokens, written.ids, segments, positions, weights, extras)


def _encoder_arrays(
    tokens: np.ndarray, segments: np.ndarray, positions: np.ndarray
) -> dict[str, np.ndarray]:
    return {
        "encoder_tokens": tokens,
        "encoder_segments": segments,
        "encoder_positions": positions,
    }


def _each(pieces: np.ndarray, token: int) -> Pieces:
    """The same token for each piece."""
    return Pieces(np.full(len(pieces), token), pieces)


def _span_counts(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """T5's numbers of noise tokens and of spans for texts of these lengths; 0 if too short."""
    assert T5.mean_span is not None, "a constant"
    noise = np.rint(lengths * T5.density)
    return noise.astype(np.int64), np.rint(noise / T5.mean_span).astype(np.int64)
