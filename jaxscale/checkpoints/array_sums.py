"""Checksums of arrays, independent of their layout, and a check for non-finite numbers."""

import concurrent.futures
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_CHUNK, _LINE = 2**16, 2**12
"""Words that are summed at a time on the host, which fit a core's cache, and words of a row:
columns are added first, so that few words are multiplied."""

_ODD = 2 * np.arange(_CHUNK, dtype=np.uint32) + 1


class ArraySum(NamedTuple):
    """The checksum of an array, and whether all its numbers are finite."""

    checksum: int
    finite: bool  # True for integers, and when not computed


def array_sums(arrays: Mapping[str, Any], *, finite: bool = True) -> dict[str, ArraySum]:
    """A checksum per array that depends on every bit and not on the layout: the sum modulo 2^32 of
    its words, each times an odd number that depends on its position.

    Integer sums are exact in any order, so shards may be added in any; multiplying by an odd number
    is invertible, so a change of a single word always shows.

    Args:
      finite: whether to check for non-finite numbers; in host memory half of the work.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        on_host = {
            name: _in_pool(pool, array, finite)
            for name, array in arrays.items()
            if _is_in_host_memory(array)
        }
        # One after the other: arrays offloaded to host memory are copied to the device.
        sums = {
            name: ArraySum(*(value.item() for value in jax.device_get(device_sum(array))))
            for name, array in arrays.items()
            if name not in on_host
        }
        return {n: sums[n] if n in sums else on_host[n].result() for n in arrays}


def _in_pool(
    pool: concurrent.futures.Executor, array: Any, finite: bool
) -> concurrent.futures.Future:
    try:
        return pool.submit(_host_sum, array, finite)
    except RuntimeError:  # there is no memory for a thread
        done = concurrent.futures.Future()
        done.set_result(_host_sum(array, finite))
        return done


@jax.jit
def device_sum(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The checksum of one array, and whether it is finite, computed on its devices."""
    # XLA computes only with arrays in device memory.
    array = jax.device_put(array, jax.memory.Space.Device)
    finite = jnp.all(jnp.isfinite(array))
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    bits = min(32, 8 * array.dtype.itemsize)
    words = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for dim in range(words.ndim):
        stride = jnp.uint32(math.prod(words.shape[dim + 1 :]) % 2**32)
        place += stride * jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    return jnp.sum(words * (2 * place + 1), dtype=jnp.uint32), finite


def _is_in_host_memory(array: Any) -> bool:
    """Whether NumPy can read the array in place: XLA's sums on a CPU take several times as long."""
    if not isinstance(array, jax.Array):
        return True
    return array.is_fully_addressable and all(d.platform == "cpu" for d in array.devices())


def _host_sum(array: Any, finite: bool) -> ArraySum:
    """`device_sum` by NumPy, shard by shard."""
    if not isinstance(array, jax.Array):
        index = (slice(None),) * np.ndim(array)
        return _block_sum(np.asarray(array), index, np.shape(array), finite)
    parts = [
        _block_sum(np.asarray(shard.data), shard.index, array.shape, finite)
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]
    return ArraySum(sum(p.checksum for p in parts) % 2**32, all(p.finite for p in parts))


def _block_sum(
    block: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...], ask_finite: bool
) -> ArraySum:
    """The contribution of one block of an array, at `index` of `shape`."""
    block = np.ascontiguousarray(block).reshape(block.shape or (1,))
    words, limit = _words(block)
    limit = limit if ask_finite else None
    if not words.size:
        return ArraySum(0, True)
    shape, index = (shape, index) if shape else ((1,), (slice(None),))
    starts = _row_starts(index, shape, block.shape[:-1], words.shape[-1] // block.shape[-1])
    rows = words.reshape(-1, words.shape[-1])
    if block.shape[1:] == shape[1:]:  # consecutive words
        flat, begin = rows.reshape(-1), starts[:1]
        cut = flat.size - flat.size % _LINE
        lines = np.arange(0, cut, _LINE, dtype=np.uint64).astype(np.uint32)
        pieces = [
            (flat[:cut].reshape(-1, _LINE), begin + lines),
            (flat[cut:].reshape(1, -1), begin + np.uint32(cut % 2**32)),
        ]
    else:
        pieces = [(rows, starts)]
    found = [_sum_of_rows(*piece, limit) for piece in pieces]
    total, largest = sum(each[0] for each in found), max(each[1] for each in found)
    if limit:
        return ArraySum(total % 2**32, largest < limit[1])
    asked = ask_finite and block.dtype.kind not in "iub"
    finite = not asked or bool(np.all(np.isfinite(block)))
    return ArraySum(total % 2**32, finite)


def _sum_of_rows(
    rows: np.ndarray, starts: np.ndarray, limit: tuple[int, int] | None
) -> tuple[int, int]:
    """The sum of rows of words that begin at these positions, and the largest word under the mask
    of `limit`."""
    total, largest = 0, 0
    for first in range(0, rows.shape[1], _CHUNK):
        width = min(rows.shape[1] - first, _CHUNK)
        step = max(1, _CHUNK // max(1, width))
        columns, plain = np.zeros(width, np.uint32), np.empty(len(rows), np.uint32)
        for row in range(0, len(rows), step):
            part = rows[row : row + step, first : first + width]
            columns += np.add.reduce(part, axis=0, dtype=np.uint32)
            np.add.reduce(part, axis=1, dtype=np.uint32, out=plain[row : row + step])
            if limit:
                largest = max(largest, int(np.max(part & part.dtype.type(limit[0]))))
        places = starts + np.uint32(first % 2**32)
        total += int(np.add.reduce(columns * _ODD[:width], dtype=np.uint32))
        total += int(np.add.reduce(2 * places * plain, dtype=np.uint32))
    return total, largest


def _words(block: np.ndarray) -> tuple[np.ndarray, tuple[int, int] | None]:
    """The words of a block of 1 or more dimensions; and, for types with one number per word, the
    mask of the bits of the absolute value and the least masked value that is not finite."""
    bits = min(32, 8 * block.dtype.itemsize)
    limits = {"float32": (2**31 - 1, 0x7F800000), "bfloat16": (2**15 - 1, 0x7F80)}
    return block.view(f"uint{bits}"), limits.get(block.dtype.name)


def _row_starts(
    index: tuple[slice, ...], shape: tuple[int, ...], rows: tuple[int, ...], width: int
) -> np.ndarray:
    """The position modulo 2^32 of the first word of each row of a block, flat.

    Args:
      rows: the dimensions of the block except the last.
      width: words of an element.
    """
    starts = np.full((1,) * len(rows), (index[-1].start or 0) * width, np.uint64)
    for dim, length in enumerate(rows):
        stride = math.prod(shape[dim + 1 :]) * width
        places = (np.arange(length, dtype=np.uint64) + (index[dim].start or 0)) * np.uint64(stride)
        starts = starts + places.reshape([-1 if d == dim else 1 for d in range(len(rows))])
    return starts.reshape(-1).astype(np.uint32)
