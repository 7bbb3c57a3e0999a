"""Masks of magnitude pruning with exact counts, for arrays with any sharding under `jax.jit`.

A matrix is an array, or one of a stack of arrays: `dims` are its dimensions, the others count
matrices. Magnitudes are compared as integers, so that masks do not depend on the order of sums.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

KEY_BITS = 31
"""Bits of a float32 number without its sign."""

Dims = tuple[int, ...]


def live_weights(x: jax.Array, dims: Dims) -> jax.Array:
    """bool in the shape of `x`, whether each weight is trained: zeros are pruned weights, except in
    matrices that are zero as a whole, such as new ones that begin at zero."""
    nonzero = x != 0
    return nonzero | ~jnp.any(nonzero, dims, keepdims=True)


def magnitude_keys(x: jax.Array) -> jax.Array:
    """uint32 in the shape of `x`, ordered as its magnitudes in float32 are; 0 for zeros only."""
    bits = jax.lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.uint32)
    return jnp.where(x == 0, jnp.uint32(0), jnp.maximum(bits, 1))


def largest_of_groups(keys: jax.Array, dim: int, kept: int, group: int) -> jax.Array:
    """bool in the shape of `keys`, whether a key is among the `kept` largest of its group; of equal
    ones the last count as larger.

    Args:
      dim: the dimension along which each `group` neighbours are a group. Groups of a sharded
        dimension must not straddle shards; then there is no communication.
    """
    split = (*keys.shape[:dim], keys.shape[dim] // group, group, *keys.shape[dim + 1 :])
    grouped = keys.reshape(split)
    place = jnp.arange(group).reshape(-1, *(1,) * (keys.ndim - dim - 1))
    larger = jnp.zeros(split, jnp.int32)
    for other in range(group):
        one = jax.lax.slice_in_dim(grouped, other, other + 1, axis=dim + 1)
        larger += (one > grouped) | ((one == grouped) & (other > place))
    return (larger < kept).reshape(keys.shape)


def all_but_lowest(
    keys: Sequence[jax.Array],
    num_pruned: Sequence[jax.Array],
    dims: Sequence[Dims],
    active: jax.Array,
    bits: int = KEY_BITS,
) -> list[jax.Array]:
    """For each array, bool in its shape: False for the `num_pruned` lowest keys of each matrix. Of
    equal keys those with the lowest index in the matrix are pruned.

    The threshold is found by bisection, bit by bit: each iteration counts the keys below a
    candidate, for all arrays at once, so that the counts of all shards are summed by one
    collective. Ties, if there are any, are divided by a bisection over the index.

    Args:
      num_pruned: int32 scalars, below the size of a matrix.
      active: bool scalar; if False nothing is pruned or counted.
      bits: of the keys.
    """
    indices = [_index(key.shape, each) for key, each in zip(keys, dims)]
    size = max(math.prod(key.shape[i] for i in each) for key, each in zip(keys, dims))
    zero = [jnp.zeros_like(jnp.max(key, each, keepdims=True)) for key, each in zip(keys, dims)]

    def below(thresholds: Sequence[jax.Array]) -> list[jax.Array]:
        return [key < threshold for key, threshold in zip(keys, thresholds)]

    thresholds = _bisect(below, num_pruned, dims, zero, jnp.where(active, bits, 0), bits)
    lower = below(thresholds)
    left = [count - _count(one, each) for count, one, each in zip(num_pruned, lower, dims)]
    # A threshold of 0 is that of a matrix with more zeros than are to be pruned.
    tied = [jnp.any((rest > 0) & (at > 0)) for rest, at in zip(left, thresholds)]
    ties = [key == threshold for key, threshold in zip(keys, thresholds)]

    def first(ends: Sequence[jax.Array]) -> list[jax.Array]:
        return [tie & (index < end) for tie, index, end in zip(ties, indices, ends)]

    index_bits = size.bit_length()
    trips = jnp.where(active & jnp.any(jnp.stack(tied)), index_bits, 0)
    ends = _bisect(first, left, dims, zero, trips, index_bits)
    return [~(one | tie) for one, tie in zip(lower, first(ends))]


def _bisect(below, wanted, dims, zero, trips, bits: int) -> list[jax.Array]:
    """The largest thresholds of `bits` bits below which there are at most `wanted` elements.

    Args:
      below: thresholds -> masks of the elements below them.
      zero: thresholds of 0, one for each matrix.
      trips: `bits`, or 0 to return `zero`.
    """

    def narrow(i: jax.Array, thresholds: list[jax.Array]) -> list[jax.Array]:
        bit = jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32)
        raised = [threshold | bit for threshold in thresholds]
        counts = [_count(one, each) for one, each in zip(below(raised), dims)]
        return [
            jnp.where(count <= most, new, old)
            for count, most, new, old in zip(counts, wanted, raised, thresholds)
        ]

    return jax.lax.fori_loop(0, trips, narrow, zero)


def _count(mask: jax.Array, dims: Dims) -> jax.Array:
    return jnp.sum(mask, dims, dtype=jnp.int32, keepdims=True)


def _index(shape: tuple[int, ...], dims: Dims) -> jax.Array:
    """uint32, the place of each element in its matrix, in row-major order."""
    place, stride = jnp.zeros((1,) * len(shape), jnp.uint32), 1
    for dim in sorted(dims, reverse=True):
        place = place + jnp.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        stride *= shape[dim]
    return place
