"""Durable file writes (fsync), read locks, and change detection."""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import stat
from collections.abc import Callable, Iterator, Mapping

log = logging.getLogger("jaxscale")

SMALL_BYTES = 2**20
"""Files up to this size are compared by digest, larger ones by size; their content is checked when
it is read."""

MAY_PASS = frozenset(
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EMFILE", "ENFILE", "ENOMEM"),  # may be free the next time
        *("EIO", "ESTALE", "EREMOTEIO", "EAGAIN", "EINTR", "EBUSY", "ENOLCK"),
        *("ETIMEDOUT", "ECONNRESET", "ECONNREFUSED", "ECONNABORTED", "ENOTCONN"),
        *("ENETDOWN", "ENETUNREACH", "ENETRESET", "EHOSTDOWN", "EHOSTUNREACH", "ESHUTDOWN"),
    )
    if hasattr(errno, name)  # macOS lacks one
)
"""Errors of the operating system that may be transient, such as those of a network file system: a
file may be intact, and a supervisor tries again."""

_REASONS = sorted({os.strerror(code) for code in errno.errorcode}, key=len, reverse=True)


def sync(path: pathlib.Path) -> None:
    """Flushes a file's content, or a folder's entries, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: pathlib.Path) -> None:
    """`sync` of a folder and of everything in it."""
    for place, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(pathlib.Path(place, name))
        sync(pathlib.Path(place))


def replace_file(path: pathlib.Path, data: bytes) -> None:
    """Writes a file atomically: after a crash, the old or the new one is on disk, whole."""
    partial = path.with_name(f"{path.name}.new")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # the disk is full
        partial.unlink(missing_ok=True)
        raise
    move(partial, path)


class GrowingFile:
    """An append-only file of records, each written at once. On a full disk, records are kept in
    memory until they can be written; training continues. A removed or moved file is created
    again."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._file = path, path.open("ab", buffering=0)
        self._waiting = bytearray()

    def add(self, record: bytes) -> None:
        """Writes a record, after the records that could not be written yet."""
        had_space = not self._waiting
        self._waiting += record
        try:
            if not self._path.exists():
                self._path.parent.mkdir(parents=True, exist_ok=True)
                before, self._file = self._file, self._path.open("ab", buffering=0)
                before.close()
                log.warning(f"warning: {self._path} was removed or moved; created again")
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            if had_space:
                log.warning(
                    f"warning: {self._path} cannot be written ({error.strerror}); its records are "
                    "kept in memory until it can"
                )

    def close(self) -> None:
        """Closes the file, with a warning when records could not be written."""
        self.add(b"")
        if self._waiting:
            log.warning(f"warning: the last {len(self._waiting)} bytes of {self._path} are lost")
        self._file.close()


def move(path: pathlib.Path, target: pathlib.Path) -> None:
    """Renames a file or folder durably: the new name is on disk on return."""
    path.rename(target)
    sync(target.parent)


@contextlib.contextmanager
def held(path: pathlib.Path) -> Iterator[None]:
    """Shared lock (flock) of a file, against `claimed`; waits while another process claims it.

    If the file is missing, or the file system has no locks, nothing is locked.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            fcntl.flock(stack.enter_context(open(path, "rb")), fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def claimed(path: pathlib.Path) -> Iterator[bool]:
    """Exclusive lock (flock) of a file, without waiting; False when a reader has a shared lock."""
    with contextlib.ExitStack() as stack:
        free = True
        try:
            file = stack.enter_context(open(path, "r+b"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:  # no such file, or no locks there
            pass
        yield free


@contextlib.contextmanager
def exclusive(path: pathlib.Path, waiting: Callable[[], object]) -> Iterator[None]:
    """Exclusive lock by a lock file; waits for a process that has it.

    Args:
      waiting: called before a wait.
    """
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # no locks on this file system
            pass
        yield


def special_file(folder: pathlib.Path) -> pathlib.Path | None:
    """The first entry below a folder that is not a file, folder or link to one. Opening a named
    pipe would block until its other end is opened, even when the process is asked to stop."""
    return _special(folder, top=True) if folder.is_dir() else None


def _special(folder: pathlib.Path, *, top: bool = False) -> pathlib.Path | None:
    with os.scandir(folder) as entries:
        for entry in entries:
            path = pathlib.Path(entry.path)
            if entry.is_dir(follow_symlinks=top):  # `checkpoints` may be a link to another disk
                if found := _special(path):
                    return found
            elif not entry.is_file() and path.exists() and not path.is_dir():
                return path
    return None


def describe_files(folder: pathlib.Path) -> dict[str, list]:
    """Size, and for small files the digest, of each file below a folder, for `changed_file`."""
    return {
        str(path.relative_to(folder)): _describe(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def changed_file(folder: pathlib.Path, files: Mapping[str, list]) -> str:
    """The problem of the first file that differs from its description by `describe_files`; "" if
    none does. Reads only small files."""
    for name, (size, digest) in files.items():
        path = folder / name
        try:
            found, found_digest = _describe(path)
        except (FileNotFoundError, NotADirectoryError):
            return f"{path} is missing"
        if found != size:
            return f"{path} has {found} bytes, and {size} were written"
        if found_digest != digest:
            return f"{path} changed since it was written"
    return ""


def json_digest(values: Mapping[str, object]) -> str:
    """A digest of a JSON value, independent of the order of keys."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _describe(path: pathlib.Path) -> list:
    """Size and digest of one file; raises FileNotFoundError for anything but a file."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    size = about.st_size
    if size > SMALL_BYTES:
        return [size, ""]
    return [size, hashlib.sha256(path.read_bytes()).hexdigest()]


def reason(error: BaseException) -> str:
    """The reason of an error, in a few words: the operating system's, if the message has one."""
    text = f"{type(error).__name__}: {error}"
    for known in _REASONS:
        if known in text:
            return known
    return text.splitlines()[0][:300]
