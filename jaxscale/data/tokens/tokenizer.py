"""Tokenizers: bytes, ESM-2's residues, any Hugging Face tokenizer.json, SentencePiece, or BPE
trained on the source.

A document becomes [boundary, tokens...], and the token after its last one is the boundary again:
a model starts a text from the boundary and ends it by predicting the boundary. With a tokenizer
that begins texts with a separate token (`bos`) it becomes [bos, tokens..., boundary].
"""

import dataclasses
import functools
import hashlib
import logging
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from jaxscale.config.data_source import Source, to_sources
from jaxscale.data.text.chat_template import ChatTemplate, find_template, read_json, token_text
from jaxscale.data.text.file_io import exists, read_file
from jaxscale.data.text.text_files import find_files
from jaxscale.data.tokens.bpe_cache import Words, can_pretokenize
from jaxscale.data.tokens.bpe_training import END, RECORD, Training, train
from jaxscale.data.tokens.index import Index, find_prepared, path_in, read_index
from jaxscale.data.tokens.vocabulary import (
    BOUNDARIES,
    find_boundary,
    find_plain_size,
    find_text_begin,
    token_bytes_of,
    written_bytes,
)
from jaxscale.run_folder import COPIED_WITH_TOKENIZER, GENERATION, HF_CONFIG, TOKENIZERS
from jaxscale.storage.durable import replace_file
from jaxscale.storage.object_store import is_remote

MASKS = ("[MASK]", "<mask>", "<|mask|>")
SENTINEL = "<extra_id_{}>"
"""The token that replaces the i-th corrupted span of a text (T5, arXiv 1910.10683)."""

BEGINNING = {"LlamaTokenizer": "<s>", "CodeLlamaTokenizer": "<s>", "GemmaTokenizer": "<bos>"}
"""Classes of transformers that begin texts of a SentencePiece model with `bos_token`, unless
tokenizer_config.json has another value; a tokenizer.json contains the token."""

TRAINING_BYTES = 8_000_000
"""Bytes of text on which a BPE tokenizer is trained; more changes little and takes longer."""

_log = logging.getLogger("jaxscale")


