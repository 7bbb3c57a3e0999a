"""The safetensors format: the location of each tensor of a checkpoint, and the layout of new files.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape,
and the first and last byte counted from the header's end), and the tensors. Files are read and
written in blocks by `tensor_blocks.py`. They are not memory-mapped, since a mapped file counts as
memory of the process; the library `safetensors` is not used for writing, since it needs all tensors
of a file in memory.
"""

import json
import math
import os
import pathlib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxscale.storage.untrusted import MAX_BYTES, is_file_name, load_json, parse_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Types of parameters; tensors that are not read as parameters may have other types."""

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_DIMS = 64  # as in NumPy
METADATA = "__metadata__"
"""The only entry of a header that is not a tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    path: pathlib.Path
    offset: int  # of its first byte in the file
    dtype: str  # as the file has it, such as "BF16"
    shape: tuple[int, ...]


def open_tensors(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """The location of every tensor of a checkpoint, by name; reads headers only.

    Raises:
      FileNotFoundError: the folder has no safetensors checkpoint.
      ValueError: pickled weights, a damaged file, or an index that does not fit its files.
    """
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    if not (directory / INDEX).is_file():
        pickles = sorted(path.name for kind in PICKLES for path in directory.glob(kind))
        if pickles:
            raise ValueError(
                f"{directory} has its weights as pickles ({', '.join(pickles[:3])}), which can "
                "run code when they are read; convert them to safetensors first, such as with "
                "save_pretrained of transformers"
            )
        raise FileNotFoundError(f"{directory} has no checkpoint: no {SINGLE} and no {INDEX}")
    files = _weight_map(directory / INDEX)
    headers = {name: read_header(directory / name) for name in sorted(set(files.values()))}
    found = {name: file for file, tensors in headers.items() for name in tensors}
    for name in sorted(files.keys() | found.keys()):
        if files.get(name) != found.get(name):
            raise ValueError(
                f"tensor {name} is in {found.get(name, 'no file')}, and in "
                f"{files.get(name, 'no file')} by {directory / INDEX}"
            )
    return {name: headers[file][name] for name, file in files.items()}


def _weight_map(path: pathlib.Path) -> dict[str, str]:
    index = load_json(path)
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict):
        raise ValueError(f"{path} has no weight_map of tensors and files")
    for name, file in files.items():
        if not is_file_name(file):
            raise ValueError(f"{path} has {name!r} in {file!r}, which is not a file of its folder")
    return files


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """The location of each tensor of a file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not a safetensors file, or is cut short.
    """
    header, length = _parse_header(path)
    begin, size = 8 + length, path.stat().st_size
    spans = {name: _span(path, name, entry) for name, entry in header.items() if name != METADATA}
    end = begin + max((last for _, last in spans.values()), default=0)
    if end != size:
        raise ValueError(
            f"{path} has {size:,} bytes and its header asks for {end:,}: an incomplete copy?"
        )
    end = 0
    for name, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if first != end:  # the format requires tensors without gaps or overlaps
            raise ValueError(f"{path}: tensor {name!r} begins at byte {first}, not at {end}")
        end = last
    return {
        name: StoredTensor(path, begin + first, header[name]["dtype"], tuple(header[name]["shape"]))
        for name, (first, _) in spans.items()
    }


def _span(path: pathlib.Path, name: str, entry: Any) -> tuple[int, int]:
    """The first and last byte of a tensor, whose entry in the header is checked."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [first, last]} if len(
            shape
        ) <= MAX_DIMS and all(
            type(one) is int and 0 <= one < 2**63 for one in (*shape, first, last)
        ):
            if last < first or (dtype in DTYPES and last - first != _num_bytes(dtype, shape)):
                raise ValueError(
                    f"{path}: tensor {name!r} does not have the bytes of its shape {tuple(shape)}"
                )
            return first, last
    raise ValueError(f"{path}: tensor {name!r} needs dtype, shape and data_offsets")


def read_metadata(path: pathlib.Path) -> dict[str, str]:
    """The metadata in a file's header; raises as `read_header`."""
    return _parse_header(path)[0].get(METADATA, {})


def _parse_header(path: pathlib.Path) -> tuple[dict[str, Any], int]:
    """The header, and its bytes."""
    if path.exists() and not path.is_file():  # reading from a pipe could block forever
        raise ValueError(f"{path} is not a regular file")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_BYTES, size - 8):
            raise ValueError(f"{path} is not a safetensors file, or is cut short")
        text = file.read(length)
    try:
        header = parse_json(text.decode())
    except ValueError as error:
        raise ValueError(f"{path} is not a safetensors file: {error} in its header") from error
    metadata = header.get(METADATA, {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(m, str) for m in metadata.values()):
        raise ValueError(f"{path} is not a safetensors file: its header is damaged")
    return header, length


def lay_out(
    directory: pathlib.Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    max_file_bytes: int,
    metadata: Mapping[str, str] = types.MappingProxyType({}),
) -> dict[str, StoredTensor]:
    """Creates the files of a checkpoint with headers and an index; the values are written later.

    Args:
      tensors: dtype and shape by name, in the order of the files.
      max_file_bytes: of each file, unless a single tensor is larger.
      metadata: of the header of each file.
    """
    groups: list[list[str]] = [[]]
    free = max_file_bytes
    for name, (dtype, shape) in tensors.items():
        size = _num_bytes(dtype, shape)
        if size > free and groups[-1]:
            groups.append([])
            free = max_file_bytes
        groups[-1].append(name)
        free -= size
    names = _file_names(len(groups))
    found = {}
    for file, group in zip(names, groups):
        found |= _lay_out_file(directory / file, {name: tensors[name] for name in group}, metadata)
    if len(groups) > 1:
        total = sum(_num_bytes(*tensor) for tensor in tensors.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: tensor.path.name for name, tensor in found.items()},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return found


def _lay_out_file(
    path: pathlib.Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str],
) -> dict[str, StoredTensor]:
    # transformers requires the key "format".
    header: dict[str, Any] = {METADATA: {"format": "pt", **metadata}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + _num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        os.truncate(file.fileno(), 8 + len(text) + offset)
    return read_header(path)


def _file_names(count: int) -> Sequence[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize
