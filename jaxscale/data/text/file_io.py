"""Reads local files and files at URLs (s3://, gs://).

An error while a file is read becomes a ValueError that names the file, or an AwayError if it may be
transient.
"""

import collections
import contextlib
import gzip
import io
import pathlib
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, cast

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from jaxscale.storage.durable import MAY_PASS, reason
from jaxscale.storage.object_store import answer, filesystem, is_remote

ByteRange = tuple[str, int, int]
"""A URL, the first byte, and the one after the last."""

COMPRESSIONS = (".gz", ".zst")

BUFFER_BYTES = 2**17

AHEAD_BYTES = 2**22
"""Read-ahead of a file at a URL: a shard may need only 4 MB of it, and s3fs would fetch 50 more."""


def compression(path: str) -> str:
    """The compression of a file by its suffix: ".gz", ".zst" or ""."""
    suffix = pathlib.PurePosixPath(path).suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


class AwayError(OSError):
    """Data that cannot be read now, such as on a network file system that does not answer."""

    exit_status = 1  # it may be transient, so a supervisor tries again


LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors of an object store that are not transient."""


def cannot_be_read(path: str, error: OSError) -> ValueError | AwayError:
    """The error to raise for one of the operating system or of an object store."""
    passes = error.errno in MAY_PASS or (is_remote(path) and not isinstance(error, LASTING))
    kind = AwayError if passes else ValueError
    return kind(f"{path} cannot be read: {error.strerror or error}")


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Converts errors while a file is read to a ValueError, or an AwayError, that names it."""
    try:
        with _of_libraries(path):
            yield
    except EOFError as error:
        why = ": its compressed data have no end" if compression(path) else ""
        raise ValueError(f"{path} is cut short{why}; fetch it again") from error
    except (gzip.BadGzipFile, zlib.error, zstd.ZstdError) as error:
        raise ValueError(f"{path} is damaged: {error}; fetch it again") from error
    except AwayError:
        raise
    except OSError as error:
        raise cannot_be_read(path, error) from error


@contextlib.contextmanager
def _of_libraries(path: str) -> Iterator[None]:
    """Converts the error types of object-store libraries to OSError."""
    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error, zstd.ZstdError):
        raise
    except Exception as error:
        if not is_remote(path):
            raise
        raise OSError(reason(error)) from error


@contextlib.contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed if it has the suffix.

    Raises:
      ValueError: on opening or while reading; the file cannot be read, or is damaged.
      AwayError: the same; it cannot be read now.
    """
    with reading(path), contextlib.ExitStack() as stack:
        raw = stack.enter_context(open_stored(path))
        if compression(path) == ".gz":
            yield cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=raw)))
        elif compression(path) == ".zst":
            yield cast(BinaryIO, stack.enter_context(zstd.ZstdFile(raw)))
        else:
            yield raw


def open_stored(path: str) -> Any:
    """A file's bytes, as they are stored."""
    if is_remote(path):
        fs, name = filesystem(path)
        # fsspec's `readline` copies a whole block for each line.
        return io.BufferedReader(fs.open(name, "rb", block_size=AHEAD_BYTES), BUFFER_BYTES)
    return open(path, "rb", buffering=BUFFER_BYTES)


def read_file(path: str) -> bytes:
    """All bytes of a file, as they are stored."""
    with reading(path), open_stored(path) as file:
        return file.read()


def exists(path: str) -> bool:
    """Whether a local file, or a file at a URL, exists."""
    if not is_remote(path):
        return pathlib.Path(path).expanduser().is_file()
    fs, name = filesystem(path)
    return answer(path, lambda: fs.exists(name))


def read_ranges(wanted: Sequence[ByteRange]) -> list[bytes]:
    """Ranges of bytes of files at URLs, requested concurrently if the library can, since each is a
    round trip."""
    found: dict[int, bytes | Exception] = {}
    groups: collections.defaultdict[Any, list[tuple[int, str]]] = collections.defaultdict(list)
    for i, (path, start, stop) in enumerate(wanted):
        if start < stop:  # S3 has no empty ranges, and a shard may be empty
            fs, name = filesystem(path)
            groups[fs].append((i, name))
    for fs, places in groups.items():
        numbers, names = zip(*places)
        starts, stops = zip(*(wanted[i][1:] for i in numbers))
        with reading(wanted[numbers[0]][0]):
            found |= zip(numbers, fs.cat_ranges(list(names), list(starts), list(stops)))
    return [_checked(found.get(i, b""), *each) for i, each in enumerate(wanted)]


def _checked(data: bytes | Exception, path: str, start: int, stop: int) -> bytes:
    """The bytes of a range; raises if they could not be read."""
    with reading(path):
        if isinstance(data, Exception):
            raise data
    if len(data) != stop - start:
        raise ValueError(f"{path} is cut short: it has no bytes {start} to {stop}")
    return data