class Encoded(NamedTuple):
    """Ids of a text, and the characters of each; the fields are [tokens], int32."""

    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """The interface of a tokenizer to the rest of the program.

    `token_bytes` [vocab_size] is the number of UTF-8 bytes of text for each id; 0 for the boundary
    and other special tokens. It is exact for bytes and for byte-level BPE. For other tokenizers
    (which may normalise text, or mark word starts) it is the length of the token's written form; a
    corpus scales it so that its total is exact.
    """

    vocab_size: int
    boundary: int
    token_bytes: np.ndarray = field(repr=False)
    fingerprint: str
    # No boundary added; int32 arrays.
    encode: Callable[[Sequence[str]], list[np.ndarray]] = field(repr=False)
    decode: Callable[[Sequence[int] | np.ndarray], str] = field(repr=False)  # no special tokens
    name: str = "bytes"  # the value of `data.tokenizer`
    file: bytes = field(default=b"", repr=False)  # the content of its file; empty for "bytes"
    # Ids by name, never in text.
    special: Mapping[str, int] = field(default_factory=dict, repr=False)
    bos: int | None = None  # begins a document; None: the boundary does
    # The ids that a post-processor puts before a prompt; None: the ids that begin a document.
    text_begin: tuple[int, ...] | None = None
    ends: tuple[int, ...] = ()  # ids that end generated text, in addition to the boundary
    # The other files of its folder.
    other_files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    template: ChatTemplate | None = field(default=None, repr=False)
    # Text with special tokens written out.
    encode_chat: Callable[[str], Encoded] | None = field(default=None, repr=False)
    # From this id all are special tokens that `encode` never returns; None if it may return any.
    plain_size: int | None = None
    prompt: tuple[int, ...] = ()  # virtual tokens of the model before each text, not in vocab_size

    @property
    def text_size(self) -> int:
        """The upper bound of the ids that `encode` returns."""
        return self.vocab_size if self.plain_size is None else self.plain_size

    @property
    def start(self) -> int:
        """The id that begins a document."""
        return self.boundary if self.bos is None else self.bos

    def begin(self, num_tokens: int) -> tuple[int, ...]:
        """The ids before a prompt of `num_tokens` tokens; an empty one begins a document."""
        if self.text_begin is None or not (self.text_begin or num_tokens):
            return (self.start,)
        return self.text_begin

    @property
    def file_name(self) -> str:
        """The name of its file in a folder of shards; empty for "bytes"."""
        if not self.file:
            return ""
        return "tokenizer.json" if self.file.lstrip()[:1] == b"{" else "tokenizer.model"

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the tokenizer by name, its main file last, so that a folder with it is
        complete. Empty for "bytes"."""
        return {**self.other_files, self.file_name: self.file} if self.file else {}

    @property
    def decoder_start(self) -> int:
        """The first token of a decoder after an encoder: padding, as in T5, or the boundary."""
        return self.boundary if self.pad is None else self.pad

    @property
    def pad(self) -> int | None:
        """The id of the padding token, if there is one."""
        return self.special.get("<pad>", self.special.get("[PAD]"))

    @property
    def mask(self) -> int | None:
        """The id of the mask token, if there is one."""
        return next((self.special[name] for name in MASKS if name in self.special), None)

    @property
    def sentinels(self) -> tuple[int, ...]:
        """The ids of the sentinels that replace corrupted spans, in order."""
        found = []
        while (name := SENTINEL.format(len(found))) in self.special:
            found.append(self.special[name])
        return tuple(found)


def begin_texts(tokenizer: Tokenizer, text_begin: str) -> Tokenizer:
    """The tokenizer with the beginning of prompts set by `data.text_begin`."""
    if text_begin == "boundary":
        return dataclasses.replace(tokenizer, text_begin=None)
    return tokenizer


def load_tokenizer(
    name: str,
    source: Sequence[str | Source] = (),
    directory: pathlib.Path | None = None,
    *,
    heldout: float = 0.0,
    seed: int = 0,
    training_bytes: int = TRAINING_BYTES,
    keep: bool = False,
) -> Tokenizer:
    """Loads or trains the tokenizer that `data.tokenizer` names.

    Args:
      name: "bytes", a path to a tokenizer.json or a SentencePiece model, or "bpe:N" to train BPE
        with a vocabulary of N.
      source: `data.source`, the training text of "bpe:N"; a prepared folder contains a tokenizer.
      directory: with the tokenizer.json that `save_tokenizer` wrote, which "bpe:N" uses if it was
        trained on the same text with the same settings.
      heldout: `data.heldout`; held-out documents are not used for training.
      seed: `data.seed`, for that split.
      training_bytes: approximate size of the training text of "bpe:N".
      keep: uses the file in `directory`, whatever its training text: for a run that resumes.

    Raises:
      ValueError: an unknown name, a file that is not a tokenizer, or one without a boundary token.
    """
    if name in SHIPPED:
        return SHIPPED[name]()
    if name.startswith("bpe:"):
        size = name.removeprefix("bpe:")
        if not size.isdecimal() or int(size) < 257:
            raise ValueError(
                f"data.tokenizer = {name!r}; after bpe: comes a number of tokens, at least 257 "
                "(every byte and the end of a document)"
            )
        path = directory / "tokenizer.json" if directory else None
        if keep and path and path.is_file():
            return _of_size(from_file(str(path), name), str(path), int(size))
        if found := _prepared(name, source):
            return found
        files = tuple(find_files(source))
        return _trained(name, Training(int(size), files, heldout, seed, training_bytes), path)
    if not is_remote(name) and not pathlib.Path(name).is_file():
        raise ValueError(
            f"data.tokenizer = {name!r} is neither a file nor a name; it can be 'bytes', 'esm2', "
            "'bpe:4096' or another size, or the path of a tokenizer.json or a SentencePiece "
            "model; download one from Hugging Face first: hf download NAME tokenizer.json "
            "--local-dir DIR"
        )
    return from_file(name, name)


def save_tokenizer(tokenizer: Tokenizer, directory: pathlib.Path) -> None:
    """Writes the files of a tokenizer to a folder, unless it already has the same."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in tokenizer.files.items():
        path = directory / name
        if not path.is_file() or path.read_bytes() != data:
            replace_file(path, data)


