"""Documents as one flat array of tokens, made once and kept beside the run."""

import functools
import hashlib
import json
import logging
import pathlib
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxscale.data.sources import Document, find_documents, hash_identity, read_document
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.source import Source

FORMAT = 2
"""Raised when the same files and tokenizer would give other arrays."""

_ARRAYS = ("offsets", "hashes", "token_bytes")
_BATCH_BYTES = 8_000_000  # text that is tokenised at a time: parallel over its documents

_log = logging.getLogger("jaxscale")


@dataclass(frozen=True, eq=False)
class Corpus:
    """Every document of a source as [boundary, tokens...], one after another.

    The tokens lie in shards, and are numbered through all of them. `token_bytes` [vocab_size] is
    the UTF-8 length of each id, scaled where the tokenizer's own table is not exact, so that the
    sum over all tokens is `num_bytes`, the size of the text. `fingerprint` depends on the content,
    not on where the files are. Pickled, arrays on disk travel as their paths.
    """

    shards: tuple[np.ndarray, ...]  # unsigned; memory-mapped where they lie on disk
    offsets: np.ndarray  # [num_documents + 1], int64, the token where each document begins
    hashes: np.ndarray  # [num_documents], uint64, of identities, for `draw`
    token_bytes: np.ndarray
    num_bytes: int
    fingerprint: str
    entries: tuple[int, ...] = (0,)  # the first document of each entry of the source

    @property
    def num_documents(self) -> int:
        """Documents, or parts of those that were too long for one."""
        return len(self.hashes)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, the boundary before each included."""
        return int(self.offsets[-1])

    @property
    def tokens(self) -> np.ndarray:
        """All tokens; only where they are one shard."""
        (tokens,) = self.shards
        return tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids of the tokens from `start` to `stop`, [stop - start], unsigned."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
        first, last = np.searchsorted(self._starts, [start, max(start, stop - 1)], "right") - 1
        parts = [
            self.shards[i][max(start - self._starts[i], 0) : stop - self._starts[i]]
            for i in range(first, last + 1)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """The token where each shard begins."""
        return np.cumsum([0, *(len(shard) for shard in self.shards[:-1])])

    def __getstate__(self) -> dict:
        def pack(value: object) -> object:
            if isinstance(value, tuple):
                return tuple(pack(item) for item in value)
            return _OnDisk(str(value.filename)) if isinstance(value, np.memmap) else value

        return {name: pack(value) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict) -> None:
        def unpack(value: object) -> object:
            if isinstance(value, tuple):
                return tuple(unpack(item) for item in value)
            return np.load(value.path, mmap_mode="r") if isinstance(value, _OnDisk) else value

        self.__dict__.update({name: unpack(value) for name, value in state.items()})


@dataclass(frozen=True)
class _OnDisk:
    """An array that is mapped again where a corpus arrives."""

    path: str


def open_corpus(
    source: Sequence[str | Source], tokenizer: Tokenizer, directory: pathlib.Path | None = None
) -> Corpus:
    """Tokenises `data.source`, or maps what an earlier call left in `directory`.

    What is there is used when the files' names, sizes and times and the tokenizer are the same.

    Raises:
      ValueError: as `find_documents` and `read_document`.
    """
    documents = find_documents(source)
    if directory is None:
        corpus = _tokenize(documents, tokenizer)
    else:
        folder = directory / f"tokens-{_key(documents, tokenizer)}"
        if not folder.is_dir():
            if any(directory.glob("tokens-*")):
                _log.info("data: the files or the tokenizer changed; tokenising again")
            _save(folder, _tokenize(documents, tokenizer))
        corpus = _load(folder)
    _log.info(
        "data: %d documents, %.1f MB, %.2f M tokens (%.2f bytes a token)",
        corpus.num_documents, corpus.num_bytes / 1e6, corpus.num_tokens / 1e6,
        corpus.num_bytes / corpus.num_tokens,
    )  # fmt: skip
    return corpus


def _tokenize(documents: Sequence[Document], tokenizer: Tokenizer) -> Corpus:
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    start = reported = time.perf_counter()
    total = sum(document.num_bytes for document in documents)
    pieces, lengths, num_bytes = [], [], 0
    for texts in _batched_texts(documents):
        for ids in tokenizer.encode(texts):
            pieces += [np.array([tokenizer.boundary], dtype), ids.astype(dtype)]
            lengths.append(len(ids) + 1)
        num_bytes += sum(len(text.encode()) for text in texts)
        if time.perf_counter() - reported > 5:
            reported = time.perf_counter()
            _log.info("data: tokenised %.0f of about %.0f MB", num_bytes / 1e6, total / 1e6)
    tokens = np.concatenate(pieces)
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    hashes = np.array([hash_identity(document.identity) for document in documents], np.uint64)
    settings = json.dumps([FORMAT, tokenizer.fingerprint]).encode()
    entries = [document.entry for document in documents]
    firsts = np.searchsorted(entries, np.arange(max(entries) + 1)).tolist()
    counts = np.bincount(tokens, minlength=tokenizer.vocab_size)
    _log.info("data: tokenised %.1f MB in %.1f s", num_bytes / 1e6, time.perf_counter() - start)
    return Corpus(
        shards=(tokens,),
        offsets=offsets,
        hashes=hashes,
        token_bytes=tokenizer.token_bytes * (num_bytes / (counts @ tokenizer.token_bytes)),
        num_bytes=num_bytes,
        fingerprint=_digest(settings, hashes.data, offsets.data, tokens.data),
        entries=tuple(firsts),
    )


def _batched_texts(documents: Sequence[Document]) -> Iterator[list[str]]:
    texts, num_bytes = [], 0
    for document in documents:
        texts.append(read_document(document))
        num_bytes += document.num_bytes
        if num_bytes >= _BATCH_BYTES:
            yield texts
            texts, num_bytes = [], 0
    if texts:
        yield texts


def _save(folder: pathlib.Path, corpus: Corpus) -> None:
    """Writes a folder that appears whole or not at all."""
    unfinished = folder.with_name(f"unfinished-{folder.name}-{uuid.uuid4().hex[:8]}")
    unfinished.mkdir(parents=True, exist_ok=True)
    for name in _ARRAYS:
        np.save(unfinished / f"{name}.npy", getattr(corpus, name))
    np.save(unfinished / "tokens.npy", corpus.tokens)
    index = {name: getattr(corpus, name) for name in ("num_bytes", "fingerprint", "entries")}
    (unfinished / "index.json").write_text(json.dumps(index))
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(unfinished)  # another process was first, with the same content


def _load(folder: pathlib.Path) -> Corpus:
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    index = json.loads((folder / "index.json").read_text())
    return Corpus((tokens,), **arrays, **index | {"entries": tuple(index["entries"])})


def _key(documents: Sequence[Document], tokenizer: Tokenizer) -> str:
    """What a look at the files says of their content."""
    listing = [(str(d.path), d.identity, d.num_bytes, d.mtime_ns, d.entry) for d in documents]
    return _digest(json.dumps([FORMAT, tokenizer.fingerprint, listing]).encode())


def _digest(*parts: bytes | memoryview) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
