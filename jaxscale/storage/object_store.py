"""Object stores (s3://, gs://, fsspec URLs): reads and writes of whole objects.

Nothing else in the package writes to an object store. An object is written whole or not at all;
none is appended to or renamed.
"""

import concurrent.futures
import pathlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from jaxscale.formatting import duration
from jaxscale.storage.durable import reason

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""URL scheme -> the extra of this package that installs its file system."""

OPTIONS: dict[str, dict[str, Any]] = {"file": {"auto_mkdir": True}, "local": {"auto_mkdir": True}}
"""Options of a file system by scheme; credentials are found by the file system's package."""


ANSWER_SECONDS = 60.0
"""Deadline of a request."""

LEAST_BYTES_PER_SECOND = 1e5
"""The deadline of an upload or download grows with its bytes, at this bandwidth."""


class StoreError(OSError):
    """A failed request to an object store; the message has the store's reason."""

    exit_status = 1  # it may be transient, so a supervisor tries again


def is_remote(path: str) -> bool:
    """Whether a path is a URL that fsspec opens."""
    return "://" in path


def filesystem(path: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it.

    Raises:
      ValueError: fsspec does not know the scheme, or the file system's package is missing.
    """
    scheme = path.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(path, **OPTIONS.get(scheme, {}))
    except ImportError as error:
        advice = f"; pip install 'jaxscale[{EXTRAS[scheme]}]'" if scheme in EXTRAS else ""
        raise ValueError(f"{path} cannot be opened: {error}{advice}") from error
    except ValueError as error:
        raise ValueError(f"{path} cannot be opened: {error}") from error


@dataclass(frozen=True)
class ObjectStore:
    """The objects below a URL, by name, such as "checkpoints/6/arrays/d/0".

    Every method raises a StoreError with the store's reason when it fails.
    """

    url: str  # without a trailing slash
    fs: Any
    root: str  # the path of the URL in `fs`

    @property
    def folder(self) -> pathlib.Path | None:
        """The local folder of a file:// URL, such as file:///tmp/run; else None."""
        return pathlib.Path(self.root) if isinstance(self.fs, LocalFileSystem) else None

    def read(self, name: str) -> bytes | None:
        """The content of an object; None if it does not exist."""

        def read() -> bytes | None:
            try:
                return self.fs.cat_file(self._path(name))
            except FileNotFoundError:
                return None

        return self._answer(read, name)

    def write(self, name: str, data: bytes) -> None:
        """Writes or replaces an object."""
        self._answer(lambda: self.fs.pipe_file(self._path(name), data), name, len(data))

    def upload(self, files: Mapping[str, pathlib.Path]) -> None:
        """Uploads files by object name, concurrently if the file system can; returns when all are
        stored."""
        paths, names = [str(path) for path in files.values()], [*map(self._path, files)]
        num_bytes = sum(path.stat().st_size for path in files.values())
        self._answer(lambda: self.fs.put(paths, names), num_bytes=num_bytes)

    def download(self, files: Mapping[str, pathlib.Path], num_bytes: int) -> None:
        """Downloads objects by name into files; creates their folders.

        Args:
          num_bytes: total size, or an upper bound.
        """
        for folder in {path.parent for path in files.values()}:
            folder.mkdir(parents=True, exist_ok=True)
        paths, names = [str(path) for path in files.values()], [*map(self._path, files)]
        self._answer(lambda: self.fs.get(names, paths), num_bytes=num_bytes)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Object name -> bytes, of every object below `prefix`."""

        def find() -> dict[str, Any]:
            self.fs.invalidate_cache()  # of listings: other processes write, too
            try:
                return self.fs.find(self._path(prefix), detail=True)
            except FileNotFoundError:
                if not prefix:
                    raise
                return {}

        size = {path: about["size"] for path, about in self._answer(find, prefix).items()}
        names = {path: path[len(self.root) :].lstrip("/") for path in sorted(size)}
        # Consoles of stores create an empty object "NAME/" for a folder: it is no file of a run.
        return {n: size[path] for path, n in names.items() if n and not n.endswith("/")}

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects."""
        if paths := [self._path(name) for name in names]:
            self._answer(lambda: self.fs.rm(paths))

    def copy(self, name: str, target: str) -> None:
        """Copies an object, inside the store."""
        self._answer(lambda: self.fs.cp_file(self._path(name), self._path(target)), name)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _answer[T](self, request: Callable[[], T], name: str = "", num_bytes: int = 0) -> T:
        url = f"{self.url}/{name}" if name else self.url
        return answer(url, request, num_bytes)


def answer[T](url: str, request: Callable[[], T], num_bytes: int = 0) -> T:
    """The result of a request, run in a thread that is abandoned past its deadline: client
    libraries retry for minutes (s3fs) or without end, and raise many types of errors.

    Args:
      url: the URL, for messages.
      num_bytes: sent or received.

    Raises:
      StoreError: it failed, or took too long.
    """
    future = concurrent.futures.Future[T]()

    def ask() -> None:
        try:
            future.set_result(request())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=ask, name="request to a store", daemon=True).start()
    seconds = ANSWER_SECONDS + num_bytes / LEAST_BYTES_PER_SECOND
    try:
        return future.result(seconds)
    except Exception as error:
        why = reason(error) if future.done() else f"no answer in {duration(seconds)}"
        raise StoreError(f"{url}: {why}") from error


def open_store(url: str) -> ObjectStore:
    """The store at a URL; sends no request.

    Raises:
      ValueError: as `filesystem`; or the URL has no folder.
    """
    fs, root = filesystem(url)
    if not root.strip("/"):
        raise ValueError(f"{url} has no folder; use SCHEME://BUCKET/FOLDER")
    if isinstance(fs, LocalFileSystem):  # file://run is another folder wherever a command starts
        url = f"{url.partition('://')[0]}://{root}"
    return ObjectStore(url.rstrip("/"), fs, root.rstrip("/"))
