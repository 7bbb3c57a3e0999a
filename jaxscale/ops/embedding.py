"""Embedding lookup, with tokens, and optionally the table, sharded over mesh axes.

The gradient of a row is a sum over all of its uses: thousands in a batch for a common token. It is
accumulated in float32 or wider for all types of table, since a bfloat16 sum stops growing at about
256 times the size of its terms.

Letters: B batch, T time, D features, V rows (inside the local functions: this rank's share).
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxscale.sharding.specs import manually


def lookup(table_VD: jax.Array, indices_BT: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`table_VD[indices_BT]` in `dtype`, of a table that is whole on this device.

    The gradient has the type of the table; a float32 table gets the float32 sums unrounded.
    """
    num_rows, table_dtype = table_VD.shape[0], table_VD.dtype

    @jax.custom_vjp
    def rows(table_VD: jax.Array, indices_BT: jax.Array) -> jax.Array:
        return table_VD[indices_BT].astype(dtype)

    def backward(indices_BT: jax.Array, dx_BTD: jax.Array) -> tuple[jax.Array, None]:
        return _sum_uses(num_rows, indices_BT, dx_BTD).astype(table_dtype), None

    rows.defvjp(lambda table_VD, indices: (rows(table_VD, indices), indices), backward)
    return rows(table_VD, indices_BT)


def spread_lookup(
    table_VD: jax.Array,
    indices_BT: jax.Array,
    dtype: DTypeLike,
    *,
    rows: str | None,
    time: tuple[str, ...],
    axes: tuple[str, ...],
    features: str | None = None,
    scatters: bool = False,
) -> jax.Array:
    """`lookup` with T sharded over `time`, and optionally a sharded table.

    With sharded rows this is Megatron-LM's vocabulary-parallel embedding (arXiv 1909.08053) with
    the sequence sharded as in arXiv 2205.05198: each rank looks up the tokens whose rows it has,
    takes zeros for the others, and a reduce-scatter gives each rank its part of T. Every mesh axis
    is manual, because XLA's partitioner fails on a gather of automatically sharded operands in a
    region where only some axes are manual.

    Args:
      rows: the mesh axis that shards the table's first dimension, which must be the last of `time`;
        None if its rows are not sharded.
      time: the mesh axes that shard the result's T, the slowest first; they divide it.
      axes: every mesh axis that is automatic here.
      features: the mesh axis that shards D in all arrays.
      scatters: whether the table's gradient is sharded along D over the other axes of `time`, which
        divide D, as the optimizer's state is.
    """
    num_rows, table_dtype = table_VD.shape[0], table_VD.dtype
    together = tuple(axis for axis in time if axis != rows)  # shard the indices
    table, indices = PartitionSpec(rows, features), PartitionSpec(None, together)
    result = PartitionSpec(None, time, features)
    scatters = scatters and bool(together)
    # Each rank of `features` scatters its part of D over the ranks of `together`.
    parts = (features, *together) if features else together
    gradient = PartitionSpec(rows, parts) if scatters else table

    def own(indices_BT: jax.Array, share: int, axis: str) -> tuple[jax.Array, jax.Array]:
        rows_BT = indices_BT - jax.lax.axis_index(axis) * share
        mine_BT = (rows_BT >= 0) & (rows_BT < share)
        return jnp.where(mine_BT, rows_BT, 0), mine_BT[..., None]

    def local_lookup(table_VD: jax.Array, indices_BT: jax.Array) -> jax.Array:
        if rows is None:
            return table_VD[indices_BT].astype(dtype)
        rows_BT, mine_BT1 = own(indices_BT, table_VD.shape[0], rows)
        part_BTD = jnp.where(mine_BT1, table_VD[rows_BT].astype(dtype), 0)
        return jax.lax.psum_scatter(part_BTD, rows, scatter_dimension=1, tiled=True)

    def local_gradient(indices_BT: jax.Array, dx_BTD: jax.Array) -> jax.Array:
        share = num_rows
        if rows is not None:
            dx_BTD = jax.lax.all_gather(dx_BTD, rows, axis=1, tiled=True)
        if scatters:
            # Exchanged before the sum: a rank sums its features of all tokens. The sums of its
            # tokens would be float32 [V, D], the largest array of a step with a long context, and
            # the bytes of their reduction as many.
            dx_BTD = jax.lax.all_to_all(dx_BTD, together, split_axis=2, concat_axis=1, tiled=True)
            indices_BT = jax.lax.all_gather(indices_BT, together, axis=1, tiled=True)
        if rows is not None:
            share //= jax.lax.axis_size(rows)
            indices_BT, mine_BT1 = own(indices_BT, share, rows)
            dx_BTD = jnp.where(mine_BT1, dx_BTD, 0)
        sums_VD = _sum_uses(share, indices_BT, dx_BTD)
        if together and not scatters:
            sums_VD = jax.lax.psum(sums_VD, together)
        return sums_VD.astype(table_dtype)

    @jax.custom_vjp
    def lookup(table_VD: jax.Array, indices_BT: jax.Array) -> jax.Array:
        return manually(local_lookup, axes, (table, indices), result)(table_VD, indices_BT)

    def backward(indices_BT: jax.Array, dx_BTD: jax.Array) -> tuple[jax.Array, None]:
        run = manually(local_gradient, axes, (indices, result), gradient)
        return run(indices_BT, dx_BTD), None

    lookup.defvjp(lambda table_VD, indices: (lookup(table_VD, indices), indices), backward)
    return lookup(table_VD, indices_BT)


def _sum_uses(num_rows: int, indices_BT: jax.Array, dx_BTD: jax.Array) -> jax.Array:
    """Sums the gradients of each row's uses, in float32 or wider."""
    wide = jnp.promote_types(dx_BTD.dtype, jnp.float32)
    # If the result is only added to an accumulator, XLA scatters into that and allocates no zeros.
    sums_VD = jnp.zeros((num_rows, dx_BTD.shape[-1]), wide)
    return sums_VD.at[indices_BT].add(dx_BTD.astype(wide))
