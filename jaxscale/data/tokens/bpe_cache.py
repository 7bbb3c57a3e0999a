"""BPE with a cache of words, several times as fast as the library: it encodes each word only once.

A tokenizer that first splits text into words, by a pattern, encodes each word separately. So text
may be cut wherever the pattern always begins a new word, and known words are looked up. The cuts
are fewer than the words, and are found in bytes, many at a time:

1. between an ASCII letter or digit and an ASCII character that is neither, nor an apostrophe;
2. before a space that is followed by a character other than white space;
3. between a line feed, with one printable ASCII character before it, and an ASCII letter.

They are valid for the patterns in `PATTERNS`: none has a word that continues across such a cut, and
their only look-ahead, `\\s+(?!\\S)`, gives the same result with and without it.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
PATTERNS = (
    _LLAMA % r"\p{N}{1,3}",  # Llama 3, and cl100k
    _LLAMA % r"\p{N}",  # Qwen 2
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"  # o200k
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL,
)
"""Patterns of `Split`, in addition to that of GPT-2, which `ByteLevel` contains."""

_MAX_BYTES = 1 << 25  # of cached words; beyond that the cache is cleared

_LONG = 1 << 22  # characters
_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z0-9])(?= [A-Za-z])")

_CODES = np.arange(256)
_ASCII = _CODES < 128
_LETTER = _ASCII & np.array([chr(i).isalpha() for i in range(256)])
_ALNUM = _ASCII & np.array([chr(i).isalnum() for i in range(256)])
_APOSTROPHE = ord("'")
_OTHER = _ASCII & ~_ALNUM & (_CODES != _APOSTROPHE)
_PRINTABLE = (_CODES > 32) & (_CODES < 127)
# First bytes of characters that are white space in no definition; lead bytes shared with some white
# space are excluded.
_NOT_SPACE = _PRINTABLE | (_CODES >= 0xC3) & ~np.isin(_CODES, (0xE1, 0xE2, 0xE3, 0xEF))


def can_pretokenize(definition: str) -> bool:
    """Whether the cuts above leave the ids of a tokenizer.json unchanged."""
    parts = json.loads(definition)
    added = [token for token in parts["added_tokens"] if not token["special"]]
    normalizer = (parts["normalizer"] or {}).get("type")
    if parts["model"]["type"] != "BPE" or added or normalizer not in (None, "NFC"):
        return False
    match parts["pre_tokenizer"]:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return True
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": regex},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        }:
            return regex in PATTERNS
    return False


class Words:
    """Encodes texts like `encode`, which it calls once for each piece between cuts."""

    def __init__(self, encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]) -> None:
        self._encode = encode
        self._clear()

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32."""
        if max(map(len, texts), default=0) <= _LONG:
            return self._encode_short(texts)
        # A long text is encoded in parts, so that its words need not be in memory at once.
        return [
            np.concatenate([self._encode_short([page])[0] for page in _pages(text)])
            for text in texts
        ]

    def _encode_short(self, texts: Sequence[str]) -> list[np.ndarray]:
        parts = [text.encode() for text in texts]
        data = b"".join(parts)
        if not data:
            return [np.zeros(0, np.int32) for _ in texts]
        ends = np.cumsum([len(part) for part in parts])
        cuts = _find_cuts(np.frombuffer(data, np.uint8), ends)
        places = cuts.tolist()
        words = [data[begin:end] for begin, end in itertools.pairwise(places)]
        codes = self._look_up(words)
        lengths = self._lengths[codes]
        stops = np.cumsum(lengths)
        ids = self._ids[
            np.arange(stops[-1]) + np.repeat(self._starts[codes] - (stops - lengths), lengths)
        ]
        # Number of ids before the end of each text; an empty text adds none.
        bounds = np.append(0, stops)[np.searchsorted(cuts, np.append(0, ends))].tolist()
        return [ids[begin:end] for begin, end in itertools.pairwise(bounds)]

    def _look_up(self, words: list[bytes]) -> np.ndarray:
        if self._num_bytes > _MAX_BYTES:
            self._clear()
        codes = np.fromiter(map(self._codes.__getitem__, words), np.int64, len(words))
        if new := self._codes.new:
            encoded = self._encode([word.decode() for word in new])
            lengths = np.array([len(ids) for ids in encoded])
            starts = len(self._ids) + np.cumsum(lengths) - lengths
            flat = np.fromiter(itertools.chain.from_iterable(encoded), np.int32, lengths.sum())
            self._ids = np.append(self._ids, flat)
            self._starts, self._lengths = (
                np.append(self._starts, starts),
                np.append(self._lengths, lengths),
            )
            self._num_bytes += sum(len(word) for word in new)
            self._codes.new = []
        return codes

    def _clear(self) -> None:
        self._codes, self._num_bytes = _Codes(), 0
        self._ids = np.zeros(0, np.int32)
        self._starts, self._lengths = np.zeros(0, np.int64), np.zeros(0, np.int64)


class _Codes(dict):
    """Numbers words in the order of their first look-up."""

    def __init__(self) -> None:
        self.new: list[bytes] = []

    def __missing__(self, word: bytes) -> int:
        self.new.append(word)
        self[word] = len(self)
        return self[word]


def _pages(text: str) -> Iterator[str]:
    """A text in parts, cut where both the first and the second rule cut."""
    start = 0
    while cut := _BETWEEN_WORDS.search(text, start + _LONG):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _find_cuts(data: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The bytes at which pieces begin, and the end.

    Args:
      data: the UTF-8 bytes of texts, one after another.
      ends: where each text ends.
    """
    cut = np.zeros(len(data) + 1, bool)
    cut[1:-2] = (data[1:-1] == ord(" ")) & _NOT_SPACE[data[2:]]
    cut[ends - 1] = False  # the rule would read the next text's first character
    cut[1:-1] |= _ALNUM[data[:-1]] & _OTHER[data[1:]]
    cut[2:-1] |= _PRINTABLE[data[:-2]] & (data[1:-1] == ord("\n")) & _LETTER[data[2:]]
    cut[0] = True
    cut[ends] = True
    return np.flatnonzero(cut)
