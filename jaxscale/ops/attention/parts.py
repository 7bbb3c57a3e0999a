"""Attention of a part of a sequence, with keys of all of it, where ranks of context share both.

Each rank gathers the keys of all ranks, and calls a kernel for each of its two chunks of queries.

Shapes: B batch, T a rank's queries, S its keys.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxscale.ops.attention.blocks import AttentionArrays


def part_attention(*arrays: Any, axis: str, attend: Callable[..., Array]) -> Array:
    """`attention.attention` of queries from position `begin` on; each rank of `axis` passes its
    parts, in `balanced_order`.

    For use where `axis` is manual. The keys are gathered again for the backward pass; what is saved
    are the arguments and the kernel's results.

    Args:
      arrays: the fields of `AttentionArrays`.
      attend: attention within a rank, with arguments as in `attention.attention`.
    """
    # Its residuals would be whole keys.
    policy = jax.checkpoint_policies.save_only_these_names("attention")
    local = functools.partial(_attend, axis, attend)
    return jax.checkpoint(local, policy=policy, prevent_cse=False)(AttentionArrays(*arrays))


def _attend(axis: str, attend: Callable[..., Array], given: AttentionArrays) -> Array:
    ranks, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    length = given.q_BTNH.shape[1] * ranks  # of the part
    segments = given.k_BSKH.shape[1] * ranks // length

    def gathered(x_BS: Array) -> Array:
        """All ranks' entries in the order of the text."""
        x_BS = jax.lax.all_gather(x_BS, axis, axis=1, tiled=True)
        batch, time, *features = x_BS.shape
        by_rank = x_BS.reshape(batch, ranks, segments, 2, -1, *features)
        halves = by_rank[:, :, :, 0], by_rank[:, ::-1, :, 1]
        chunks = jnp.concatenate([jnp.swapaxes(half, 1, 2) for half in halves], axis=2)
        return chunks.reshape(batch, time, *features)

    assert given.begin is not None
    assert given.segments_BS is not None
    k_BSKH, v_BSKH, segments_BS = map(gathered, (given.k_BSKH, given.v_BSKH, given.segments_BS))
    parts = []
    for h, number in enumerate((rank, 2 * ranks - 1 - rank)):
        q_BTNH, segments_BT = (
            jnp.split(x, 2, axis=1)[h] for x in (given.q_BTNH, given.segments_BT)
        )
        begin = given.begin + number * (length // (2 * ranks))
        tables = given.bias_bN, given.sinks_N
        parts.append(attend(q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BS, *tables, begin))
    return jnp.concatenate(parts, axis=1)
