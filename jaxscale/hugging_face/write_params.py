"""Parameters from their devices to the files of a checkpoint, a tensor at a time."""

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxscale.hugging_face.checkpoint_rules import ParameterTensors
from jaxscale.hugging_face.safetensors_format import StoredTensor, lay_out
from jaxscale.hugging_face.tensor_blocks import write_part
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
    num_rows = array.sharding.shard_shape(array.shape)[0] if parameter.stacked else 1
    for row in range(num_rows):
        # A copy where it is no layer: an array keeps what it once brought to the host.
        part = _rows(array, np.int32(row), num_rows) if parameter.stacked else array.copy()
        for shard in part.addressable_shards:
            if shard.replica_id:
                continue
            places = zip(shard.index, part.shape)
            index = tuple(slice(*place.indices(size)[:2]) for place, size in places)
            values = np.asarray(shard.data)
            if not parameter.stacked:
                write_part(stored[parameter.tensors[0]], parameter.rule, index, values)
                continue
            for offset, layer in enumerate(values):
                name = parameter.tensors[(index[0].start + offset) * num_rows + row]
                write_part(stored[name], parameter.rule, index[1:], layer)


@functools.partial(jax.jit, static_argnums=2)
def _rows(stack: jax.Array, row: jax.Array, num_rows: int) -> jax.Array:
    """A row of every part of a stack: [parts, ...] of [parts * rows, ...]."""
    parts = stack.reshape(-1, num_rows, *stack.shape[1:])
    return jax.lax.dynamic_index_in_dim(parts, row, 1, keepdims=False)


def _by_layer(name: str) -> tuple:
    """Sorts names with their numbers as numbers."""
    return tuple(
        (part.isdecimal(), int(part) if part.isdecimal() else part) for part in name.split(".")
    )
