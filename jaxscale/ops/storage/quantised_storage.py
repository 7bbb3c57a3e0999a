"""Formats of weights that are stored quantised: 4 or 8 bits a weight, and a scale for each block.

| format | block | a weight | a block's scale | bits a weight |
|---|---|---|---|---|
| nf4 | 64 | 4-bit NormalFloat (QLoRA, arXiv 2305.14314) | float32, the largest magnitude | 4.5 |
| mxfp4 | 32 | e2m1, OCP Microscaling Formats 1.0 | e8m0, a power of two | 4.25 |
| float8 | 32 | e4m3, the same (MXFP8) | e8m0, a power of two | 8.25 |

A block is of consecutive weights along one dimension, the last contracted one. The stored array has
the weight's dimensions, in bytes along that one: for each block its codes, then its scale. It is
sharded as the weight is, and a shard has whole blocks.

Codes, scales and values of `nf4` are bit for bit those of bitsandbytes on a CPU (0.49, blocks of
64, no double quantisation). Two codes of a byte are in the order of the formats' checkpoints: the
first weight in the high half for nf4, in the low half for mxfp4.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxscale.config.model.quantised_base import BLOCKS
from jaxscale.sharding.resolve import leaf_name

NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
"""The values of the 16 codes, from appendix E of arXiv 2305.14314."""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of the 16 codes, sign bit first."""

