"""Writes parameters from their devices to safetensors files.

The host stores `WINDOW_BYTES` of each device at a time, whatever the size and type of a tensor.
"""

import functools
import itertools
import math
import pathlib
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.hugging_face.checkpoint_rules import ParameterTensors
from jaxscale.hugging_face.safetensors_format import StoredTensor, lay_out
from jaxscale.hugging_face.tensor_blocks import whole_index, write_part
from jaxscale.sharding.resolve import leaf_name

FILE_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Types of arrays -> types of tensors."""

WINDOW_BYTES = 1 << 20


def write_params(
    directory: pathlib.Path,
    parameters: Sequence[ParameterTensors],
    params: Any,
    dtype: str,
    max_file_bytes: int,
    metadata: Mapping[str, str] = types.MappingProxyType({}),
) -> dict[str, StoredTensor]:
    """Writes a checkpoint, without the padding rows of the vocabulary and the copies of tied
    parameters, except copies that a rule writes.

    Args:
      params: in canonical form, on any layout of the devices of this process.
      dtype: of every tensor that a rule does not make wider, a key of `FILE_TYPES`.
      max_file_bytes: of each file.
      metadata: as in `lay_out`.

    Returns:
      The location of each tensor.

    Raises:
      ValueError: a value is too large for `dtype`.
    """
    parameters = [
        *parameters,
        *(replace(one, tensors=(copy,)) for one in parameters for copy in one.written),
    ]
    wide = jnp.promote_types(dtype, jnp.float32).name
    found = {
        name: (FILE_TYPES[wide if one.rule.wide else dtype], one.rule.shape)
        for one in parameters
        for name in one.tensors
    }
    tensors = {name: found[name] for name in sorted(found, key=_by_layer)}
    stored = lay_out(directory, tensors, max_file_bytes, metadata)
    by_name = {
        leaf_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    for one in parameters:
        _write_parameter(stored, one, by_name[one.name])
    return stored


def _write_parameter(
    stored: Mapping[str, StoredTensor], parameter: ParameterTensors, array: jax.Array
) -> None:
    """Writes a parameter, a window of every device's shard at a time."""
    dims = len(parameter.parts)
    counts = array.sharding.shard_shape(array.shape)
    sizes = _window_sizes(parameter, counts, array.dtype.itemsize)
    for number in np.ndindex(*(math.ceil(count / size) for count, size in zip(counts, sizes))):
        # The last window of a dim may begin before the end of the one before it.
        starts = [min(one * size, count - size) for one, size, count in zip(number, sizes, counts)]
        numbers = tuple(np.int32(start) for start in starts)
        windows = _windows(array, numbers, counts, sizes, array.sharding)
        for shard in windows.addressable_shards:
            if shard.replica_id:
                continue
            begins = [
                place.start // size * count + start
                for place, size, count, start in zip(
                    whole_index(shard.index, windows.shape), sizes, counts, starts
                )
            ]
            index = tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes))[dims:]
            values = np.asarray(shard.data).reshape(sizes[dims:])
            write_part(stored[parameter.tensor(*begins[:dims])], parameter.rule, index, values)


def _window_sizes(
    parameter: ParameterTensors, counts: tuple[int, ...], item_bytes: int
) -> tuple[int, ...]:
    """The size of a window in each dim of a shard: one layer or expert, and as many rows of its
    tensor as fit in `WINDOW_BYTES`."""
    dims = len(parameter.parts)
    sizes = [1] * dims + list(counts[dims:])
    if parameter.rule.order:
        rows = dims + parameter.rule.order.index(0)
        row_bytes = math.prod(sizes) // sizes[rows] * item_bytes
        sizes[rows] = min(sizes[rows], max(1, WINDOW_BYTES // row_bytes))
    return tuple(sizes)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _windows(
    array: jax.Array,
    starts: tuple[jax.Array, ...],
    counts: tuple[int, ...],
    sizes: tuple[int, ...],
    sharding: jax.sharding.Sharding,
) -> jax.Array:
    """The same window of every shard: [shards * size, ...] of [shards * count, ...] in each dim."""
    split = [(whole // count, count) for whole, count in zip(array.shape, counts)]
    parts = array.reshape(tuple(itertools.chain(*split)))
    for dim, (start, size) in enumerate(zip(starts, sizes)):
        parts = jax.lax.dynamic_slice_in_dim(parts, start, size, 2 * dim + 1)
    windows = parts.reshape(tuple(shards * size for (shards, _), size in zip(split, sizes)))
    return jax.lax.with_sharding_constraint(windows, sharding)


def _by_layer(name: str) -> tuple:
    """A sort key of names in which numbers sort as numbers."""
    return tuple(
        (part.isdecimal(), int(part) if part.isdecimal() else part) for part in name.split(".")
    )
