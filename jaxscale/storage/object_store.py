"""Whole objects at an address such as s3://bucket/run, through fsspec.

Nothing else in the package writes to an object store. Objects are put as a whole: they are there or
not, and none is appended to or renamed.
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
"""Schemes whose package is an extra of this one."""

OPTIONS: dict[str, dict[str, Any]] = {"file": {"auto_mkdir": True}, "local": {"auto_mkdir": True}}
"""What a file system is opened with; credentials are found as its own package finds them."""


ANSWER_SECONDS = 60.0
"""How long a store has to answer a request."""

LEAST_BYTES_PER_SECOND = 1e5
"""For what is sent or fetched it has more time: what is slower counts as no answer."""


class StoreError(OSError):
    """An object store that did not do what it was asked; the message has its own reason."""

    exit_status = 1  # it may do so the next time: a supervisor tries again


def is_remote(path: str) -> bool:
    """Whether a path is an address, which fsspec opens."""
    return "://" in path


def filesystem(path: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it.

    Raises:
      ValueError: fsspec does not know the scheme, or the package that it needs is missing.
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
    """The objects below an address, by their names, such as "checkpoints/6/arrays/d/0".

    Every method raises a StoreError, with the store's own reason, when it fails.
    """

    address: str  # without a last slash
    fs: Any
    root: str  # the path of the address in `fs`

    @property
    def folder(self) -> pathlib.Path | None:
        """Where it is a folder of this machine's file systems, as at file:///tmp/run."""
        return pathlib.Path(self.root) if isinstance(self.fs, LocalFileSystem) else None

    def read(self, name: str) -> bytes | None:
        """The content of an object; None if there is none."""

        def read() -> bytes | None:
            try:
                return self.fs.cat_file(self._path(name))
            except FileNotFoundError:
                return None

        return self._answer(read, name)

    def write(self, name: str, data: bytes) -> None:
        """Puts an object, or replaces it."""
        self._answer(lambda: self.fs.pipe_file(self._path(name), data), name, len(data))

    def upload(self, files: Mapping[str, pathlib.Path]) -> None:
        """Puts files under names, several at a time where the file system can; returns when all
        are there."""
        paths, names = [str(path) for path in files.values()], [*map(self._path, files)]
        num_bytes = sum(path.stat().st_size for path in files.values())
        self._answer(lambda: self.fs.put(paths, names), num_bytes=num_bytes)

    def download(self, files: Mapping[str, pathlib.Path], num_bytes: int) -> None:
        """Gets objects by name into files; makes their folders.

        Args:
          num_bytes: of all, or more.
        """
        for folder in {path.parent for path in files.values()}:
            folder.mkdir(parents=True, exist_ok=True)
        paths, names = [str(path) for path in files.values()], [*map(self._path, files)]
        self._answer(lambda: self.fs.get(names, paths), num_bytes=num_bytes)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """The bytes of every object whose name begins with `prefix` and a slash, by name."""

        def find() -> dict[str, Any]:
            self.fs.invalidate_cache()  # of listings; others write there, too
            try:
                return self.fs.find(self._path(prefix), detail=True)
            except FileNotFoundError:
                if not prefix:
                    raise
                return {}

        size = {path: about["size"] for path, about in self._answer(find, prefix).items()}
        names = {path: path[len(self.root) :].lstrip("/") for path in sorted(size)}
        # Consoles of stores put an empty object "NAME/" for a folder: it is no file of a run.
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
        place = f"{self.address}/{name}" if name else self.address
        return answer(place, request, num_bytes)


def answer[T](place: str, request: Callable[[], T], num_bytes: int = 0) -> T:
    """What a request gives, in a thread that is left alone when it takes too long: libraries of
    stores try for minutes, as s3fs does, or for ever; and raise errors of their own kinds.

    Args:
      place: for messages.
      num_bytes: that are sent or fetched.

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
        raise StoreError(f"{place}: {why}") from error


def open_store(address: str) -> ObjectStore:
    """The store at an address; nothing is asked of it yet.

    Raises:
      ValueError: as `filesystem`; or the address names no folder.
    """
    fs, root = filesystem(address)
    if not root.strip("/"):
        raise ValueError(f"{address} names no folder; an address is SCHEME://BUCKET/FOLDER")
    if isinstance(fs, LocalFileSystem):  # file://run is another folder wherever a command starts
        address = f"{address.partition('://')[0]}://{root}"
    return ObjectStore(address.rstrip("/"), fs, root.rstrip("/"))
