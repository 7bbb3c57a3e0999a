"""Shards of tokens: the cut of files into shards, the creation of one, and their index.

A shard is a slice of the files that depends only on their sizes. Its record is written last, so
that a shard with a record is complete.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import pathlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxscale.config.data_source import setting
from jaxscale.data.text.documents import Bad, Document, Piece, Render, cut, read_documents
from jaxscale.data.text.file_io import compression
from jaxscale.data.text.text_files import File
from jaxscale.data.tokens.encode import encode_documents
from jaxscale.data.tokens.index import (
    FORMAT,
    INDEX,
    UNFINISHED,
    Index,
    Shard,
    content_fingerprint,
    digest_values,
)
from jaxscale.data.tokens.npy_files import ArrayWriter
from jaxscale.data.tokens.tokenizer import Tokenizer
from jaxscale.storage.durable import move, sync
from jaxscale.storage.untrusted import parse_json

_BATCH_BYTES, _BATCH_DOCUMENTS = 2_000_000, 10_000  # tokenised at a time
_NUM_SHARDS = 256  # approximate, within the limits of the next line
_LEAST_BYTES, _MOST_BYTES = 4_000_000, 1_000_000_000
_REPORT_BYTES = 1_000_000
_EXAMPLES = 3  # bad documents that a shard reports

_log = logging.getLogger("jaxscale")

Report = Callable[[int, int], None]
"""Called with the stored bytes and the bytes of text that were read since the last call."""


@dataclass(frozen=True)
class Work:
    """A shard to be written to a folder."""

    number: int
    pieces: tuple[Piece, ...]
    folder: pathlib.Path
    key: str  # digest of everything that determines its content

    @property
    def num_bytes(self) -> int:
        """Stored bytes of its pieces."""
        return sum(piece.num_bytes for piece in self.pieces)


@dataclass(frozen=True)
class Made:
    """The record of a finished shard."""

    key: str
    shard: Shard
    num_bytes: int
    written_bytes: float
    max_id: int
    counts: dict[str, list[int]]  # for each entry of the source, all documents and bad ones
    examples: list[str]  # of their problems


def plan(
    files: Sequence[File], tokenizer: Tokenizer, folder: pathlib.Path, shard_bytes: int = 0
) -> list[Work]:
    """The shards of some files, determined without reading these.

    Args:
      shard_bytes: stored bytes of the files in each; 0 chooses.
    """
    for file in files:
        if file.source.messages:
            _check_template(file, tokenizer)
    total = sum(file.num_bytes for file in files)
    most = shard_bytes or min(max(total // _NUM_SHARDS, _LEAST_BYTES), _MOST_BYTES)
    made_by: list[object] = [FORMAT, tokenizer.fingerprint]
    if tokenizer.template and any(file.source.messages for file in files):
        made_by += tokenizer.template.made_of
    begin = tokenizer.begin(1)
    if begin != (tokenizer.start,) and _continues_prompts(files):
        made_by.append(list(begin))
    return [
        Work(i, tuple(pieces), folder, digest_values([*made_by, *(piece.key for piece in pieces)]))
        for i, pieces in enumerate(_slices(cut(files, most), most))
    ]


def _slices(pieces: Iterable[Piece], most: int) -> list[list[Piece]]:
    """Groups of consecutive pieces, of `most` stored bytes together or a single one."""
    slices: list[list[Piece]] = [[]]
    num_bytes = 0
    for piece in pieces:
        if slices[-1] and num_bytes + piece.num_bytes > most:
            slices.append([])
            num_bytes = 0
        slices[-1].append(piece)
        num_bytes += piece.num_bytes
    return slices


def key_of(works: Sequence[Work]) -> str:
    """A hash of everything that determines the shards, known without reading the files."""
    return digest_values([work.key for work in works])


def make_shard(work: Work, tokenizer: Tokenizer, report: Report) -> None:
    """Tokenises a shard and writes it, then its record.

    Raises:
      ValueError: as `read_documents`; or a document is bad, and its entry allows none.
    """
    unfinished = work.folder / UNFINISHED
    marked = any(piece.file.source.marks_loss for piece in work.pieces)
    lengths: list[int] = []
    hashes: list[int] = []
    counts: dict[str, list[int]] = {}
    examples: list[str] = []
    occurrences = np.zeros(tokenizer.vocab_size, np.int64)
    num_bytes = 0
    part = unfinished / f"{work.number:05d}-{os.getpid()}.part"
    render = tokenizer.template.render_with_loss if tokenizer.template else None
    with contextlib.ExitStack() as stack:
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        tokens = stack.enter_context(ArrayWriter(part, dtype))
        loss = ArrayWriter(part.with_suffix(".loss.part"), np.uint8)
        if marked:
            stack.enter_context(loss)
        for batch in _batches(_good(work.pieces, render, counts, examples, report)):
            encoded = encode_documents(batch, tokenizer, marked=marked)
            occurrences += np.bincount(encoded.ids, minlength=len(occurrences))
            tokens.append(encoded.ids)
            if encoded.counted is not None:
                loss.append(encoded.counted)
            lengths += encoded.lengths
            hashes += [document.hash for document in batch]
            num_bytes += encoded.num_bytes
    shard = _finished(work, tokens, loss if marked else None, len(lengths))
    made = Made(
        key=work.key,
        shard=shard,
        num_bytes=num_bytes,
        written_bytes=float(occurrences @ tokenizer.token_bytes),
        max_id=int(np.flatnonzero(occurrences).max(initial=0)),
        counts=counts,
        examples=examples,
    )
    with open(part, "wb") as file:
        np.savez(
            file,
            record=np.array(json.dumps(dataclasses.asdict(made))),
            lengths=np.array(lengths, np.int64),
            hashes=np.array(hashes, np.uint64),
        )
    sync(work.folder)  # a record exists only if its shard does
    sync(part)
    move(part, _record(work))


def _finished(
    work: Work, tokens: ArrayWriter, loss: ArrayWriter | None, num_documents: int
) -> Shard:
    """Gives the files of a shard their names."""

    def move(array: ArrayWriter, name: str) -> tuple[str, int]:
        num_bytes = array.path.stat().st_size
        array.path.rename(work.folder / name)
        return name, num_bytes

    marks = ("", 0, "")
    if loss is not None:
        marks = (*move(loss, f"loss-{work.number:05d}.npy"), loss.digest)
    name, file_bytes = move(tokens, f"tokens-{work.number:05d}.npy")
    return Shard(name, tokens.length, num_documents, file_bytes, tokens.digest, *marks)


def find_made(work: Work) -> Made | None:
    """The record of a shard, if it is complete and from the same files and settings."""
    try:
        with np.load(_record(work)) as arrays:
            values = parse_json(str(arrays["record"]))
        made = Made(**values | {"shard": Shard(**values["shard"])})
        there = all(
            (work.folder / file).stat().st_size == size for file, size in made.shard.files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None
    return made if made.key == work.key and there else None


def finish_shards(works: Sequence[Work], tokenizer: Tokenizer) -> Index:
    """Joins the records of all shards into the arrays of a corpus and the index.

    Raises:
      ValueError: more documents are bad than their entry allows, or all tokens are special.
    """
    folder = works[0].folder
    made = list(filter(None, map(find_made, works)))
    shards = tuple(one.shard for one in made)
    num_left_out = _check_counts(works, made)
    written_bytes = sum(one.written_bytes for one in made)
    if not written_bytes:
        raise ValueError(
            f"data.tokenizer = {tokenizer.name!r} encodes the text to special tokens only"
        )
    offsets, hashes, num_tokens = _join_arrays(works, folder)
    files = [piece.file for work in works for piece in work.pieces]
    kept = set(map(folder.joinpath, itertools.chain(*(shard.files for shard in shards))))
    for path in {*folder.glob("tokens-*.npy"), *folder.glob("loss-*.npy")} - kept:
        path.unlink()  # left by another cut into shards
    sync(folder)
    index = Index(
        tokenizer=tokenizer.name,
        tokenizer_file=tokenizer.file_name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        boundary=tokenizer.boundary,
        special=dict(tokenizer.special),
        text_begin=str(list(tokenizer.begin(1))) if _continues_prompts(files) else "",
        dtype=np.load(folder / made[0].shard.file, mmap_mode="r").dtype.name,
        num_documents=sum(shard.num_documents for shard in shards),
        num_tokens=num_tokens,
        num_bytes=sum(one.num_bytes for one in made),
        written_bytes=written_bytes,
        max_id=max(one.max_id for one in made),
        num_left_out=num_left_out,
        shards=shards,
        key=key_of(works),
        fingerprint=content_fingerprint(tokenizer.fingerprint, offsets, hashes, shards),
    )
    write_file(folder / INDEX, index.to_json().encode())
    return index


def _join_arrays(works: Sequence[Work], folder: pathlib.Path) -> tuple[str, str, int]:
    """Writes the offsets and hashes of all documents; returns their digests and the tokens."""
    num_tokens = further = 0
    with (
        ArrayWriter(folder / UNFINISHED / "offsets.part", np.int64) as offsets,
        ArrayWriter(folder / UNFINISHED / "hashes.part", np.uint64) as hashes,
    ):
        offsets.append([0])
        for work in works:
            with np.load(_record(work)) as arrays:
                lengths, own = arrays["lengths"], arrays["hashes"]
            offsets.append(num_tokens + np.cumsum(lengths))
            hashes.append(own)
            num_tokens += int(lengths.sum())
            if any(piece.file.source.messages for piece in work.pieces):
                further += int(np.sum(own[1:] == own[:-1]))
    if further:
        _log.info(
            "data: %d documents more than conversations: the chat template renders some messages "
            "of the assistant differently when others follow, and each of these carries loss in a "
            "separate document that ends with it",
            further,
        )
    for array in (offsets, hashes):
        array.path.rename(folder / f"{array.path.stem}.npy")
    return offsets.digest, hashes.digest, num_tokens


def write_file(path: pathlib.Path, data: bytes) -> None:
    """Writes a file atomically and durably."""
    part = path.parent / UNFINISHED / f"{path.name}-{os.getpid()}.part"
    part.write_bytes(data)
    sync(part)
    move(part, path)


def _good(
    pieces: Iterable[Piece],
    render: Render | None,
    counts: dict[str, list[int]],
    examples: list[str],
    report: Report,
) -> Iterator[Document]:
    """The usable documents; counts all documents, and reports the bytes read."""
    for piece in pieces:
        count = counts.setdefault(str(piece.file.entry), [0, 0])
        reported = text = 0  # of this piece: stored bytes, and bytes of text since then
        for document in read_documents(piece, render):
            count[0] += 1
            if isinstance(document, Bad):
                count[1] += 1
                if not piece.file.source.skip_share:
                    raise ValueError(
                        f"{document} (set {setting('skip_share')} to leave out a share of such "
                        "documents)"
                    )
                if len(examples) < _EXAMPLES:
                    examples.append(str(document))
                continue
            yield document
            text += document.num_bytes
            if text >= _REPORT_BYTES:
                # For a compressed file the stored bytes read are known only at its end.
                rest = 0 if compression(piece.file.path) else piece.num_bytes - reported
                report(min(text, rest), text)
                reported, text = reported + min(text, rest), 0
        report(piece.num_bytes - reported, text)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, num_bytes = [], 0
    for document in documents:
        batch.append(document)
        num_bytes += document.num_bytes
        if num_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _check_counts(works: Sequence[Work], made: Sequence[Made]) -> int:
    """Raises if an entry has too many bad documents; returns their total number."""
    entries = {str(p.file.entry): p.file.source for work in works for p in work.pieces}
    examples = [example for one in made for example in one.examples]
    all_bad = 0
    for entry, source in entries.items():
        counts = np.sum([one.counts[entry] for one in made if entry in one.counts], axis=0)
        documents, bad = counts.tolist()
        all_bad += bad
        if bad > source.skip_share * documents:
            raise ValueError(
                f"{bad} of {documents} documents of {source.path[0]} are bad, a share of "
                f"{bad / documents:.2g} and more than skip_share = {source.skip_share:g}; raise "
                f"{setting('skip_share')}; the first: {'; '.join(examples[:_EXAMPLES])}"
            )
    if all_bad:
        _log.info(
            "data: %d bad documents are left out, such as: %s",
            all_bad,
            "; ".join(examples[:_EXAMPLES]),
        )
    return all_bad


def _continues_prompts(files: Sequence[File]) -> bool:
    """Whether there are prompts whose response follows in the same sequence."""
    return any(file.source.response and not file.source.apart for file in files)


def _record(work: Work) -> pathlib.Path:
    return work.folder / UNFINISHED / f"{work.number:05d}.npz"


def _check_template(file: File, tokenizer: Tokenizer) -> None:
    """Raises if conversations cannot be rendered."""
    if tokenizer.template is None or tokenizer.encode_chat is None:
        raise ValueError(
            f"{file.path} has messages, and data.tokenizer = {tokenizer.name!r} has no chat "
            "template; name a tokenizer.json with a chat_template.jinja, or a "
            "tokenizer_config.json that has one, next to it"
        )
