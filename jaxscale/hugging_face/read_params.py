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
from jaxscale.sharding.specs import of_one_layer


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
        array = _read_tensor(tensor, parameter, leaf.shape, leaf.dtype, sharding, places)
        return array if array.dtype == leaf.dtype else _converted(array, leaf.dtype)
    assert sharding.shard_shape(leaf.shape)[0] == leaf.shape[0], "layers are whole on every device"
    inner, places = of_one_layer(sharding), {device: index[1:] for device, index in places.items()}
    stack = jnp.zeros(leaf.shape, leaf.dtype, device=sharding)
    for row, name in enumerate(parameter.tensors):
        layer = _read_tensor(found[name], parameter, leaf.shape[1:], leaf.dtype, inner, places)
        stack = _set_layer(stack, layer, np.int32(row))
    return stack


def _read_tensor(
    tensor: StoredTensor,
    parameter: ParameterTensors,
    shape: tuple[int, ...],
    dtype: Any,
    sharding: jax.sharding.Sharding,
    places: Mapping[jax.Device, Index],
) -> jax.Array:
    """A parameter, or a layer of it, in the narrower of the two types; the device widens it."""
    stored, wanted = DTYPES[tensor.dtype], np.dtype(dtype)
    narrower = wanted if wanted.itemsize < stored.itemsize else stored
    devices_of: dict[Index, list[jax.Device]] = {}
    for device, index in places.items():
        devices_of.setdefault(index, []).append(device)
    shards = []
    for index, devices in devices_of.items():
        part = read_part(tensor, parameter.rule, index, narrower)
        # Waits: what is not copied yet stays on the host.
        shards += [jax.block_until_ready(jax.device_put(part, device)) for device in devices]
        del part
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


@functools.partial(jax.jit, donate_argnums=0)
def _set_layer(stack: jax.Array, layer: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer.astype(stack.dtype), row, 0)


@functools.partial(jax.jit, static_argnums=1)
def _converted(array: jax.Array, dtype: Any) -> jax.Array:
    return array.astype(dtype)
