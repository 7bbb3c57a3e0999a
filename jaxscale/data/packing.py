"""Windows of documents that follow one another, and rows of equal length made of them."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxscale.batch import Batch
from jaxscale.data.tokens.corpus import Corpus


class Window(NamedTuple):
    """Consecutive tokens of a stream of documents, and the bounds between documents.

    A piece is the part of one document that lies in the window: all of it, unless it was cut.
    """

    ids: np.ndarray  # int32 [n + 1]: n tokens, and the one that follows them
    bounds: np.ndarray  # int64 [pieces + 1], from 0 to n: where each piece begins
    counted: np.ndarray | None = None  # bool [n], whether the next token carries loss; None: all

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each piece."""
        return np.diff(self.bounds)

    @property
    def weights(self) -> np.ndarray:
        """Of each token's successor as a target, float32 [n]."""
        if self.counted is None:
            return np.ones(len(self.ids) - 1, np.float32)
        return self.counted.astype(np.float32)


@dataclass(frozen=True, eq=False)
class Stream:
    """Documents of a corpus, each [boundary, tokens...], concatenated in a chosen order.

    The last entry of both arrays ends the stream: it points at a boundary, the token after the
    last document. Of `closed` documents, [bos, tokens..., boundary], nothing follows the last
    token; what follows the last of others is the boundary, whatever the next one begins with.
    """

    corpus: Corpus
    starts: np.ndarray  # int64 [num_documents + 1], where each begins in the corpus
    offsets: np.ndarray  # int64 [num_documents + 1], where each begins in this stream
    boundary: int
    closed: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, boundaries included."""
        return int(self.offsets[-1])

    def window(self, start: int, count: int) -> Window:
        """`count` tokens from `start` on; fewer where the stream ends, none beyond."""
        stop = min(start + count, self.num_tokens)
        if start >= stop:
            return Window(np.zeros(1, np.int32), np.zeros(1, np.int64))
        # The token at `stop` is read too; at the stream's end it is the boundary that ends it.
        first, last = np.searchsorted(self.offsets, [start, stop], side="right") - 1
        inner = self.offsets[first + 1 : last + 1]
        bounds = np.concatenate([[start], inner, [stop + 1]])
        begins = bounds[:-1] + (self.starts[first : last + 1] - self.offsets[first : last + 1])
        lengths = np.diff(bounds)
        places = [(b, b + length) for b, length in zip(begins.tolist(), lengths.tolist())]
        pieces = [self.corpus.read(begin, end) for begin, end in places]
        counted = None
        if self.corpus.counted or self.closed:
            counted = np.concatenate([self.corpus.read_counted(*place) for place in places])[:-1]
            if self.closed:
                counted[inner - start - 1] = False
        bounds[-1] = stop
        ids = np.concatenate(pieces).astype(np.int32)
        if bounds[-2] == stop:
            bounds = bounds[:-1]  # of the last document only the next token was read
            ids[-1] = self.boundary
        return Window(ids, bounds - start, counted)


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


def pad(example: Batch, seq_len: int) -> Batch:
    """Fills every field up to `seq_len` with zeros: padding is segment 0 with weight 0."""
    padded = (np.zeros(seq_len, field.dtype) for field in example)
    row = Batch(*padded)
    for whole, field in zip(row, example):
        whole[: len(field)] = field
    return row
