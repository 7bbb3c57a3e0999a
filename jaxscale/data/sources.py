"""Which documents there are: files, folders and globs, in an order that never depends on the disk.

A document is one file. Its identity is its path below the root of its source entry, so a corpus
that moves to another folder or machine keeps its split and its order.
"""

import fnmatch
import hashlib
import io
import logging
import pathlib
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxscale.source import Source, to_sources

STDLIB = "{stdlib}"
_STDLIB_SKIPS = ("site-packages", "dist-packages", "test", "tests", "idle_test")
"""Folders below the standard library that are not its own source, or are its tests."""

_log = logging.getLogger("jaxscale")


@dataclass(frozen=True)
class Document:
    """One file, as it was when the source was listed."""

    path: pathlib.Path
    identity: str  # the path below the root of its source entry, with forward slashes
    num_bytes: int
    mtime_ns: int
    entry: int = 0  # of `data.source`


def find_documents(source: Sequence[str | Source]) -> list[Document]:
    """Lists the documents of `data.source`, entry by entry, each entry sorted.

    An entry is a file, a folder (every file below it) or a glob with `*`, `?`, `[...]` and `**`;
    `{stdlib}` at its start is the source of Python's standard library, without its tests and
    without installed packages. Hidden files, hidden folders and `__pycache__` are left out, as in
    a shell. A file that two entries name is one document.

    Raises:
      ValueError: an entry that matches nothing, or a file that is empty or cannot be read. Only an
        empty `__init__.py`, which marks a Python package, is passed over, and counted in the log.
    """
    found: dict[pathlib.Path, Document] = {}
    num_repeated, markers = 0, []
    entries = [(i, path) for i, one in enumerate(to_sources(source)) for path in one.path]
    for number, entry in entries:
        root, paths = _expand(entry)
        num_files = 0
        for path in paths:
            num_files += 1
            if path in found:
                num_repeated += 1
                continue
            document = _examine(path, root, number)
            if document.num_bytes:
                found[path] = document
            elif path.name == "__init__.py":
                markers.append(path)
            else:
                raise ValueError(f"{path} is empty; remove it, or leave it out of data.source")
        if not num_files:
            raise ValueError(
                f"data.source: {entry!r} matches no file; give files, folders or globs such as "
                "'text/**/*.txt'"
            )
    if not found:
        raise ValueError(f"data.source = {tuple(source)} holds only empty files")
    if num_repeated:
        _log.info("data: files named more than once, which count once: %d", num_repeated)
    if markers:
        _log.info("data: empty __init__.py, which are passed over: %d", len(markers))
    return list(found.values())


def read_document(document: Document) -> str:
    """The text of a document: UTF-8, or for Python source the encoding that it declares.

    Raises:
      ValueError: the file cannot be read or decoded; names the file and the byte offset.
    """
    try:
        data = document.path.read_bytes()
    except OSError as error:
        raise ValueError(f"{document.path} cannot be read: {error.strerror}") from error
    encoding = "utf-8"
    if document.path.suffix == ".py":
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        except SyntaxError as error:
            raise ValueError(f"{document.path} is not Python source: {error}") from error
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{document.path} is not {error.encoding} text: byte {error.start} is "
            f"0x{data[error.start]:02x} ({error.reason}); convert it, or leave it out of "
            "data.source"
        ) from error


def hash_identity(identity: str) -> int:
    """64 bits that stand for a document's identity wherever its name is too long to keep."""
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little")


def draw(hashes: np.ndarray, seed: int) -> np.ndarray:
    """Numbers in [0, 1) that documents draw once and for all, whatever other documents exist.

    Documents below `data.heldout` are held out; the others are read in ascending order.

    Args:
      hashes: of identities, [num_documents], uint64.
    """
    return (_mix(hashes ^ _mix(np.array([seed], np.uint64))) >> np.uint64(11)) / 2**53


def _mix(numbers: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele et al., OOPSLA 2014): every bit stirs every bit."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _expand(entry: str) -> tuple[pathlib.Path, Iterator[pathlib.Path]]:
    """The root of an entry, below which identities are counted, and its files."""
    if entry.startswith(STDLIB):
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        pattern = pathlib.PurePath(entry.removeprefix(STDLIB).lstrip("/") or "**/*.py").parts
        return root, _walk(root, pattern, _STDLIB_SKIPS)
    path = pathlib.Path(entry).expanduser().absolute()
    if path.is_file():
        return path.parent, iter([path])
    if path.is_dir():
        return path, _walk(path, ("**", "*"))
    parts = path.parts
    fixed = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), len(parts) - 1)
    root = pathlib.Path(*parts[:fixed])
    return root, _walk(root, parts[fixed:])


def _walk(
    folder: pathlib.Path, pattern: Sequence[str], skips: Sequence[str] = ()
) -> Iterator[pathlib.Path]:
    """Files below `folder` that match, component by component; `**` is any number of folders."""
    if not folder.is_dir():
        return
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error.strerror}") from error
    head, *rest = pattern
    if head == "**":
        yield from _walk(folder, rest or ["*"], skips)
    for path in entries:
        if path.name == "__pycache__" or path.name in skips:
            continue
        if path.name.startswith(".") and not head.startswith("."):
            continue
        if head == "**":
            if path.is_dir() and not _loops(path):
                yield from _walk(path, pattern, skips)
        elif not fnmatch.fnmatchcase(path.name, head):
            continue
        elif rest:
            yield from _walk(path, rest, skips)
        elif not path.is_dir():
            yield path


def _loops(path: pathlib.Path) -> bool:
    """Whether a link leads back to a folder that contains it."""
    return path.is_symlink() and path.parent.resolve().is_relative_to(path.resolve())


def _examine(path: pathlib.Path, root: pathlib.Path, entry: int) -> Document:
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    identity = path.relative_to(root).as_posix()
    return Document(path, identity, status.st_size, status.st_mtime_ns, entry)
