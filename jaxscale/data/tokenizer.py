"""Text to ids and back: bytes, any Hugging Face tokenizer.json, or byte pairs learnt on the spot.

A document becomes [boundary, tokens...], and the token after its last one is the boundary again:
a model starts a text from the boundary and ends it by predicting the boundary.
"""

import hashlib
import logging
import pathlib
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxscale.data.sources import draw, find_documents, hash_identity, read_document
from jaxscale.source import Source

END = "<|endoftext|>"
BOUNDARIES = (
    END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
"""Names that tokenizers give to the end of a document; the first one present is taken."""

TRAINING_BYTES = 8_000_000
"""Text that a byte-pair tokenizer is trained on; more changes little and takes longer."""

_log = logging.getLogger("jaxscale")


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """What the rest of the program knows about a tokenizer.

    `token_bytes` [vocab_size] is how many UTF-8 bytes of text each id stands for; 0 for the
    boundary and other special tokens. It is exact for bytes and for byte-level byte pairs. For
    other tokenizers (which may normalise text, or mark word starts) it is the length of the
    token's written form; a corpus scales it so that its total is exact.
    """

    vocab_size: int
    boundary: int
    token_bytes: np.ndarray
    fingerprint: str
    encode: Callable[[Sequence[str]], list[np.ndarray]]  # no boundary added; int32 arrays
    decode: Callable[[Sequence[int] | np.ndarray], str]  # special tokens are left out


def load(
    name: str,
    source: Sequence[str | Source] = (),
    directory: pathlib.Path | None = None,
    *,
    heldout: float = 0.0,
    seed: int = 0,
) -> Tokenizer:
    """Makes the tokenizer that `data.tokenizer` names.

    Args:
      name: "bytes", a path to a tokenizer.json, or "bpe:N" for N byte pairs.
      source: `data.source`, which "bpe:N" is trained on.
      directory: where "bpe:N" keeps its tokenizer.json, and finds it again.
      heldout: `data.heldout`; documents held out are not trained on.
      seed: `data.seed`, for that split.

    Raises:
      ValueError: an unknown name, a file that is no tokenizer, or one without a boundary token.
    """
    if name == "bytes":
        return _bytes()
    if name.startswith("bpe:"):
        size = name.removeprefix("bpe:")
        if not size.isdecimal() or int(size) < 257:
            raise ValueError(
                f"data.tokenizer = {name!r}; after bpe: comes a number of tokens, at least 257 "
                "(every byte and the end of a document)"
            )
        return _byte_pairs(int(size), source, directory, heldout, seed)
    if not pathlib.Path(name).is_file():
        raise ValueError(
            f"data.tokenizer = {name!r} is neither a file nor a name; it can be 'bytes', "
            "'bpe:4096' or another size, or the path of a tokenizer.json"
        )
    return _from_file(pathlib.Path(name))


def _bytes() -> Tokenizer:
    boundary = 256

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(ids: Sequence[int] | np.ndarray) -> str:
        return bytes(int(i) for i in ids if i != boundary).decode(errors="replace")

    token_bytes = np.append(np.ones(256), 0)
    return Tokenizer(257, boundary, token_bytes, "bytes", encode, decode)


def _byte_pairs(
    size: int,
    source: Sequence[str | Source],
    directory: pathlib.Path | None,
    heldout: float,
    seed: int,
) -> Tokenizer:
    path = directory / "tokenizer.json" if directory else None
    if path and path.is_file():
        tokenizer = _from_file(path)
        if tokenizer.vocab_size != size:
            raise ValueError(
                f"data.tokenizer = 'bpe:{size}', but {path} has {tokenizer.vocab_size} tokens; "
                "use that size or another folder"
            )
        return tokenizer
    trained = _train(size, source, heldout, seed)
    if directory and path:
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = directory / f"unfinished-tokenizer-{uuid.uuid4().hex[:8]}.json"
        trained.save(str(unfinished))
        unfinished.replace(path)
    return _from_library(trained, "the trained tokenizer")


def _train(
    size: int, source: Sequence[str | Source], heldout: float, seed: int
) -> tokenizers.Tokenizer:
    """Byte-level byte-pair encoding of a sample of whole training documents; deterministic."""
    start = time.perf_counter()
    documents = find_documents(source)
    drawn = draw(np.array([hash_identity(d.identity) for d in documents], np.uint64), seed)
    texts, num_bytes = [], 0
    for i in np.argsort(drawn, kind="stable"):
        if drawn[i] >= heldout and num_bytes < TRAINING_BYTES:
            texts.append(read_document(documents[i]))
            num_bytes += documents[i].num_bytes
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    if trained.get_vocab_size() < size:
        raise ValueError(
            f"data.tokenizer = 'bpe:{size}', but the training documents of data.source "
            f"({num_bytes:,} bytes) yield only {trained.get_vocab_size()} tokens; set "
            f"data.tokenizer = 'bpe:{trained.get_vocab_size()}' or give more text"
        )
    _log.info(
        "tokenizer: %d byte pairs learnt from %d documents (%.1f MB) in %.1f s",
        size, len(texts), num_bytes / 1e6, time.perf_counter() - start,
    )  # fmt: skip
    return trained


def _from_file(path: pathlib.Path) -> Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a Hugging Face tokenizer.json: {error}") from error
    return _from_library(tokenizer, str(path))


def _from_library(tokenizer: tokenizers.Tokenizer, where: str) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "</s>" inside a document is text, not its end
    vocabulary = tokenizer.get_vocab()
    boundary = next((vocabulary[name] for name in BOUNDARIES if name in vocabulary), None)
    if boundary is None:
        special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
        raise ValueError(
            f"{where} has no token for the end of a document; it has the special tokens "
            f"{special}, and one of {', '.join(BOUNDARIES)} is needed"
        )

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(ids: Sequence[int] | np.ndarray) -> str:
        return tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    vocab_size = max(vocabulary.values()) + 1
    text = tokenizer.to_str()
    fingerprint = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    token_bytes = _token_bytes(tokenizer, vocab_size, byte_level='"ByteLevel"' in text)
    return Tokenizer(vocab_size, boundary, token_bytes, fingerprint, encode, decode)


def _token_bytes(tokenizer: tokenizers.Tokenizer, size: int, *, byte_level: bool) -> np.ndarray:
    """UTF-8 bytes that each id stands for, from its written form."""
    lengths = np.zeros(size)
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())  # one character for each of 256 bytes
    added = tokenizer.get_added_tokens_decoder()
    for token, i in tokenizer.get_vocab().items():
        if i in added:
            lengths[i] = 0 if added[i].special else len(token.encode())
        elif byte_level and alphabet.issuperset(token):
            lengths[i] = len(token)
        elif len(token) == 6 and token.startswith("<0x"):  # SentencePiece's byte fallback
            lengths[i] = 1
        else:  # SentencePiece writes a space as ▁; WordPiece marks what continues a word
            lengths[i] = len(token.removeprefix("##").replace("▁", " ").encode())
    return lengths
