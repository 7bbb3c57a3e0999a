"""Parameters from a checkpoint straight onto their devices.

The host holds one device's part of one layer of one parameter at a time, so its memory stays within
the largest tensor and a block, whatever the layout. A stack [layers, ...] is allocated on the
devices and filled there layer by layer.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.hugging_face.checkpoint_rules import ParameterTensors
from jaxscale.hugging_face.safetensors_format import DTYPES, StoredTensor
from jaxscale.hugging_face.tensor_blocks import Index, read_part
from jaxscale.sharding.resolve import leaf_name


def read_params(
    found: Mapping[str, StoredTensor], parameters: Sequence[ParameterTensors], abstract: Any
) -> Any:
    """The parameters of a model, in canonical form.

    Args:
      found: the tensors of the checkpoint, which `check_tensors` accepted.
      abstract: the tree of `jax.ShapeDtypeStruct` in canonical form; one without a sharding goes to
        the default device.

    Returns:
      A tree like `abstract`, the padding rows of the vocabulary zero.
    """
    by_name = {one.name: one for one in parameters}
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _read_array(found, by_name[leaf_name(path)], leaf), abstract
    )


def _read_array(
    found: Mapping[str, StoredTensor], parameter: ParameterTensors, leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = {
        device: tuple(slice(*place.indices(size)[:2]) for place, size in zip(index, leaf.shape))
        for device, index in sharding.addressable_devices_indices_map(leaf.shape).items()
    }
    if not parameter.stacked:
        tensor = found[parameter.tensors[0]]
        shards = {index: (tensor, index) for index in places.values()}
        return _widened(_put(parameter, leaf, leaf.shape, sharding, places, shards), leaf.dtype)
    stack = jnp.zeros(leaf.shape, leaf.dtype, device=sharding)
    num_rows = sharding.shard_shape(leaf.shape)[0]
    shape = (leaf.shape[0] // num_rows, *leaf.shape[1:])
    for row in range(num_rows):  # of every device's part of the stack
        shards = {
            index: (found[parameter.tensors[index[0].start + row]], index[1:])
            for index in places.values()
        }
        rows = _put(parameter, leaf, shape, sharding, places, shards)
        stack = _set_rows(stack, rows, np.int32(row))
    return stack


def _put(
    parameter: ParameterTensors,
    leaf: jax.ShapeDtypeStruct,
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    places: Mapping[jax.Device, Index],
    shards: Mapping[Index, tuple[StoredTensor, Index]],
) -> jax.Array:
    """An array on devices, each shard read from a part of a tensor, in the narrower of the two
    types; the device widens it.

    Args:
      places: the index of each device.
      shards: the tensor, and the part of the parameter in it, for each index.
    """
    devices_of: dict[Index, list[jax.Device]] = {}
    for device, index in places.items():
        devices_of.setdefault(index, []).append(device)
    arrays, wanted = [], np.dtype(leaf.dtype)
    for index, devices in devices_of.items():
        tensor, part_index = shards[index]
        stored = DTYPES[tensor.dtype]
        narrower = wanted if wanted.itemsize < stored.itemsize else stored
        part = read_part(tensor, parameter.rule, part_index, narrower)
        part = part[None] if parameter.stacked else part
        # Waits: what is not copied yet stays on the host.
        arrays += [jax.block_until_ready(jax.device_put(part, device)) for device in devices]
        del part
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


@functools.partial(jax.jit, donate_argnums=0)
def _set_rows(stack: jax.Array, rows: jax.Array, row: jax.Array) -> jax.Array:
    """Sets a row of every part of a stack: [parts * rows, ...] from [parts, ...]."""
    parts = stack.reshape(rows.shape[0], -1, *stack.shape[1:])
    parts = jax.lax.dynamic_update_index_in_dim(parts, rows.astype(stack.dtype), row, 1)
    return parts.reshape(stack.shape)


def _widened(array: jax.Array, dtype: Any) -> jax.Array:
    return array if array.dtype == dtype else _converted(array, dtype)


@functools.partial(jax.jit, static_argnums=1)
def _converted(array: jax.Array, dtype: Any) -> jax.Array:
    return array.astype(dtype)
