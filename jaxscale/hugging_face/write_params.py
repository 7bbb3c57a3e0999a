"""Parameters from their devices to the files of a checkpoint, a tensor at a time."""

import functools
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxscale.hugging_face.checkpoint_rules import ParameterTensors
from jaxscale.hugging_face.safetensors_format import StoredTensor, lay_out
from jaxscale.hugging_face.tensor_blocks import whole_index, write_part
from jaxscale.sharding.resolve import leaf_name

FILE_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Types of arrays -> types of tensors."""


def write_params(
    directory: pathlib.Path,
    parameters: Sequence[ParameterTensors],
    params: Any,
    dtype: str,
    max_file_bytes: int,
) -> dict[str, StoredTensor]:
    """Writes a checkpoint; the padding rows of the vocabulary and the copies of tied parameters are
    left out.

    Args:
      params: in canonical form, on any layout of the devices of this process.
      dtype: of every tensor, a key of `FILE_TYPES`.
      max_file_bytes: of each file.

    Returns:
      Where each tensor is.

    Raises:
      ValueError: a value is too large for `dtype`.
    """
    shapes = {name: one.rule.shape for one in parameters for name in one.tensors}
    tensors = {name: (FILE_TYPES[dtype], shapes[name]) for name in sorted(shapes, key=_by_layer)}
    stored = lay_out(directory, tensors, max_file_bytes)
    by_name = {
        leaf_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    for one in parameters:
        _write_parameter(stored, one, by_name[one.name])
    return stored


def _write_parameter(
    stored: Mapping[str, StoredTensor], parameter: ParameterTensors, array: jax.Array
) -> None:
    """Writes a parameter, a row of every device's part of a stack at a time."""
    dims = len(parameter.parts)
    counts = array.sharding.shard_shape(array.shape)[:dims]
    for row in np.ndindex(counts):
        # A copy where it is no layer: an array keeps what it once brought to the host.
        numbers = tuple(np.int32(number) for number in row)
        part = _rows(array, numbers, counts) if dims else array.copy()
        for shard in part.addressable_shards:
            if shard.replica_id:
                continue
            index = whole_index(shard.index, part.shape)
            values = np.asarray(shard.data)
            for offset in np.ndindex(values.shape[:dims]):
                place = [
                    (part.start + one) * count + number
                    for part, one, count, number in zip(index, offset, counts, row)
                ]
                tensor = stored[parameter.tensor(*place)]
                write_part(tensor, parameter.rule, index[dims:], values[offset])


@functools.partial(jax.jit, static_argnums=2)
def _rows(stack: jax.Array, row: tuple[jax.Array, ...], counts: tuple[int, ...]) -> jax.Array:
    """A row of every part of a stack: [parts, ...] of [parts * rows, ...], where layers, or layers
    and experts, are in parts."""
    dims = len(counts)
    split = [(size // count, count) for size, count in zip(stack.shape, counts)]
    parts = stack.reshape(*itertools.chain(*split), *stack.shape[dims:])
    for dim, number in enumerate(row):
        parts = jax.lax.dynamic_index_in_dim(parts, number, dim + 1, keepdims=False)
    return parts


def _by_layer(name: str) -> tuple:
    """Sorts names with their numbers as numbers."""
    return tuple(
        (part.isdecimal(), int(part) if part.isdecimal() else part) for part in name.split(".")
    )
