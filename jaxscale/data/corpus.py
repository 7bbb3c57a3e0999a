"""Documents as one flat array of tokens, made once and kept beside the run."""

import hashlib
import json
import logging
import os
import pathlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxscale.data.sources import Document, find_documents, read_document
from jaxscale.data.tokenizer import Tokenizer

FORMAT = 1
"""Raised when the same files and tokenizer would give other arrays."""

_BATCH_BYTES = 8_000_000  # text that is tokenised at a time: parallel over its documents

_log = logging.getLogger("jaxscale")


@dataclass(frozen=True, eq=False)
class Corpus:
    """Every document of a source as [boundary, tokens...], one after another.

    `token_bytes` [vocab_size] is the UTF-8 length of each id, scaled where the tokenizer's own
    table is not exact, so that the sum over `tokens` is the size of the text. `fingerprint`
    depends on the content, not on where the files are.
    """

    tokens: np.ndarray  # [num_tokens], unsigned; memory-mapped when it lies on disk
    offsets: np.ndarray  # [num_documents + 1], where each document begins in `tokens`
    identities: tuple[str, ...]
    token_bytes: np.ndarray
    boundary: int
    fingerprint: str


def open_corpus(
    source: Sequence[str], tokenizer: Tokenizer, directory: pathlib.Path | None = None
) -> Corpus:
    """Tokenises `data.source`, or maps what an earlier call left in `directory`.

    What is there is used when the files' names, sizes and times and the tokenizer are the same.

    Raises:
      ValueError: as `find_documents` and `read_document`.
    """
    documents = find_documents(source)
    key = _key(documents, tokenizer)
    folder = directory / f"tokens-{key}" if directory else None
    if folder is None:
        tokens, offsets, num_bytes = _tokenize(documents, tokenizer)
        fingerprint = _content(documents, tokenizer, tokens, offsets)
    else:
        if not folder.is_dir():
            if any(folder.parent.glob("tokens-*")):
                _log.info("data: the files or the tokenizer changed; tokenising again")
            _write(folder, documents, tokenizer)
        tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        offsets = np.load(folder / "offsets.npy")
        index = json.loads((folder / "index.json").read_text())
        num_bytes, fingerprint = index["num_bytes"], index["fingerprint"]
    counts = np.bincount(tokens, minlength=tokenizer.vocab_size)
    counted_bytes = float(counts @ tokenizer.token_bytes)
    _log.info(
        "data: %d documents, %.1f MB, %.2f M tokens (%.2f bytes a token)",
        len(documents), num_bytes / 1e6, len(tokens) / 1e6, num_bytes / len(tokens),
    )  # fmt: skip
    return Corpus(
        tokens=tokens,
        offsets=offsets,
        identities=tuple(document.identity for document in documents),
        token_bytes=tokenizer.token_bytes * (num_bytes / counted_bytes),
        boundary=tokenizer.boundary,
        fingerprint=fingerprint,
    )


def _tokenize(
    documents: Sequence[Document], tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokens, offsets, and the UTF-8 bytes of the text."""
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
    _log.info("data: tokenised %.1f MB in %.1f s", num_bytes / 1e6, time.perf_counter() - start)
    return np.concatenate(pieces), np.cumsum([0, *lengths], dtype=np.int64), num_bytes


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


def _write(folder: pathlib.Path, documents: Sequence[Document], tokenizer: Tokenizer) -> None:
    """Writes a folder of arrays that appears whole or not at all."""
    tokens, offsets, num_bytes = _tokenize(documents, tokenizer)
    unfinished = folder.with_name(f"unfinished-{folder.name}-{os.getpid()}")
    unfinished.mkdir(parents=True, exist_ok=True)
    np.save(unfinished / "tokens.npy", tokens)
    np.save(unfinished / "offsets.npy", offsets)
    index = {
        "num_documents": len(documents),
        "num_tokens": len(tokens),
        "num_bytes": num_bytes,
        "fingerprint": _content(documents, tokenizer, tokens, offsets),
    }
    (unfinished / "index.json").write_text(json.dumps(index, indent=1))
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(unfinished)  # another process was first, with the same content


def _key(documents: Sequence[Document], tokenizer: Tokenizer) -> str:
    """What a look at the files says of their content."""
    listing = [(str(d.path), d.identity, d.num_bytes, d.mtime_ns) for d in documents]
    return _digest(json.dumps([FORMAT, tokenizer.fingerprint, listing]).encode())


def _content(
    documents: Sequence[Document], tokenizer: Tokenizer, tokens: np.ndarray, offsets: np.ndarray
) -> str:
    names = json.dumps([FORMAT, tokenizer.fingerprint, [d.identity for d in documents]])
    return _digest(names.encode(), offsets.tobytes(), tokens.data)


def _digest(*parts: bytes | memoryview) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
