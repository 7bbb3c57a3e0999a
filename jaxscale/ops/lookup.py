"""Embedding lookup when the vocabulary is spread over a mesh axis.

Letters: B batch, T time, D embed, V vocab (inside the local functions: this rank's share).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def vocabulary_parallel_lookup(
    table_VD: jax.Array, tokens_BT: jax.Array, *, axis: str, other_axes: tuple[str, ...]
) -> jax.Array:
    """Rows of a table whose first dimension is spread over `axis`, for one sum over that axis.

    Each rank looks up the tokens it owns and adds zeros for the rest (Megatron-LM, arXiv
    1909.08053). Written by hand, in a region where every mesh axis is manual, because XLA's
    partitioner cannot handle a gather from an automatically sharded operand in a region where only
    some axes are.

    Args:
      table_VD: the table.
      tokens_BT: the same on every rank of `axis`.
      axis: the mesh axis that the table is spread over.
      other_axes: the other mesh axes that are still automatic here.
    """
    rows, dtype = table_VD.shape[0], table_VD.dtype
    table_spec, whole = PartitionSpec(axis, None), PartitionSpec()

    def manual(function: Callable, in_specs: tuple, out_specs: PartitionSpec) -> Callable:
        return jax.shard_map(
            function, in_specs=in_specs, out_specs=out_specs,
            axis_names={axis, *other_axes}, check_vma=False,
        )  # fmt: skip

    def own(tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        share = rows // jax.lax.axis_size(axis)
        rows_BT = tokens_BT - jax.lax.axis_index(axis) * share
        mine_BT = (rows_BT >= 0) & (rows_BT < share)
        return jnp.where(mine_BT, rows_BT, 0), mine_BT[..., None]

    def local_lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        rows_BT, mine_BT1 = own(tokens_BT)
        return jax.lax.psum(jnp.where(mine_BT1, table_VD[rows_BT], 0), axis)

    def local_gradient(tokens_BT: jax.Array, dx_BTD: jax.Array) -> jax.Array:
        rows_BT, mine_BT1 = own(tokens_BT)
        share = rows // jax.lax.axis_size(axis)
        dtable_VD = jnp.zeros((share, dx_BTD.shape[-1]), dtype)
        return dtable_VD.at[rows_BT].add(jnp.where(mine_BT1, dx_BTD, 0))

    @jax.custom_vjp
    def lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        return manual(local_lookup, (table_spec, whole), whole)(table_VD, tokens_BT)

    def backward(tokens_BT: jax.Array, dx_BTD: jax.Array) -> tuple[jax.Array, None]:
        return manual(local_gradient, (whole, whole), table_spec)(tokens_BT, dx_BTD), None

    lookup.defvjp(lambda table_VD, tokens_BT: (lookup(table_VD, tokens_BT), tokens_BT), backward)
    return lookup(table_VD, tokens_BT)
