"""Parameters from a checkpoint straight onto their devices.

The host holds one device's part of one layer of one parameter at a time, so its memory stays within
the largest tensor and a block, whatever the layout. A stack [layers, ...] is allocated on the
devices and filled there a layer at a time.
"""

import functools
import math
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
    places: dict[Index, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        places.setdefault(_whole_index(index, leaf.shape), []).append(device)
    shards = {}
    for index, devices in places.items():
        shards |= _read_shard(found, parameter, leaf.dtype, index, devices)
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, list(shards.values()))


def _read_shard(
    found: Mapping[str, StoredTensor],
    parameter: ParameterTensors,
    dtype: Any,
    index: Index,
    devices: Sequence[jax.Device],
) -> dict[jax.Device, jax.Array]:
    """One shard of a parameter, on each of the devices that hold it."""
    shape = tuple(place.stop - place.start for place in index)
    if not parameter.stacked:
        part = _read_tensor(found[parameter.tensors[0]], parameter, index, dtype)
        return {
            device: jax.block_until_ready(jax.device_put(part, device).astype(dtype))
            for device in devices
        }
    layers, *inner = index
    shards = {device: jnp.zeros(shape, dtype, device=device) for device in devices}
    for row, layer in enumerate(range(layers.start, layers.stop)):
        part = _read_tensor(found[parameter.tensors[layer]], parameter, tuple(inner), dtype)
        for device in devices:
            # Waits: what is not copied yet stays on the host.
            shards[device] = jax.block_until_ready(
                _set_layer(shards[device], jax.device_put(part, device), np.int32(row))
            )
    return shards


def _read_tensor(
    tensor: StoredTensor, parameter: ParameterTensors, index: Index, dtype: Any
) -> np.ndarray:
    """A part on the host, in the narrower of the two types; the device widens it."""
    stored, wanted = DTYPES[tensor.dtype], np.dtype(dtype)
    narrower = wanted if wanted.itemsize < stored.itemsize else stored
    return read_part(tensor, parameter.rule, index, narrower)


@functools.partial(jax.jit, donate_argnums=0)
def _set_layer(stack: jax.Array, layer: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer.astype(stack.dtype), row, 0)


def _whole_index(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return tuple(slice(*place.indices(size)[:2]) for place, size in zip(index, shape))


def largest_tensor_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    """Of a checkpoint: about what the host holds while it is read or written."""
    return max(math.prod(one.shape) * DTYPES[one.dtype].itemsize for one in tensors.values())
