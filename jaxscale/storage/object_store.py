"""Whole objects at an address such as s3://bucket/run, through fsspec.

Nothing else in the package writes to an object store. Objects are put as a whole: they are there or
not, and none is appended to or renamed.
"""

import contextlib
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from jaxscale.storage.durable import reason

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Schemes whose package is an extra of this one."""

OPTIONS: dict[str, dict[str, Any]] = {"file": {"auto_mkdir": True}, "local": {"auto_mkdir": True}}
"""What a file system is opened with; credentials are found as its own package finds them."""


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
        with self._errors(name):
            try:
                return self.fs.cat_file(self._path(name))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        """Puts an object, or replaces it."""
        with self._errors(name):
            self.fs.pipe_file(self._path(name), data)

    def upload(self, files: Mapping[str, pathlib.Path]) -> None:
        """Puts files under names, several at a time where the file system can; returns when all
        are there."""
        with self._errors():
            self.fs.put([str(path) for path in files.values()], [*map(self._path, files)])

    def download(self, files: Mapping[str, pathlib.Path]) -> None:
        """Gets objects by name into files; makes their folders."""
        for folder in {path.parent for path in files.values()}:
            folder.mkdir(parents=True, exist_ok=True)
        with self._errors():
            self.fs.get([*map(self._path, files)], [str(path) for path in files.values()])

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """The bytes of every object whose name begins with `prefix` and a slash, by name."""
        with self._errors(prefix):
            self.fs.invalidate_cache()  # of listings; others write there, too
            try:
                found = self.fs.find(self._path(prefix), detail=True)
            except FileNotFoundError:
                if not prefix:
                    raise
                found = {}
            size = {path: about["size"] for path, about in found.items()}
        names = {path: path[len(self.root) :].lstrip("/") for path in sorted(size)}
        # Consoles of stores put an empty object "NAME/" for a folder: it is no file of a run.
        return {n: size[path] for path, n in names.items() if n and not n.endswith("/")}

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects."""
        if paths := [self._path(name) for name in names]:
            with self._errors():
                self.fs.rm(paths)

    def copy(self, name: str, target: str) -> None:
        """Copies an object, inside the store."""
        with self._errors(name):
            self.fs.cp_file(self._path(name), self._path(target))

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    @contextlib.contextmanager
    def _errors(self, name: str = "") -> Iterator[None]:
        """Libraries of stores raise errors of their own kinds."""
        try:
            yield
        except Exception as error:
            place = f"{self.address}/{name}" if name else self.address
            raise StoreError(f"{place}: {reason(error)}") from error


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
