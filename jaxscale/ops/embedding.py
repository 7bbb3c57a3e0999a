"""Rows of a table by index, where tokens, and perhaps the table, are spread over mesh axes.

Letters: B batch, T time, D features, V rows (inside the local functions: this rank's share).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def spread_lookup(
    table_VD: jax.Array,
    indices_BT: jax.Array,
    *,
    rows: str | None,
    time: tuple[str, ...],
    axes: tuple[str, ...],
) -> jax.Array:
    """`table_VD[indices_BT]`, its T spread over `time`.

    Where the rows of the table are spread, each rank looks up the tokens whose row it has, adds
    zeros for the rest, and the sum over ranks leaves each its part of T (vocabulary-parallel
    embedding, Megatron-LM, arXiv 1909.08053, with the sequence sharded as in arXiv 2205.05198).
    Written by hand, in a region where every mesh axis is manual, because XLA's partitioner cannot
    handle a gather of automatically sharded operands in a region where only some axes are.

    Args:
      rows: the mesh axis that the table's first dimension is spread over; None is none, and one
        that is named is the last of `time`.
      time: the mesh axes that the result's T is spread over, the slowest first; they divide it.
      axes: every mesh axis that is still automatic here.
    """
    dtype = table_VD.dtype
    together = tuple(axis for axis in time if axis != rows)  # over which indices are spread
    table, indices = PartitionSpec(rows, None), PartitionSpec(None, together)
    result = PartitionSpec(None, time, None)

    def manual(function: Callable, in_specs: tuple, out_specs: PartitionSpec) -> Callable:
        return jax.shard_map(
            function,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(axes),
            check_vma=False,
        )

    def own(indices_BT: jax.Array, share: int, axis: str) -> tuple[jax.Array, jax.Array]:
        rows_BT = indices_BT - jax.lax.axis_index(axis) * share
        mine_BT = (rows_BT >= 0) & (rows_BT < share)
        return jnp.where(mine_BT, rows_BT, 0), mine_BT[..., None]

    def local_lookup(table_VD: jax.Array, indices_BT: jax.Array) -> jax.Array:
        if rows is None:
            return table_VD[indices_BT]
        rows_BT, mine_BT1 = own(indices_BT, table_VD.shape[0], rows)
        part_BTD = jnp.where(mine_BT1, table_VD[rows_BT], 0)
        return jax.lax.psum_scatter(part_BTD, rows, scatter_dimension=1, tiled=True)

    def local_gradient(indices_BT: jax.Array, dx_BTD: jax.Array) -> jax.Array:
        share = table_VD.shape[0]
        if rows is not None:
            share //= jax.lax.axis_size(rows)
            dx_BTD = jax.lax.all_gather(dx_BTD, rows, axis=1, tiled=True)
            indices_BT, mine_BT1 = own(indices_BT, share, rows)
            dx_BTD = jnp.where(mine_BT1, dx_BTD, 0)
        dtable_VD = jnp.zeros((share, dx_BTD.shape[-1]), dtype)
        dtable_VD = dtable_VD.at[indices_BT].add(dx_BTD.astype(dtype))
        return jax.lax.psum(dtable_VD, together) if together else dtable_VD

    @jax.custom_vjp
    def lookup(table_VD: jax.Array, indices_BT: jax.Array) -> jax.Array:
        return manual(local_lookup, (table, indices), result)(table_VD, indices_BT)

    def backward(indices_BT: jax.Array, dx_BTD: jax.Array) -> tuple[jax.Array, None]:
        return manual(local_gradient, (indices, result), table)(indices_BT, dx_BTD), None

    lookup.defvjp(lambda table_VD, indices: (lookup(table_VD, indices), indices), backward)
    return lookup(table_VD, indices_BT)
