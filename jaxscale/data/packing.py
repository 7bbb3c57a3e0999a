"""Packing: windows of concatenated documents, and rows of equal length."""

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxscale.batch import Batch
from jaxscale.data.tokens.corpus import Corpus

OPEN_ROWS = 64


class Vocabulary(NamedTuple):
    """The ids of examples; ids from `size` are in the model but not in the tokenizer."""

    size: int
    boundary: int  # the id that ends a document, and begins one unless `start` does
    model_size: int
    start: int | None = None  # begins a document, if not the boundary
    pad: int | None = None  # begins a decoder's text, as in T5; None: the boundary
    sentinels: tuple[int, ...] = ()  # the tokenizer's, for the spans of a text, in order
    mask: int | None = None  # the tokenizer's
    special: tuple[int, ...] = ()  # in no text, and never replace a masked token
    prompt: tuple[int, ...] = ()  # virtual tokens before each document (`model.prompt_tokens`)

    def sentinel(self, i: Any) -> Any:
        """The id of sentinel `i`: the tokenizer's, else counted down from the model's last id."""
        return np.array(self.sentinels)[i] if self.sentinels else self.model_size - 1 - i

    def mode(self, i: int) -> int:
        """The id of mode token `i`: the first ids after the tokenizer's."""
        return self.size + i

    @property
    def settings(self) -> Mapping[str, Any] | list[Any]:
        """As plain values, for a fingerprint."""
        plain = self._asdict()
        changed = {k: v for k, v in plain.items() if v not in (None, ())}
        return list(self[:3]) if len(changed) == 3 else changed


Uniform = Callable[[int], np.ndarray]
"""Returns the next `count` random numbers in [0, 1) of an example."""


def uniform(seed: int, index: int) -> Uniform:
    """The random numbers of example `index`: a function of both, on any machine and version.

    Philox (Salmon et al. 2011) is counter-based: each example has a separate key. NumPy guarantees
    its raw words across versions, but not the distributions made from them.
    """
    words = np.random.Philox(key=np.array([seed, index], np.uint64))
    return lambda count: (words.random_raw(count) >> np.uint64(11)) * 2.0**-53


class Window(NamedTuple):
    """Consecutive tokens of a stream of documents, with the bounds between documents.

    A piece is the part of one document in the window: all of it, unless the document is cut.
    """

    ids: np.ndarray  # int32 [n + 1]: n tokens, and the one that follows them
    bounds: np.ndarray  # int64 [pieces + 1], from 0 to n: begin of each piece
    counted: np.ndarray | None = None  # bool [n], whether the next token carries loss; None: all

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each piece."""
        return np.diff(self.bounds)

    @property
    def weights(self) -> np.ndarray:
        """Loss weight of each token's successor, float32 [n]."""
        if self.counted is None:
            return np.ones(len(self.ids) - 1, np.float32)
        return self.counted.astype(np.float32)


@dataclass(frozen=True, eq=False)
class Stream:
    """Documents of a corpus, each [boundary, tokens...], concatenated in a chosen order.

    The last entry of both arrays ends the stream: it points at a boundary, the token after the last
    document. In `closed` documents, [bos, tokens..., boundary], no target follows the last token;
    in others the boundary follows it, whatever the next document begins with.
    """

    corpus: Corpus
    starts: np.ndarray  # int64 [num_documents + 1], begin of each in the corpus
    offsets: np.ndarray  # int64 [num_documents + 1], begin of each in this stream
    boundary: int
    closed: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, boundaries included."""
        return int(self.offsets[-1])

    def window(self, start: int, count: int) -> Window:
        """`count` tokens from `start`; fewer at the end of the stream, none beyond it."""
        stop = min(start + count, self.num_tokens)
        if start >= stop:
            return Window(np.zeros(1, np.int32), np.zeros(1, np.int64))
        # The token at `stop` is also read; at the stream's end it is the final boundary.
        first, last = np.searchsorted(self.offsets, [start, stop], side="right") - 1
        inner = self.offsets[first + 1 : last + 1]
        bounds = np.concatenate([[start], inner, [stop + 1]])
        begins = bounds[:-1] + (self.starts[first : last + 1] - self.offsets[first : last + 1])
        lengths = np.diff(bounds)
        places = [(b, b + length) for b, length in zip(begins.tolist(), lengths.tolist())]
        pieces = self.corpus.read_each(places)
        counted = None
        if self.corpus.counted or self.closed:
            counted = np.concatenate(self.corpus.read_counted_each(places))[:-1]
            if self.closed:
                counted[inner - start - 1] = False
        bounds[-1] = stop
        ids = np.concatenate(pieces, dtype=np.int32)  # a copy, since the parts may be mapped files
        if bounds[-2] == stop:
            bounds = bounds[:-1]  # only the first token of the last document was read
            ids[-1] = self.boundary
        return Window(ids, bounds - start, counted)


def pack_whole(sizes: np.ndarray, most: Sequence[int]) -> np.ndarray:
    """The begin of each example, and the end of the last, when each takes as many of the next items
    as fit.

    Args:
      sizes: of each item in each of an example's sequences, [items, sequences]; each fits alone.
      most: the length of each sequence.
    """
    begins, used = [0], [0] * len(most)
    for item, size in enumerate(sizes.tolist()):
        used = [before + more for before, more in zip(used, size)]
        if any(got > limit for got, limit in zip(used, most)):
            begins.append(item)
            used = size
    return np.array([*begins, len(sizes)])


def best_fit(sizes: np.ndarray, most: int) -> np.ndarray:
    """Best-fit packing: the row of each item, int64 [items], the fullest that it fits in.

    Rows are numbered by their first items. Only the `OPEN_ROWS` rows with the most free space
    remain candidates; more of them would hardly improve the packing.

    Args:
      sizes: of the items; each is at most `most`, the length of a row.
    """
    rows, begun = np.empty(len(sizes), np.int64), 0
    open_rows: list[tuple[int, int]] = []  # free space and number of each, sorted
    for item, size in enumerate(sizes.tolist()):
        place = bisect.bisect_left(open_rows, (size,))
        if place < len(open_rows):
            free, row = open_rows.pop(place)
        else:
            free, row, begun = most, begun, begun + 1
        rows[item] = row
        bisect.insort(open_rows, (free - size, row))
        del open_rows[:-OPEN_ROWS]
    return rows


def number(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Segments, from 1, and positions, from 0 in each, of consecutive pieces.

    Args:
      lengths: of the pieces.

    Returns:
      Two int32 arrays [sum of the lengths].
    """
    segments = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)
    positions = np.arange(len(segments)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return segments, positions.astype(np.int32)


def pad(example: Batch, length: int, extra_length: int = 0) -> Batch:
    """Fills every field up to `length` with zeros, and the extra arrays up to `extra_length`:
    padding is segment 0 with weight 0."""

    def filled(field: np.ndarray, length: int) -> np.ndarray:
        return np.concatenate([field, np.zeros(length - len(field), field.dtype)])

    extras = {name: filled(x, extra_length) for name, x in dict(example.extras).items()}
    row = Batch(*(filled(field, length) for field in example[:5]))
    return row._replace(extras=extras) if extras else row


def stack(examples: Sequence[Batch]) -> Batch:
    """Examples as the rows of a batch."""
    batch = Batch(*(np.stack(field) for field in zip(*(example[:5] for example in examples))))
    names = dict(examples[0].extras)
    extras = {name: np.stack([example.extras[name] for example in examples]) for name in names}
    return batch._replace(extras=extras) if extras else batch
