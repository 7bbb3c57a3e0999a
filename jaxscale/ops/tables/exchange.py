"""Exchange of the rows of embedding tables over the whole mesh, by hand: lookups, and gradients.

For a `shard_map` in which every mesh axis is manual. Rank r of all ranks has the rows from
r * share. A rank first removes the duplicates among its ids. Then ids go to the ranks that have
their rows, and rows come back (a lookup), or ids go with their gradients (an update), in rounds of
all-to-alls. A round has a capacity of twice the mean number of ids from one rank to another,
so that memory does not depend on how ids are distributed, and evenly hashed ids need one round. If
all ids are on one rank, there are about ranks / 2 rounds, or more where the ranks' ids differ.

A round covers, for each receiver, the range of rows up to the first one beyond the capacity of some
rank. So all uses of a row, on all ranks, are in one round, and its gradient is summed before it is
applied; the order of the sum is that of the ranks.

Letters: N ids of a rank, R ranks, C capacity for ids from one rank to another, V rows of a rank, D
width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

CAPACITY = 2
"""Of a round, in mean numbers of ids from one rank to another."""

Carry = Any


@dataclass(frozen=True)
class TableShards:
    """Blocks of a table's rows on the ranks of mesh axes."""

    axes: tuple[str, ...]  # without axes of size 1
    ranks: int
    share: int  # rows of a rank

    @property
    def none(self) -> int:
        """The id that stands for no row, after the last one."""
        return self.ranks * self.share

    def capacity(self, num_ids: int) -> int:
        """The most ids from one rank to another in a round."""
        return min(num_ids, -(-num_ids // self.ranks) * CAPACITY)

    def exchange(self, x_RC: Array) -> Array:
        """Sends part r of the first dimension to rank r."""
        return jax.lax.all_to_all(x_RC, self.axes, 0, 0, tiled=True) if self.axes else x_RC


class Distinct(NamedTuple):
    """The distinct values of an array of integers."""

    values: Array  # [N], ascending; after the last one a given fill value
    order: Array  # [N], sorts the array; equal ones stay in order
    place: Array  # [N], of each sorted element among `values`


def distinct(values_N: Array, fill: int) -> Distinct:
    """Sorts integers and removes duplicates."""
    order_N = jnp.argsort(values_N, stable=True)
    sorted_N = values_N[order_N]
    new_N = jnp.concatenate([jnp.ones(1, bool), sorted_N[1:] != sorted_N[:-1]])
    place_N = jnp.cumsum(new_N, dtype=jnp.int32) - 1
    found_N = jnp.full_like(values_N, fill).at[place_N].set(sorted_N, indices_are_sorted=True)
    return Distinct(found_N, order_N, place_N)


def sum_duplicates(found: Distinct, x_ND: Array) -> Array:
    """The sum of the rows of each distinct value, [N, D], in float32 or wider: frequent ids have
    thousands of rows."""
    rows_ND = x_ND[found.order].astype(jnp.promote_types(x_ND.dtype, jnp.float32))
    return jnp.zeros_like(rows_ND).at[found.place].add(rows_ND, indices_are_sorted=True)


def look_up(shards: TableShards, rows_VD: Array, ids_N: Array) -> Array:
    """The rows of ids, [N, D]; zeros for ids below 0."""
    found = distinct(_known(shards, ids_N), shards.none)

    def visit(x_ND: Array, index_RC: Array, row_RC: Array) -> Array:
        back_RCD = shards.exchange(_take(rows_VD, row_RC, 0))
        return x_ND.at[index_RC].set(back_RCD, mode="drop")

    empty_ND = jnp.zeros((len(ids_N), rows_VD.shape[-1]), rows_VD.dtype)
    x_ND = _in_rounds(shards, found.values, visit, empty_ND)
    place_N = jnp.zeros_like(found.place).at[found.order].set(found.place)
    return x_ND[place_N]


def update(
    shards: TableShards,
    table: Carry,
    ids_N: Array,
    grads_ND: Array,
    rule: Callable[[Carry, Array, Array], Carry],
) -> Carry:
    """Applies the gradients of looked-up rows to this rank's part of a table.

    Args:
      ids_N: ids below 0 have no row.
      rule: (table, rows [M], ascending, distinct except V, which is none; gradients [M, D]) ->
        table.
    """
    found = distinct(_known(shards, ids_N), shards.none)
    sums_ND = sum_duplicates(found, grads_ND)

    def visit(table: Carry, index_RC: Array, row_RC: Array) -> Carry:
        grads_RCD = shards.exchange(_take(sums_ND, index_RC, 0))
        own = distinct(row_RC.reshape(-1), shards.share)
        sums_MD = sum_duplicates(own, grads_RCD.reshape(-1, sums_ND.shape[-1]))
        return rule(table, own.values, sums_MD)

    return _in_rounds(shards, found.values, visit, table)


def adagrad(
    table: tuple[Array, Array], row_M: Array, grad_MD: Array, rate: float, epsilon: float = 1e-8
) -> tuple[Array, Array]:
    """Row-wise Adagrad, with one number a row: the sum of the mean squares of its gradients.

    Args:
      table: rows [V, D] and sums [V].
      row_M: rows to change, distinct; V is none.
    """
    rows_VD, sums_V = table
    squares_M = jnp.mean(jnp.square(grad_MD.astype(sums_V.dtype)), axis=-1)
    sums_M = _take(sums_V, row_M, 0) + squares_M
    step_MD = grad_MD * (rate / (jnp.sqrt(sums_M) + epsilon))[:, None]
    changed = _take(rows_VD, row_M, 0) - step_MD
    return (
        rows_VD.at[row_M].set(changed.astype(rows_VD.dtype), mode="drop", indices_are_sorted=True),
        sums_V.at[row_M].set(sums_M, mode="drop", indices_are_sorted=True),
    )


def _known(shards: TableShards, ids_N: Array) -> Array:
    return jnp.where(ids_N < 0, shards.none, ids_N)


def _take(x: Array, index: Array, fill: int) -> Array:
    return jnp.take(x, index, axis=0, mode="fill", fill_value=fill)


def _in_rounds(
    shards: TableShards,
    ids_N: Array,
    visit: Callable[[Carry, Array, Array], Carry],
    carry: Carry,
) -> Carry:
    """Calls `visit(carry, index, row)` for each round of an exchange.

    - index [R, C]: the ids that this rank sends, as places in `ids_N`; N is none.
    - row [R, C]: the rows that this rank is asked for by each rank; V is none.

    Args:
      ids_N: ascending, distinct except ids that are `shards.none`.
    """
    count = len(ids_N)
    capacity = shards.capacity(count)
    stop_R = (1 + jnp.arange(shards.ranks, dtype=ids_N.dtype)) * shards.share
    end_R = jnp.searchsorted(ids_N, stop_R).astype(jnp.int32)
    begin_R = jnp.concatenate([jnp.zeros(1, jnp.int32), end_R[:-1]])
    me = jax.lax.axis_index(shards.axes) if shards.axes else 0

    def one(state: tuple[Array, Array, Carry]) -> tuple[Array, Array, Carry]:
        _, begin_R, carry = state
        beyond_R = begin_R + capacity
        # The first id beyond it, on any rank: no rank sends it or a later one in this round.
        limit_R = jnp.where(beyond_R < end_R, _take(ids_N, beyond_R, shards.none), stop_R)
        limit_R = jax.lax.pmin(limit_R, shards.axes) if shards.axes else limit_R
        next_R = jnp.searchsorted(ids_N, limit_R).astype(jnp.int32)
        index_RC = begin_R[:, None] + jnp.arange(capacity, dtype=jnp.int32)
        index_RC = jnp.where(index_RC < next_R[:, None], index_RC, count)
        asked_RC = shards.exchange(_take(ids_N, index_RC, shards.none))
        row_RC = jnp.where(asked_RC < shards.none, asked_RC - me * shards.share, shards.share)
        return jnp.any(limit_R < stop_R), next_R, visit(carry, index_RC, row_RC)

    with jax.named_scope("expected_trips_1"):  # for counts in compiled programs
        return jax.lax.while_loop(lambda state: state[0], one, (jnp.array(True), begin_R, carry))[2]
