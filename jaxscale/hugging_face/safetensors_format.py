"""The safetensors format: where each tensor of a checkpoint is, and files laid out for writing.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape,
and the first and last byte counted from the header's end), and the tensors. Files are read and
written in blocks by `tensor_blocks.py`, not mapped into memory: a mapped file counts as memory of
the process, and the library of the format writes files whose tensors are all in memory.
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

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Types of parameters; files may hold others, of tensors that no parameter is read from."""

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_HEADER_BYTES = 100_000_000  # as in the library


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    path: pathlib.Path
    offset: int  # of its first byte in the file
    dtype: str  # as the file has it, such as "BF16"
    shape: tuple[int, ...]


def open_tensors(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """Where every tensor of a checkpoint is, by name; reads headers only.

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
                f"{directory} holds its weights as pickles ({', '.join(pickles[:3])}), which can "
                "run code when they are read; convert them to safetensors first, such as with "
                "save_pretrained of transformers"
            )
        raise FileNotFoundError(f"{directory} holds no checkpoint: no {SINGLE} and no {INDEX}")
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
    try:
        files = json.loads(path.read_text())["weight_map"]
        safe = all(pathlib.PurePath(file).name == file for file in files.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has no weight_map of tensors and files") from error
    if not safe:
        raise ValueError(f"{path} names files outside its folder")
    return files


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Where each tensor of a file is.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not a safetensors file, or is cut short.
    """
    header, length = _parse_header(path)
    try:
        header.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(
                path, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"])
            )
            for name, entry in header.items()
        }
        spans = {name: entry["data_offsets"] for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _damaged(path) from error
    size = path.stat().st_size
    end = 8 + length + max((last for _, last in spans.values()), default=0)
    if end != size:
        raise ValueError(
            f"{path} has {size:,} bytes and its header asks for {end:,}: an incomplete copy?"
        )
    for name, (first, last) in spans.items():
        dtype, shape = tensors[name].dtype, tensors[name].shape
        if first < 0 or (dtype in DTYPES and last - first != _num_bytes(dtype, shape)):
            raise ValueError(f"{path}: tensor {name} does not have the bytes of its shape {shape}")
    return tensors


def read_metadata(path: pathlib.Path) -> dict[str, str]:
    """What a file says of itself, beside its tensors; raises as `read_header`."""
    header, _ = _parse_header(path)
    found = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise _damaged(path)
    return found


def _parse_header(path: pathlib.Path) -> tuple[Any, int]:
    """The header, and its bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path} is not a safetensors file, or is cut short")
        text = file.read(length)
    try:
        return json.loads(text), length
    except ValueError as error:
        raise _damaged(path) from error


def _damaged(path: pathlib.Path) -> ValueError:
    return ValueError(f"{path} is not a safetensors file: its header is damaged")


def lay_out(
    directory: pathlib.Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    max_file_bytes: int,
    metadata: Mapping[str, str] = types.MappingProxyType({}),
) -> dict[str, StoredTensor]:
    """Makes the files of a checkpoint with their headers and an index; the values are still to be
    written.

    Args:
      tensors: dtype and shape by name, in the order in which they are written.
      max_file_bytes: of each file, if no tensor alone is larger.
      metadata: what each file says of itself.
    """
    groups: list[list[str]] = [[]]
    room = max_file_bytes
    for name, (dtype, shape) in tensors.items():
        size = _num_bytes(dtype, shape)
        if size > room and groups[-1]:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(name)
        room -= size
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
    # transformers asks for the format.
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
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


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize
