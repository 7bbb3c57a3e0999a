"""Reads parameters from a checkpoint directly onto their devices.

For any layout, the host stores this process's part of one parameter of a layer or an expert, and of
the next `READ_AHEAD` ones, which are read while that is copied. A stack [layers, ...] is allocated
on the devices and filled there tensor by tensor; the devices transpose.
"""

import collections
import concurrent.futures
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.hugging_face.checkpoint_rules import ParameterTensors
from jaxscale.hugging_face.quantised_tensors import read_stored_part
from jaxscale.hugging_face.safetensors_format import DTYPES, StoredTensor
from jaxscale.hugging_face.tensor_blocks import Index, stored_order, whole_index
from jaxscale.ops.storage.quantised_storage import Stored, StoredWeights, pack
from jaxscale.sharding.resolve import leaf_name
from jaxscale.sharding.specs import transposed

READ_AHEAD = 3
"""Layers or experts that are read ahead."""


def read_params(
    found: Mapping[str, StoredTensor],
    parameters: Sequence[ParameterTensors],
    abstract: Any,
    stored: StoredWeights = MappingProxyType({}),
) -> Any:
    """The parameters of a model, in canonical form.

    Args:
      found: the tensors of the checkpoint, which `check_tensors` accepted.
      abstract: the tree of `jax.ShapeDtypeStruct` in canonical form; one without a sharding goes to
        the default device.
      stored: parameters to quantise, a layer or an expert at a time, from the type of `abstract`.

    Returns:
      A tree like `abstract`, with stored bytes in place of the parameters that `stored` names; the
      padding rows of the vocabulary are zero.

    Raises:
      ValueError: a tensor has NaNs or infinities; names it.
    """
    by_name = {one.name: one for one in parameters}
    with concurrent.futures.ThreadPoolExecutor() as readers:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: _read_array(
                found, by_name[leaf_name(path)], leaf, readers, stored.get(leaf_name(path))
            ),
            abstract,
        )


def _read_array(
    found: Mapping[str, StoredTensor],
    parameter: ParameterTensors,
    leaf: jax.ShapeDtypeStruct,
    readers: concurrent.futures.Executor,
    how: Stored | None,
) -> jax.Array:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    indices: Any = sharding.addressable_devices_indices_map(leaf.shape)
    places = {device: whole_index(index, leaf.shape) for device, index in indices.items()}
    dims = len(parameter.parts)
    counts = sharding.shard_shape(leaf.shape)[:dims]
    shape = (*(n // count for n, count in zip(leaf.shape, counts)), *leaf.shape[dims:])
    order = (*range(dims), *(dims + dim for dim in stored_order(parameter.rule)))
    stored = transposed(sharding, order)

    def read(row: tuple[int, ...]) -> dict[Index, concurrent.futures.Future]:
        """Begins to read a row of every device's part of the stack."""
        names = {index: parameter.tensor(*_place(index, row)) for index in set(places.values())}
        return {
            index: readers.submit(_read_part, name, found[name], parameter, index, leaf)
            for index, name in names.items()
        }

    rows, stack = list(np.ndindex(counts)), None
    following = collections.deque(map(read, rows[:READ_AHEAD]))
    for number, row in enumerate(rows):
        parts = {index: future.result() for index, future in following.popleft().items()}
        following.extend(map(read, rows[number + READ_AHEAD : number + READ_AHEAD + 1]))
        array = _put(parts, tuple(shape[dim] for dim in order), stored, places)
        array = _in_order(array, order, array.dtype if dims else leaf.dtype, sharding)
        if how:
            array = _pack(how, sharding)(array)
        if not dims:
            return array
        if stack is None:
            whole = how.packed_shape(leaf.shape) if how else leaf.shape
            stack = jnp.zeros(whole, array.dtype if how else leaf.dtype, device=sharding)
        # Otherwise parts of many rows would queue up in the device's memory.
        stack.block_until_ready()
        stack = _set_rows(stack, array, tuple(np.int32(number) for number in row))
        del array
    assert stack is not None, "a stack has rows"
    return stack


@functools.lru_cache
def _pack(how: Stored, sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(functools.partial(pack, stored=how), out_shardings=sharding)


def _place(index: Index, row: tuple[int, ...]) -> tuple[int, ...]:
    """The layer, and the expert, of a row of a device's part."""
    return tuple(part.start + number for part, number in zip(index, row))


def _read_part(
    name: str,
    tensor: StoredTensor,
    parameter: ParameterTensors,
    index: Index,
    leaf: jax.ShapeDtypeStruct,
) -> np.ndarray:
    """A part of a tensor, in the narrower of the two types; the device widens it.

    Raises:
      ValueError: it has NaNs or infinities.
    """
    dims = len(parameter.parts)
    wanted, stored = np.dtype(leaf.dtype), DTYPES[tensor.dtype]
    narrower = wanted if wanted.itemsize < stored.itemsize else stored
    part = read_stored_part(tensor, parameter.rule, index[dims:], narrower)
    if not np.isfinite(part).all():
        raise ValueError(
            f"{tensor.path}: tensor {name} has NaN or infinite values, with which every "
            "loss is NaN; download the file again, or use an earlier checkpoint"
        )
    return np.expand_dims(part, tuple(range(dims)))


def _put(
    parts: dict[Index, np.ndarray],
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    places: Mapping[Any, Index],
) -> jax.Array:
    """An array on devices.

    Args:
      parts: by their index in the parameter; emptied.
      places: the index of each device.
    """
    devices_of: dict[Index, list[Any]] = {}
    for device, index in places.items():
        devices_of.setdefault(index, []).append(device)
    arrays = []
    for index, devices in devices_of.items():
        part = parts.pop(index)
        # Waits, because parts that are not copied yet take host memory.
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


def _in_order(
    array: jax.Array, order: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding
) -> jax.Array:
    """The array with its dimensions permuted by `order`, in a type."""
    if array.dtype == dtype and order == tuple(range(array.ndim)):
        return array
    # Not inside `_set_rows`, where XLA for CPUs transposes four times as slowly.
    return _transpose(tuple(np.argsort(order).tolist()), dtype, sharding)(array)


@functools.lru_cache
def _transpose(
    dims: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding
) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: array.transpose(dims).astype(dtype), out_shardings=sharding)
