"""Parameters from a checkpoint straight onto their devices.

The host holds one device's part of one layer of one parameter at a time, or of one expert, so its
memory stays within the largest tensor and a block, whatever the layout. A stack [layers, ...] is
allocated on the devices and filled there tensor by tensor.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.hugging_face.checkpoint_rules import ParameterTensors
from jaxscale.hugging_face.safetensors_format import DTYPES, StoredTensor
from jaxscale.hugging_face.tensor_blocks import Index, read_part, whole_index
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
    indices: Any = sharding.addressable_devices_indices_map(leaf.shape)
    places = {device: whole_index(index, leaf.shape) for device, index in indices.items()}
    dims = len(parameter.parts)
    if not dims:
        tensor = found[parameter.tensor()]
        shards = {index: (tensor, index) for index in places.values()}
        return _widened(_put(parameter, leaf, leaf.shape, sharding, places, shards), leaf.dtype)
    stack = jnp.zeros(leaf.shape, leaf.dtype, device=sharding)
    counts = sharding.shard_shape(leaf.shape)[:dims]
    shape = (*(n // count for n, count in zip(leaf.shape, counts)), *leaf.shape[dims:])
    for row in np.ndindex(counts):  # of every device's part of the stack
        shards = {
            index: (found[parameter.tensor(*_place(index, row))], index[dims:])
            for index in places.values()
        }
        rows = _put(parameter, leaf, shape, sharding, places, shards)
        stack = _set_rows(stack, rows, tuple(np.int32(number) for number in row))
    return stack


def _place(index: Index, row: tuple[int, ...]) -> tuple[int, ...]:
    """The layer, and the expert, of a row of a device's part."""
    return tuple(part.start + number for part, number in zip(index, row))


def _put(
    parameter: ParameterTensors,
    leaf: jax.ShapeDtypeStruct,
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    places: Mapping[Any, Index],
    shards: Mapping[Index, tuple[StoredTensor, Index]],
) -> jax.Array:
    """An array on devices, each shard read from a part of a tensor, in the narrower of the two
    types; the device widens it.

    Args:
      places: the index of each device.
      shards: the tensor, and the part of the parameter in it, for each index.
    """
    devices_of: dict[Index, list[Any]] = {}
    for device, index in places.items():
        devices_of.setdefault(index, []).append(device)
    arrays, wanted = [], np.dtype(leaf.dtype)
    for index, devices in devices_of.items():
        tensor, part_index = shards[index]
        stored = DTYPES[tensor.dtype]
        narrower = wanted if wanted.itemsize < stored.itemsize else stored
        part = read_part(tensor, parameter.rule, part_index, narrower)
        part = np.expand_dims(part, tuple(range(len(parameter.parts))))
        # Waits: what is not copied yet stays on the host.
        arrays += [jax.block_until_ready(jax.device_put(part, device)) for device in devices]
        del part
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


@functools.partial(jax.jit, donate_argnums=0)
def _set_rows(stack: jax.Array, rows: jax.Array, row: tuple[jax.Array, ...]) -> jax.Array:
    """Sets a row of every part of a stack: [parts * rows, ...] from [parts, ...], where layers, or
    layers and experts, are in parts."""
    dims = len(row)
    split = [(parts, whole // parts) for parts, whole in zip(rows.shape[:dims], stack.shape)]
    parts = stack.reshape(*itertools.chain(*split), *stack.shape[dims:])
    rows = rows.reshape(*itertools.chain(*((n, 1) for n, _ in split)), *rows.shape[dims:])
    zero = np.int32(0)
    starts = [*itertools.chain(*((zero, number) for number in row)), *[zero] * (stack.ndim - dims)]
    parts = jax.lax.dynamic_update_slice(parts, rows.astype(stack.dtype), starts)
    return parts.reshape(stack.shape)


def _widened(array: jax.Array, dtype: Any) -> jax.Array:
    return array if array.dtype == dtype else _converted(array, dtype)


@functools.partial(jax.jit, static_argnums=1)
def _converted(array: jax.Array, dtype: Any) -> jax.Array:
    return array.astype(dtype)