def from_file(path: str, name: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json or a SentencePiece model.

    Raises:
      ValueError: the file is neither, or has no boundary token.
    """
    data = read_file(path)
    folder, own = path.rpartition("/")[0] or ".", TOKENIZERS[path.endswith(".model")]
    # Some of these are read here; transformers needs the others.
    names = [name for name in (*TOKENIZERS, *COPIED_WITH_TOKENIZER) if name != own]
    places = {name: path_in(folder, name) for name in names}
    other_files = {name: read_file(place) for name, place in places.items() if exists(place)}
    config = read_json(other_files, "tokenizer_config.json", path)
    if path.endswith(".model"):
        tokenizer = _from_sentencepiece(data, path, name)
        begins = BEGINNING.get(str(config.get("tokenizer_class")).removesuffix("Fast"))
        config = {"add_bos_token": bool(begins), "bos_token": begins, **config}
    else:
        tokenizer = _from_json(data, path, name, token_text(config.get("eos_token")))
    return _with_other_files(tokenizer, other_files, config, path)


def _ends(
    tokenizer: Tokenizer, other_files: Mapping[str, bytes], config: Mapping[str, Any], path: str
) -> tuple[int, ...]:
    """The ids that end a text, except the boundary of documents."""
    # Like transformers, which uses config.json if there is no generation_config.json.
    says = GENERATION if GENERATION in other_files else HF_CONFIG
    ends = read_json(other_files, says, path).get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    ends = [*ends, tokenizer.special.get(token_text(config.get("eos_token")) or "")]
    known = {end for end in ends if isinstance(end, int) and end < tokenizer.vocab_size}
    return tuple(sorted(known - {tokenizer.boundary}))


def _with_other_files(
    tokenizer: Tokenizer, other_files: Mapping[str, bytes], config: Mapping[str, Any], path: str
) -> Tokenizer:
    """The tokenizer with the settings from the other files in its folder.

    Args:
      config: the content of tokenizer_config.json.

    Raises:
      ValueError: one of the files cannot be used.
    """
    bos, fingerprint = tokenizer.bos, tokenizer.fingerprint
    if config.get("add_bos_token") is not None:
        found = tokenizer.special.get(token_text(config.get("bos_token")) or "")
        bos = found if config["add_bos_token"] and found != tokenizer.boundary else None
    if bos != tokenizer.bos:
        fingerprint = _fingerprint(fingerprint.encode(), bos)
    if path.endswith(".model"):  # its tokenizer class in transformers adds it
        tokenizer = dataclasses.replace(tokenizer, text_begin=() if bos is None else (bos,))
    return dataclasses.replace(
        tokenizer,
        bos=bos,
        fingerprint=fingerprint,
        ends=_ends(tokenizer, other_files, config, path),
        other_files=other_files,
        template=find_template(other_files, path),
    )


def _bytes() -> Tokenizer:
    boundary = 256

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(ids: Sequence[int] | np.ndarray) -> str:
        return bytes(int(i) for i in ids if i != boundary).decode(errors="replace")

    token_bytes = np.append(np.ones(256), 0)
    return Tokenizer(257, boundary, token_bytes, "bytes", encode, decode, special={END: boundary})


ESM2 = (
    *("<cls>", "<pad>", "<eos>", "<unk>"),
    *"LAGVSERTIDPKQNFYMHWCXBUZO.-",
    *("<null_1>", "<mask>"),
)
"""The vocabulary of ESM-1b and ESM-2 (Lin et al. 2023), in its published order."""


def _esm2() -> Tokenizer:
    """Residues of proteins, one per token; lower case, a mark in some FASTA files, is ignored."""
    unknown = ESM2.index("<unk>")
    table = np.full(256, unknown, np.int32)
    for i, token in enumerate(ESM2):
        if len(token) == 1:
            table[[ord(token), ord(token.lower())]] = i

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        # A character outside ASCII is one unknown residue.
        return [table[np.frombuffer(t.encode("ascii", "replace"), np.uint8)] for t in texts]

    def decode(ids: Sequence[int] | np.ndarray) -> str:
        return "".join(ESM2[int(i)] for i in ids if len(ESM2[int(i)]) == 1 or i == unknown)

    special = {token: i for i, token in enumerate(ESM2) if len(token) > 1}
    token_bytes = np.array([float(len(token) == 1 or token == "<unk>") for token in ESM2])
    return Tokenizer(
        len(ESM2),
        special["<eos>"],
        token_bytes,
        _fingerprint(" ".join(ESM2).encode()),
        encode,
        decode,
        "esm2",
        special=special,
        bos=special["<cls>"],
    )


SHIPPED = {"bytes": _bytes, "esm2": _esm2}
"""Tokenizers without a file."""


def of_folder(folder: str, index: Index) -> Tokenizer:
    """The tokenizer of a prepared folder, which contains its file."""
    if not index.tokenizer_file:
        return load_tokenizer(index.tokenizer)
    return from_file(path_in(folder, index.tokenizer_file), index.tokenizer)


def _prepared(name: str, source: Sequence[str | Source]) -> Tokenizer | None:
    """The tokenizer of a source's first prepared folder, whose name must be `name`."""
    for entry in to_sources(source) if source else ():
        if folder := find_prepared(entry):
            index = read_index(folder)
            file = (
                path_in(folder, index.tokenizer_file) if index.tokenizer_file else index.tokenizer
            )
            if index.tokenizer != name:
                raise ValueError(
                    f"data.tokenizer = {name!r}, but {folder} was prepared with "
                    f"{index.tokenizer!r}; set data.tokenizer = {file!r}"
                )
            return of_folder(folder, index)
    return None


def _of_size(tokenizer: Tokenizer, where: str, size: int) -> Tokenizer:
    if tokenizer.vocab_size != size:
        raise ValueError(
            f"data.tokenizer = 'bpe:{size}', but {where} has {tokenizer.vocab_size} tokens; "
            "use that size or another folder"
        )
    return tokenizer


def _trained(name: str, training: Training, path: pathlib.Path | None) -> Tokenizer:
    """The tokenizer in a file if it is the result of this training; otherwise trains one."""
    if path and path.is_file():
        record = path.with_name(RECORD)
        if record.is_file() and record.read_bytes() == training.record(path.read_bytes()):
            return from_file(str(path), name)
        _log.info(
            "tokenizer: %s was trained on other text or with other settings; training again", path
        )
    data = train(training)
    tokenizer = _from_json(data, "the trained tokenizer", name)
    return dataclasses.replace(tokenizer, other_files={RECORD: training.record(data)})


def _from_json(data: bytes, where: str, name: str, eos: str | None = None) -> Tokenizer:
    """The tokenizer of a tokenizer.json.

    Args:
      eos: the `eos_token` of tokenizer_config.json.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{where} is not a Hugging Face tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "</s>" in a document is text, not its end
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: i for i, token in sorted(added.items()) if token.special}
    boundary = find_boundary(vocabulary, special, where, eos)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(ids: Sequence[int] | np.ndarray) -> str:
        return tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    @functools.cache
    def with_special_tokens() -> tokenizers.Tokenizer:
        other = tokenizers.Tokenizer.from_buffer(data)
        other.no_truncation()
        other.no_padding()
        return other

    def encode_chat(text: str) -> Encoded:
        encoding = with_special_tokens().encode(text, add_special_tokens=False)
        places = np.array(encoding.offsets, np.int32).reshape(-1, 2)
        return Encoded(np.array(encoding.ids, np.int32), places[:, 0], places[:, 1])

    text_begin = find_text_begin(tokenizer)
    bos = next((first for first in text_begin[:1] if first != boundary), None)
    vocab_size = max(vocabulary.values()) + 1
    text = tokenizer.to_str()
    token_bytes = token_bytes_of(tokenizer, vocab_size, byte_level='"ByteLevel"' in text)
    made_by = text.encode()
    # Only where `eos` chose the boundary, so that fingerprints of other tokenizers do not change.
    if boundary != next((vocabulary[one] for one in BOUNDARIES if one in vocabulary), None):
        made_by += f" ends with {boundary}".encode()
    return Tokenizer(
        vocab_size,
        boundary,
        token_bytes,
        _fingerprint(made_by, bos),
        Words(encode) if can_pretokenize(text) else lambda texts: _arrays(encode(texts)),
        decode,
        name,
        data,
        special,
        bos,
        encode_chat=encode_chat,
        plain_size=find_plain_size(tokenizer, special),
        text_begin=text_begin,
    )


def _from_sentencepiece(data: bytes, where: str, name: str) -> Tokenizer:
    try:
        import sentencepiece  # noqa: PLC0415  an extra
    except ImportError as error:
        raise ValueError(
            f"{where} needs the package sentencepiece; install jaxscale[sentencepiece]"
        ) from error
    model: Any = sentencepiece.SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(data)
    except RuntimeError as error:
        raise ValueError(f"{where} is not a SentencePiece model: {error}") from error
    size = model.get_piece_size()
    pieces = [model.id_to_piece(i) for i in range(size)]
    special = {piece: i for i, piece in enumerate(pieces) if model.is_control(i)}
    boundary = find_boundary(special, special, where)
    threads = 1 if os.environ.get("TOKENIZERS_PARALLELISM") == "false" else -1

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return _arrays(model.encode(list(texts), out_type=int, num_threads=threads))

    def decode(ids: Sequence[int] | np.ndarray) -> str:
        return model.decode([int(i) for i in ids if not model.is_control(int(i))])

    lengths = [
        0 if model.is_control(i) else 1 if model.is_byte(i) else written_bytes(piece)
        for i, piece in enumerate(pieces)
    ]
    return Tokenizer(
        size,
        boundary,
        np.array(lengths, np.float64),
        _fingerprint(data),
        encode,
        decode,
        name,
        data,
        special,
    )


def _arrays(lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.array(ids, np.int32) for ids in lists]


def _fingerprint(data: bytes, bos: int | None = None) -> str:
    data += b"" if bos is None else f" {bos}".encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