_E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between neighbouring magnitudes; a value on one rounds to the even code."""

_NF4_BOUNDS = (NF4[1:] + NF4[:-1]) / 2

_SMALLEST = float(np.finfo(np.float32).tiny)


class StorageFormat(NamedTuple):
    """A format: sizes of a block, and its conversions, for arrays whose dimension `axis` is the
    weights or the bytes of a block."""

    block: int  # weights
    block_bytes: int
    code_bytes: int
    quantise: Callable[[Array, int], Array]  # float32 [.., weights, ..] -> uint8 [.., bytes, ..]
    dequantise: Callable[[Array, Array, int], Array]  # of codes and scales, to float32


class Stored(NamedTuple):
    """How one weight of a layer is stored."""

    format: str  # a key of FORMATS
    dim: int  # its dimension with the blocks
    dtype: DTypeLike = jnp.float32  # the type in which layers read it

    @property
    def sizes(self) -> StorageFormat:
        return FORMATS[self.format]

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the stored array of a weight."""
        return self._with(shape, shape[self.dim] // self.sizes.block * self.sizes.block_bytes)

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the weight of a stored array."""
        return self._with(shape, shape[self.dim] // self.sizes.block_bytes * self.sizes.block)

    def _with(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])


StoredWeights = Mapping[str, Stored]
"""How the weights at some paths of a tree, such as "mlp/up", are stored."""


def in_stack(stored: StoredWeights) -> dict[str, Stored]:
    """The same for a stack of layers, [layers, ...]."""
    return {name: one._replace(dim=one.dim + 1) for name, one in stored.items()}


def pack(weight: Any, stored: Stored) -> Array:
    """The stored bytes of a weight: quantised from float32.

    Raises:
      ValueError: the dimension is not of whole blocks.
    """
    form, axis = stored.sizes, stored.dim + 1
    blocks = _blocks(weight.astype(jnp.float32), stored.dim, form.block)
    return form.quantise(blocks, axis).reshape(stored.packed_shape(weight.shape))


def unpack(packed: Array, stored: Stored) -> Array:
    """The weight of stored bytes, in `stored.dtype`; rounded from float32."""
    form, axis = stored.sizes, stored.dim + 1
    blocks = _blocks(packed, stored.dim, form.block_bytes)
    codes = jax.lax.slice_in_dim(blocks, 0, form.code_bytes, axis=axis)
    scales = jax.lax.slice_in_dim(blocks, form.code_bytes, form.block_bytes, axis=axis)
    values = form.dequantise(codes, scales, axis)
    return values.reshape(stored.whole_shape(packed.shape)).astype(stored.dtype)


def pack_weights(weights: Any, stored: StoredWeights) -> Any:
    """A tree of weights, with stored bytes in place of the weights that `stored` names."""
    return _map_stored(pack, weights, stored)


def unpack_weights(weights: Any, stored: StoredWeights) -> Any:
    """The inverse of `pack_weights`, except for rounding."""
    return _map_stored(unpack, weights, stored)


def stored_gradients(grads: Any, stored: StoredWeights) -> Any:
    """Gradients in the shapes of stored arrays: zeros for the weights that `stored` names, since
    codes have no gradient."""
    return _map_stored(
        lambda grad, one: jnp.zeros(one.packed_shape(grad.shape), grad.dtype), grads, stored
    )


def quantise_donated(params: Any, stored: StoredWeights) -> Any:
    """`pack_weights` of parameters on devices, one at a time, each of which is then deleted."""
    return _map_stored(
        lambda x, how: _converted(functools.partial(pack, stored=how), x), params, stored
    )


def dequantise_donated(params: Any, stored: StoredWeights, dtype: DTypeLike) -> Any:
    """The inverse of `quantise_donated`, in a type."""
    return _map_stored(
        lambda x, how: _converted(functools.partial(unpack, stored=how._replace(dtype=dtype)), x),
        params,
        stored,
    )


def _converted(function: Callable[[Array], Array], x: Array) -> Array:
    made = jax.jit(function, out_shardings=x.sharding)(x)
    made.block_until_ready()
    x.delete()
    return made


def whole_shapes(shapes: Any, stored: StoredWeights, dtype: DTypeLike) -> Any:
    """The shapes of a tree of parameters before the weights that `stored` names were packed, in
    `dtype`, with the same shardings."""
    return _map_stored(
        lambda x, one: jax.ShapeDtypeStruct(one.whole_shape(x.shape), dtype, sharding=x.sharding),
        shapes,
        stored,
    )


def mxfp4_values(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The weights [outputs, inputs], float32, of a checkpoint's blocks [outputs, inputs / 32, 16]
    and scales [outputs, inputs / 32]. A scale of 255 is NaN."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
    powers = np.ldexp(1.0, scales.astype(np.int32) - 127)
    powers = np.where(scales == 255, np.nan, powers).astype(np.float32)
    return (E2M1[codes] * powers[..., None]).reshape(len(scales), -1)


def scaled_by_blocks(
    codes: np.ndarray, factors: np.ndarray, block: tuple[int, int], first: int
) -> np.ndarray:
    """The weights, float32, of rows of a checkpoint's matrix of numbers [rows, inputs], of which
    each block of a x b has a factor.

    Args:
      factors: of the whole matrix, [outputs / a, inputs / b], rounded up.
      block: a and b.
      first: the first row's index in the matrix.
    """
    of_rows = factors[np.arange(first, first + len(codes)) // block[0]].astype(np.float32)
    return codes.astype(np.float32) * np.repeat(of_rows, block[1], 1)[:, : codes.shape[1]]


def _map_stored(function: Callable[[Any, Stored], Any], tree: Any, stored: StoredWeights) -> Any:
    if not stored:
        return tree

    def one(path: tuple, leaf: Any) -> Any:
        how = stored.get(leaf_name(path))
        return leaf if how is None else function(leaf, how)

    return jax.tree_util.tree_map_with_path(one, tree)


def _blocks(x: Array, dim: int, size: int) -> Array:
    """The array with dimension `dim` split into blocks of a size."""
    assert x.shape[dim] % size == 0, "the model checks that dimensions are of whole blocks"
    return x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])


def _quantise_nf4(x: Array, axis: int) -> Array:
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    # A multiplication by the inverse rounds differently from a division.
    scaled = jnp.clip(x * (1 / jnp.maximum(largest, _SMALLEST)), -1, 1)
    codes = _count(scaled > bound for bound in _NF4_BOUNDS)
    bits = jax.lax.bitcast_convert_type(largest, jnp.uint32)
    scales = (bits >> _along(axis, x.ndim, 0, 8, 16, 24)).astype(jnp.uint8)
    return jnp.concatenate([_pairs(codes, axis, first_is_high=True), scales], axis)


def _dequantise_nf4(codes: Array, scales: Array, axis: int) -> Array:
    values = _lookup(_halves(codes, axis, first_is_high=True), NF4)
    parts = (jax.lax.slice_in_dim(scales, i, i + 1, axis=axis) for i in range(4))
    bits = [part.astype(jnp.uint32) << (8 * i) for i, part in enumerate(parts)]
    largest = jax.lax.bitcast_convert_type(bits[0] | bits[1] | bits[2] | bits[3], jnp.float32)
    return values * largest


def _quantise_mxfp4(x: Array, axis: int) -> Array:
    scaled, scales = _scaled_by_power(x, axis, largest_exponent=2)
    size = jnp.abs(scaled)
    codes = _count(
        size > bound if i % 2 == 0 else size >= bound for i, bound in enumerate(_E2M1_BOUNDS)
    )
    codes |= jnp.signbit(scaled).astype(jnp.uint8) << 3
    return jnp.concatenate([_pairs(codes, axis, first_is_high=False), scales], axis)


def _dequantise_mxfp4(codes: Array, scales: Array, axis: int) -> Array:
    return _lookup(_halves(codes, axis, first_is_high=False), E2M1) * _power(scales)


def _quantise_float8(x: Array, axis: int) -> Array:
    scaled, scales = _scaled_by_power(x, axis, largest_exponent=8)
    codes = jnp.clip(scaled, -448, 448).astype(jnp.float8_e4m3fn)
    return jnp.concatenate([jax.lax.bitcast_convert_type(codes, jnp.uint8), scales], axis)


def _dequantise_float8(codes: Array, scales: Array, axis: int) -> Array:
    del axis
    values = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return values.astype(jnp.float32) * _power(scales)


FORMATS: dict[str, StorageFormat] = {
    "nf4": StorageFormat(*BLOCKS["nf4"], 32, _quantise_nf4, _dequantise_nf4),
    "mxfp4": StorageFormat(*BLOCKS["mxfp4"], 16, _quantise_mxfp4, _dequantise_mxfp4),
    "float8": StorageFormat(*BLOCKS["float8"], 32, _quantise_float8, _dequantise_float8),
}


def _scaled_by_power(x: Array, axis: int, largest_exponent: int) -> tuple[Array, Array]:
    """The array times the inverse of each block's scale, and the scales, e8m0: the power of two of
    the largest magnitude, less that of the type's."""
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    exponent = (jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23) - largest_exponent
    # Not e8m0's smallest, 2^-127, which back ends that flush small numbers read as 0.
    scales = jnp.clip(exponent, 1, 253).astype(jnp.uint8)
    return x * _power(254 - scales), scales


def _power(exponents: Array) -> Array:
    """2^(e - 127) for e8m0 numbers e, 1 to 254."""
    return jax.lax.bitcast_convert_type(exponents.astype(jnp.int32) << 23, jnp.float32)


def _count(conditions: Any) -> Array:
    """How many of the conditions hold, in uint8."""
    return sum((one.astype(jnp.uint8) for one in conditions), jnp.uint8(0))


def _pairs(codes: Array, axis: int, *, first_is_high: bool) -> Array:
    """Two 4-bit codes in each byte."""
    split = codes.reshape(*codes.shape[:axis], -1, 2, *codes.shape[axis + 1 :])
    first, second = (jax.lax.index_in_dim(split, i, axis + 1, keepdims=False) for i in (0, 1))
    return first << 4 | second if first_is_high else second << 4 | first


def _halves(codes: Array, axis: int, *, first_is_high: bool) -> Array:
    """The inverse of `_pairs`."""
    shifts = _along(axis + 1, codes.ndim + 1, *((4, 0) if first_is_high else (0, 4)))
    split = jnp.expand_dims(codes, axis + 1) >> shifts.astype(jnp.uint8) & 15
    return split.reshape(*codes.shape[:axis], -1, *codes.shape[axis + 1 :])


def _along(axis: int, ndim: int, *values: int) -> np.ndarray:
    """Numbers along a dimension."""
    return np.array(values, np.uint32).reshape([-1 if i == axis else 1 for i in range(ndim)])


def _lookup(codes: Array, table: np.ndarray) -> Array:
    """The values of 4-bit codes. Selections, which fuse with the rest: TPUs are slow at a gather of
    single numbers."""
    level: list[Any] = [jnp.float32(value) for value in table]
    for bit in range(4):
        is_set = (codes >> bit & 1).astype(bool)
        level = [jnp.where(is_set, odd, even) for even, odd in zip(level[::2], level[1::2])]
    return level[0]
