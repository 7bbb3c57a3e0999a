"""Ulysses: context parallelism with all-to-alls over heads (DeepSpeed-Ulysses, arXiv 2309.14509).

An all-to-all gives each rank whole sequences for some of the heads, any kernel attends within the
rank, and another all-to-all returns to all heads for a part of the sequence.

Shapes: as in `attention.py`, T and S a rank's part of the sequence; c ranks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxscale.ops.attention.blocks import AttentionArrays
from jaxscale.sharding.rules import divides_heads


def ulysses_attention(*arrays: Any, axis: str, attend: Callable[..., Array]) -> Array:
    """`attention.attention` where each rank of `axis` passes its part, in `balanced_order`.

    For use where `axis` is manual. With fewer key heads than ranks, each key head is sent to all
    ranks whose query heads read it.

    Args:
      arrays: the fields of `AttentionArrays`.
      axis: the mesh axis. Its number of ranks divides N, and divides K or is a multiple of K.
      attend: attention within a rank, with arguments as in `attention.attention`.

    Raises:
      ValueError: the ranks do not divide the heads.
    """
    given = AttentionArrays(*arrays)
    ranks, (heads, key_heads) = jax.lax.axis_size(axis), (x.shape[2] for x in given[:2])
    if not divides_heads(ranks, heads, key_heads):
        raise ValueError(
            f"{heads} heads and {key_heads} key/value heads do not divide over {ranks} ranks of "
            f"{axis!r}; set layout.context_method = 'ring' or 'gather'"
        )
    repeats = max(ranks // key_heads, 1)
    keys = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in given[1:3])
    heads = [_to_heads(x, axis) for x in (given.q_BTNH, *keys)]
    segments = [
        None if x is None else _natural(jax.lax.all_gather(x, axis, axis=1, tiled=True), ranks)
        for x in given[3:5]
    ]
    tables = [None if x is None else _own_heads(x, axis) for x in given[5:7]]
    return _to_time(attend(*heads, *segments, *tables), axis)


def _to_heads(x_BTNH: Array, axis: str) -> Array:
    """The whole sequence, in text order, for this rank's heads."""
    exchange = functools.partial(jax.lax.all_to_all, axis_name=axis, tiled=True)
    return _natural(exchange(x_BTNH, split_axis=2, concat_axis=1), jax.lax.axis_size(axis))


def _to_time(x_BTNH: Array, axis: str) -> Array:
    """The inverse of `_to_heads`."""
    exchange = functools.partial(jax.lax.all_to_all, axis_name=axis, tiled=True)
    return exchange(_balanced(x_BTNH, jax.lax.axis_size(axis)), split_axis=1, concat_axis=2)


def _natural(x_BT: Array, ranks: int) -> Array:
    """[B, T, ...] from `balanced_order` to text order: first chunks, then second ones reversed."""
    x_BchT = x_BT.reshape(x_BT.shape[0], ranks, 2, -1, *x_BT.shape[2:])
    chunks = jnp.concatenate((x_BchT[:, :, 0], x_BchT[:, ::-1, 1]), axis=1)
    return chunks.reshape(x_BT.shape)


def _balanced(x_BT: Array, ranks: int) -> Array:
    """The inverse of `_natural`."""
    chunks = x_BT.reshape(x_BT.shape[0], 2 * ranks, -1, *x_BT.shape[2:])
    x_BchT = jnp.stack((chunks[:, :ranks], chunks[:, : ranks - 1 : -1]), axis=2)
    return x_BchT.reshape(x_BT.shape)


def _own_heads(table_N: Array, axis: str) -> Array:
    """[..., N] -> the entries of this rank's heads."""
    count = table_N.shape[-1] // jax.lax.axis_size(axis)
    start = jax.lax.axis_index(axis) * count
    return jax.lax.dynamic_slice_in_dim(table_N, start, count, axis=-1)
