"""Files that are on disk when we say so, hold while they are read, and show when they changed."""

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
"""Files up to this size are compared by digest; of larger ones the size, and what they hold when
it is read."""

MAY_PASS = frozenset(
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EMFILE", "ENFILE", "ENOMEM"),  # there may be room the next time
        *("EIO", "ESTALE", "EREMOTEIO", "EAGAIN", "EINTR", "EBUSY", "ENOLCK"),
        *("ETIMEDOUT", "ECONNRESET", "ECONNREFUSED", "ECONNABORTED", "ENOTCONN"),
        *("ENETDOWN", "ENETUNREACH", "ENETRESET", "EHOSTDOWN", "EHOSTUNREACH", "ESHUTDOWN"),
    )
    if hasattr(errno, name)  # macOS lacks one
)
"""Errors of the operating system that may pass by themselves, as of a network's file system: they
say nothing of what a file holds, and a supervisor tries again."""

_REASONS = sorted({os.strerror(code) for code in errno.errorcode}, key=len, reverse=True)


def sync(path: pathlib.Path) -> None:
    """Returns when the content of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: pathlib.Path) -> None:
    """`sync` of everything in a folder, and of the folder."""
    for place, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(pathlib.Path(place, name))
        sync(pathlib.Path(place))


def replace_file(path: pathlib.Path, data: bytes) -> None:
    """Writes a file as a whole: after a crash there is the old one or the new one, on disk."""
    beside = path.with_name(f"{path.name}.new")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk has no room for a part of it
        beside.unlink(missing_ok=True)
        raise
    move(beside, path)


class GrowingFile:
    """A file to which whole records are added, each written at once. What a full disk has no room
    for is kept until there is: it ends no training. One that was removed or moved is begun anew."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._file = path, path.open("ab", buffering=0)
        self._waiting = bytearray()

    def add(self, record: bytes) -> None:
        """Writes a record, after those that could not be written yet."""
        had_room = not self._waiting
        self._waiting += record
        try:
            if not self._path.exists():
                self._path.parent.mkdir(parents=True, exist_ok=True)
                before, self._file = self._file, self._path.open("ab", buffering=0)
                before.close()
                log.warning(f"warning: {self._path} was removed or moved, and is begun anew")
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            if had_room:
                log.warning(
                    f"warning: {self._path} cannot be written ({error.strerror}); what it should "
                    "hold is kept until it can"
                )

    def close(self) -> None:
        """Closes it, with a warning where there is still no room."""
        self.add(b"")
        if self._waiting:
            log.warning(f"warning: the last {len(self._waiting)} bytes of {self._path} are lost")
        self._file.close()


def move(path: pathlib.Path, target: pathlib.Path) -> None:
    """Renames a file or folder that is on disk, and returns when its new name is, too."""
    path.rename(target)
    sync(target.parent)


@contextlib.contextmanager
def held(path: pathlib.Path) -> Iterator[None]:
    """Keeps others from `claimed` of this file; waits while somebody has claimed it.

    Where the file is gone, or the file system has no locks, nothing is held.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            fcntl.flock(stack.enter_context(open(path, "rb")), fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def claimed(path: pathlib.Path) -> Iterator[bool]:
    """Whether nobody holds this file; nobody will before the end of the context."""
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
    """Excludes other processes that use the same lock file, and waits for one that has it.

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
    """The first thing below a folder that is no file, folder or link to one. To open a named pipe
    waits until somebody opens its other end, also when the process is asked to stop."""
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
    """Size, and for small ones the digest, of each file below a folder, for `changed_file`."""
    return {
        str(path.relative_to(folder)): _describe(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def changed_file(folder: pathlib.Path, files: Mapping[str, list]) -> str:
    """What is wrong with the first of these files that is not as `describe_files` found it; "" if
    all are. Reads only the small ones."""
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
    """A digest of what JSON can hold, whatever the order of its keys."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _describe(path: pathlib.Path) -> list:
    """Raises a FileNotFoundError where something else than a file is."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    size = about.st_size
    if size > SMALL_BYTES:
        return [size, ""]
    return [size, hashlib.sha256(path.read_bytes()).hexdigest()]


def reason(error: BaseException) -> str:
    """Why something failed, in a few words: the operating system's, where a message has them."""
    text = f"{type(error).__name__}: {error}"
    for known in _REASONS:
        if known in text:
            return known
    return text.splitlines()[0][:300]
