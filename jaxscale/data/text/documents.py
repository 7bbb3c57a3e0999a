"""Documents in the files of a source, read in pieces that are independent of each other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxscale.config.data_source import setting
from jaxscale.data.text.chat_template import Messages, Rendered, Span, Tools
from jaxscale.data.text.dialogue import Conversation, Exchange
from jaxscale.data.text.formats import boundary, is_splittable, read_records, where
from jaxscale.data.text.text_files import File, draw, hash_identity

_SAMPLE_PIECES = 64  # maximal pieces of a sample


class Piece(NamedTuple):
    """The documents that begin between two stored bytes of a file."""

    file: File
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Stored bytes; in a compressed file fewer than those of its text."""
        return self.stop - self.start

    @property
    def key(self) -> list[object]:
        """Everything that determines its documents, known without reading the file."""
        file, source = self.file, self.file.source
        return [
            file.path,
            file.identity,
            file.num_bytes,
            file.version,
            file.format,
            self.start,
            self.stop,
            [*source.fields, *source.may_have, bool(source.messages)]
            if source.marks_loss
            else source.field,
            source.boundary,
            source.max_document_bytes,
            source.long_documents,
            *(["apart"] if source.apart else []),
        ]


class Document(NamedTuple):
    """A text, or a part of one that is longer than its source allows."""

    text: str
    num_bytes: int  # of UTF-8
    hash: int  # of the identity: equal for all parts, and for all texts of a conversation
    loss: tuple[Span, ...] | None = None  # the parts with loss; None for the whole text
    chat: bool = False  # rendered by a chat template, special tokens written out
    apart: bool = False  # the part with loss is tokenised separately


Render = Callable[[Messages, Tools], list[Rendered]]
"""Renders a conversation as one text or several, with the parts of each that carry loss."""


@dataclass(frozen=True)
class Bad:
    """A document that cannot be used, and is left out if `skip_share` allows it."""

    file: File
    position: int
    problem: str

    def __str__(self) -> str:
        return f"{where(self.file, self.position)} {self.problem}"


def cut(files: Sequence[File], piece_bytes: int) -> Iterator[Piece]:
    """Cuts each file into pieces of at most `piece_bytes` stored bytes, if its format allows it."""
    for file in files:
        step = piece_bytes if is_splittable(file) else file.num_bytes
        for start in range(0, file.num_bytes, step):
            yield Piece(file, start, min(start + step, file.num_bytes))


def read_documents(piece: Piece, render: Render | None = None) -> Iterator[Document | Bad]:
    """The documents of a piece; documents that are too long are split.

    A document's identity is that of its file, with its position if the file has several.

    Args:
      render: of a chat template; without one, messages are concatenated.

    Raises:
      ValueError: while reading; the file is damaged, or a whole file has no document.
    """
    file, limit = piece.file, piece.file.source.max_document_bytes
    whole = boundary(file) == "file"
    position, found = None, False
    try:
        for position, content in read_records(*piece):
            found = True
            try:
                texts = _texts_of(content, render)
                sizes = [len(text.encode()) for text, _ in texts]
            except UnicodeEncodeError:
                yield Bad(file, position, "has half of a surrogate pair, which is not text")
                continue
            except ValueError as error:
                yield Bad(file, position, str(error))
                continue
            identity = file.identity if whole else f"{file.identity}#{position}"
            for (text, loss), num_bytes in zip(texts, sizes):
                if not limit or num_bytes <= limit:
                    chat, apart = bool(file.source.messages), file.source.apart
                    yield Document(text, num_bytes, hash_identity(identity), loss, chat, apart)
                elif file.source.long_documents == "split":
                    yield from _split(text, limit, hash_identity(identity))
                else:
                    yield Bad(
                        file,
                        position,
                        f"has {num_bytes} bytes, more than max_document_bytes = {limit}; raise "
                        f"{setting('max_document_bytes')}, or set {setting('long_documents')} to "
                        "'split'",
                    )
    except ValueError as error:
        after = "" if position is None or whole else f" (after {where(file, position)})"
        raise ValueError(f"{error}{after}") from error
    if not found and piece.start == 0 and piece.stop == file.num_bytes:
        raise ValueError(f"{file.path} has no document; remove it from {file.source.listed_in}")


def sample_documents(
    files: Sequence[File],
    num_bytes: int,
    *,
    heldout: float = 0.0,
    seed: int = 0,
    render: Render | None = None,
) -> Iterator[Document]:
    """A deterministic sample of about `num_bytes` of documents, or every document.

    They come from pieces spread over all files; held-out documents are left out.

    Raises:
      ValueError: as `read_documents`.
    """
    total = sum(file.num_bytes for file in files)
    pieces = list(cut(files, max(total // 1024, 1 << 14)))
    hashes = [
        hash_identity(p.file.identity + (f"#{p.start}" if is_splittable(p.file) else ""))
        for p in pieces
    ]
    taken, most = 0, num_bytes
    if total > num_bytes:
        most = -(-num_bytes // min(len(pieces), _SAMPLE_PIECES))
    for i in np.argsort(draw(np.array(hashes, np.uint64), seed), kind="stable"):
        documents = list(_first(pieces[i], most / (1 - heldout), render))
        drawn = draw(np.array([document.hash for document in documents], np.uint64), seed)
        for document, number in zip(documents, drawn):
            if number >= heldout and taken < num_bytes:
                yield document
                taken += document.num_bytes
        if taken >= num_bytes:
            return


def _first(piece: Piece, num_bytes: float, render: Render | None) -> Iterator[Document]:
    """The first documents of a piece, until they have `num_bytes`."""
    taken = 0
    for document in read_documents(piece, render):
        if isinstance(document, Bad):  # reported when all files are read
            continue
        yield document
        taken += document.num_bytes
        if taken >= num_bytes:
            return


def _texts_of(
    content: str | Exchange | Conversation | ValueError, render: Render | None
) -> list[tuple[str, tuple[Span, ...] | None]]:
    """The texts of a record, several only for a conversation, with the parts of each that carry
    loss; None for all of it.

    Raises:
      ValueError: the record cannot be used.
    """
    match content:
        case ValueError():
            raise content
        case str():
            return [(content, None)]
        case Exchange(prompt, response):
            return [(prompt + response, ((len(prompt), len(prompt + response)),))]
        case Conversation(messages, tools) if render is not None:
            return [(text, tuple(spans)) for text, spans in render(messages, tools)]
    texts = [message.get("content") for message in content.messages]
    return [("\n".join(text for text in texts if isinstance(text, str)), None)]


def _split(text: str, limit: int, hash: int) -> Iterator[Document]:
    """Parts of at most `limit` bytes, cut between characters."""
    data, start = text.encode(), 0
    while start < len(data):
        stop = start + limit
        while stop < len(data) and data[stop] & 0xC0 == 0x80:  # inside a character
            stop -= 1
        part = data[start:stop]
        yield Document(part.decode(), len(part), hash)
        start = stop
