"""Reads and writes parts of parameters in tensors of files, a block of rows at a time.

The host stores the requested part, and one block of `BLOCK_BYTES`.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.hugging_face.safetensors_format import DTYPES, StoredTensor
from jaxscale.model_families.family import TensorRule

BLOCK_BYTES = 1 << 20

Index = tuple[slice, ...]
"""A part of an array: begin and end in each dimension."""

Decode = Callable[[np.ndarray, int], np.ndarray]
"""The values of consecutive codes of a tensor, and of the index of the first one."""


class _Block(NamedTuple):
    offset: int  # of its first byte in the file
    shape: tuple[int, ...]  # rows of the tensor's view, whole
    take: tuple[int | slice, ...]  # index of the parameter's values in the block
    rows: slice  # of the parameter, dims in the tensor's order


def whole_index(index: Sequence[slice], shape: tuple[int, ...]) -> Index:
    """The index of a shard with None replaced by numbers."""
    return tuple(slice(*place.indices(size)[:2]) for place, size in zip(index, shape))


def taken_shape(rule: TensorRule) -> tuple[int, ...]:
    """The shape of a rule's parameter, for one layer and without padding rows."""
    part = np.broadcast_to(np.int8(0), rule.view)[rule.take].shape
    return tuple(part[dim] for dim in rule.order)


def stored_order(rule: TensorRule) -> tuple[int, ...]:
    """For each dimension that a rule takes of a tensor, the dimension of the parameter."""
    return tuple(int(dim) for dim in np.argsort(rule.order))


def read_part(
    tensor: StoredTensor,
    rule: TensorRule,
    index: Index,
    dtype: np.dtype,
    decode: tuple[np.dtype, Decode] | None = None,
) -> np.ndarray:
    """A part of a parameter, with dimensions in the tensor's order: a transposition on the host
    would take longer than the read.

    Args:
      index: in the parameter of one layer; padding rows beyond its end are zeros.
      decode: the type of a quantised tensor's codes, and their values; None if the file has values
        of the tensor's type.

    Raises:
      ValueError: the file ends too early.
    """
    inside, dims = inside_index(rule, index), stored_order(rule)
    part = np.zeros([index[dim].stop - index[dim].start for dim in dims], dtype)
    if any(place.stop <= place.start for place in inside):
        return part
    target = part[tuple(slice(0, inside[dim].stop - inside[dim].start) for dim in dims)]
    stored, values = decode or (DTYPES[tensor.dtype], None)
    with tensor.path.open("rb", buffering=0) as file:
        for block in _blocks(tensor, rule, inside, stored.itemsize):
            rows = _read(file, block, stored)
            if values:
                first = (block.offset - tensor.offset) // stored.itemsize
                rows = values(rows.reshape(-1), first).reshape(rows.shape)
            target[block.rows] = _converted(rows[block.take], dtype, rule.name)
    return part


def write_part(tensor: StoredTensor, rule: TensorRule, index: Index, part: np.ndarray) -> None:
    """Writes a part of a parameter, without padding rows.

    Raises:
      ValueError: a value is too large for the type of the file.
    """
    inside = inside_index(rule, index)
    if any(place.stop <= place.start for place in inside):
        return
    source = part[tuple(slice(0, i.stop - i.start) for i in inside)]
    source = source.transpose(stored_order(rule))
    stored = DTYPES[tensor.dtype]
    with tensor.path.open("r+b", buffering=0) as file:
        for block in _blocks(tensor, rule, inside, stored.itemsize):
            whole = np.broadcast_to(0, block.shape)[block.take].shape == block.shape
            rows = np.empty(block.shape, stored) if whole else _read(file, block, stored)
            rows[block.take] = _converted(source[block.rows], stored, rule.name)
            os.pwrite(file.fileno(), rows.reshape(-1).view(np.uint8), block.offset)


def same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are equal, bit for bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    size = math.prod(one.shape) * DTYPES[one.dtype].itemsize
    with one.path.open("rb") as left, other.path.open("rb") as right:
        left.seek(one.offset)
        right.seek(other.offset)
        return all(
            left.read(min(BLOCK_BYTES, size - done)) == right.read(min(BLOCK_BYTES, size - done))
            for done in range(0, size, BLOCK_BYTES)
        )


def inside_index(rule: TensorRule, index: Index) -> Index:
    """The index without padding rows."""
    shape = taken_shape(rule)
    return tuple(slice(place.start, min(place.stop, n)) for place, n in zip(index, shape))


def _blocks(
    tensor: StoredTensor, rule: TensorRule, index: Index, item_bytes: int
) -> Iterator[_Block]:
    """The blocks of a tensor that contain a part of a parameter."""
    taken: list[int | slice] = list(rule.take) + [slice(None)] * (len(rule.view) - len(rule.take))
    places = iter([index[rule.order.index(dim)] for dim in range(len(rule.order))])
    for dim, take in enumerate(taken):
        if isinstance(take, slice):
            rows, place = range(rule.view[dim])[take], next(places)
            taken[dim] = slice(rows[place.start], rows[place.stop - 1] + 1)
    view, begin = rule.view, 0
    while isinstance(first := taken[0], int):  # one row: split inside it
        view, taken, begin = view[1:], taken[1:], begin + first * math.prod(view[1:])
    row_items = math.prod(view[1:])
    num_rows = max(1, BLOCK_BYTES // (row_items * item_bytes))
    for row in range(first.start, first.stop, num_rows):
        count = min(num_rows, first.stop - row)
        offset = tensor.offset + (begin + row * row_items) * item_bytes
        done = row - first.start
        yield _Block(
            offset, (count, *view[1:]), (slice(None), *taken[1:]), slice(done, done + count)
        )


def _read(file, block: _Block, dtype: np.dtype) -> np.ndarray:
    size = math.prod(block.shape) * dtype.itemsize
    data = np.empty(size, np.uint8)
    if os.preadv(file.fileno(), [data], block.offset) != size:
        raise ValueError(f"{file.name} ends before its header says")
    return data.view(dtype).reshape(block.shape)


def _converted(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """The values in a type; refuses values out of its range."""
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        converted = values.astype(dtype)
    if np.any(np.isinf(converted) & np.isfinite(values)):
        raise ValueError(f"tensor {name} has values that are too large for {dtype}")
    return converted
