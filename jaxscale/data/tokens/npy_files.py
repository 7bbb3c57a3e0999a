""".npy files: arrays written before their length is known, and read in part."""

import functools
import hashlib
import os
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from jaxscale.data.text.file_io import ByteRange, read_ranges, reading
from jaxscale.storage.object_store import is_remote


@dataclass(frozen=True)
class ArrayFile:
    """The array in a .npy file, of which slices are read: memory-mapped, or fetched from a URL."""

    path: str
    dtype: str
    length: int
    header_bytes: int
    digest: str = ""  # of its data; "" if not known

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return self.length * np.dtype(self.dtype).itemsize

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, wanted: slice) -> np.ndarray:
        if not is_remote(self.path):
            return _map(self.path)[wanted]
        return read_slices([(self, wanted)])[0]

    def bytes_of(self, wanted: slice) -> ByteRange:
        """The bytes of a slice in the file."""
        start, stop, _ = wanted.indices(self.length)
        width = np.dtype(self.dtype).itemsize
        first = self.header_bytes + start * width
        return self.path, first, max(first, self.header_bytes + stop * width)


def read_slices(wanted: Sequence[tuple[np.ndarray | ArrayFile, slice]]) -> list[np.ndarray]:
    """Slices of arrays, with concurrent requests for arrays at URLs."""
    remote = {
        i: (array, part)
        for i, (array, part) in enumerate(wanted)
        if isinstance(array, ArrayFile) and is_remote(array.path)
    }
    data = read_ranges([array.bytes_of(part) for array, part in remote.values()])
    fetched = {
        i: np.frombuffer(one, array.dtype) for one, (i, (array, _)) in zip(data, remote.items())
    }
    return [fetched[i] if i in fetched else array[part] for i, (array, part) in enumerate(wanted)]


@functools.lru_cache(maxsize=256)  # each needs a file descriptor
def _map(path: str) -> np.ndarray:
    with reading(path):
        return np.load(path, mmap_mode="r")


class ArrayWriter:
    """Writes a .npy file whose length is known only at the end."""

    def __init__(self, path: pathlib.Path, dtype: type[np.generic]) -> None:
        self.path, self.length, self.digest = path, 0, ""
        self._dtype, self._hash = np.dtype(dtype), hashlib.blake2b(digest_size=8)

    def __enter__(self) -> "ArrayWriter":
        self._file = open(self.path, "wb")
        self._write_header()
        return self

    def append(self, values: Any) -> None:
        """Adds numbers at the end."""
        data = np.ascontiguousarray(values, self._dtype)
        self._file.write(data.data)
        self._hash.update(data.data)
        self.length += len(data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.seek(0)
        self._write_header()  # NumPy pads the header for any length
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.digest = self._hash.hexdigest()

    def _write_header(self) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self.length,),
        }
        np.lib.format.write_array_header_1_0(self._file, header)
