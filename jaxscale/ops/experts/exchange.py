"""MoE all-to-alls: token rows to their experts and back.

Letters: as in `dispatch`; D features of the residual stream.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from jaxscale.ops.experts.dispatch import (
    Dispatch,
    DispatchPlan,
    exchange_parts,
    exclusive_sums,
    own_part,
    whole_tokens,
)


def take_rows(x: Array, index: Array) -> Array:
    """Rows by index; zeros for an index beyond the last."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def _ragged_offsets(dispatch: Dispatch, plan: DispatchPlan) -> tuple[Array, ...]:
    """Offsets and sizes for `ragged_all_to_all`, [experts * E] each: for the parts sent, their
    offset here, their size, and their offset at the receiver; the same for the parts returned."""
    assert plan.counts is not None
    counts_se, ranks = plan.counts[0], dispatch.experts  # e: all experts
    own, me = counts_se.shape[1] // ranks, dispatch.rank
    first_se = exclusive_sums(counts_se, axis=1)  # in the rows that s sends
    each_sre = counts_se.reshape(ranks, ranks, own)
    # Offsets at r: after the rows of r's earlier experts, and of earlier senders.
    arrived_sre = exclusive_sums(jnp.sum(each_sre, axis=0), axis=1) + exclusive_sums(
        each_sre, axis=0
    )
    to = first_se[me], counts_se[me], arrived_sre[me].reshape(-1)
    back = arrived_sre[:, me].reshape(-1), each_sre[:, me].reshape(-1)
    return *to, *back, first_se.reshape(ranks, ranks, own)[:, me].reshape(-1)


def num_rows(dispatch: Dispatch, plan: DispatchPlan) -> int:
    """The most rows that this rank's experts may receive."""
    dispatch, plan = _hops(dispatch, plan)[-1]
    if plan.counts is None or plan.sizes is None:
        return math.prod(plan.sent.shape[1:])
    tokens, choices = plan.slot[0, ..., 0].size, plan.slot.shape[-1]
    return dispatch.experts * tokens * min(choices, plan.sizes.shape[-1])


def _hops(dispatch: Dispatch, plan: DispatchPlan) -> list[tuple[Dispatch, DispatchPlan]]:
    """The exchanges of a dispatch, in order."""
    if plan.across is None:
        return [(dispatch, plan)]
    return list(zip(dispatch.levels, (plan.across, plan._replace(across=None)), strict=True))


def _ragged_send(dispatch: Dispatch, values: Array, plan: DispatchPlan) -> Array:
    first, size, arrived, _, received, _ = _ragged_offsets(dispatch, plan)
    output = jnp.zeros((num_rows(dispatch, plan), *values.shape[1:]), values.dtype)
    return jax.lax.ragged_all_to_all(
        values,
        output,
        first,
        size,
        arrived,
        received,
        axis_name="expert",
        axis_index_groups=dispatch.groups,
    )


def _ragged_return(
    dispatch: Dispatch, values: Array, plan: DispatchPlan, before: Array | None
) -> Array:
    _, received, _, arrived, size, first = _ragged_offsets(dispatch, plan)
    output = jnp.zeros((plan.sent.shape[1], *values.shape[1:]), values.dtype)
    if before is not None:
        # Zeros with a data dependence on `before`, since XLA removes optimization barriers before
        # it schedules.
        output = jnp.full_like(output, before.reshape(-1)[0] > jnp.inf)
    return jax.lax.ragged_all_to_all(
        values,
        output,
        arrived,
        size,
        first,
        received,
        axis_name="expert",
        axis_index_groups=dispatch.groups,
    )


def sent_rows(x: Array, plan: DispatchPlan) -> Array:
    """The send buffer, [S, ...], of an array with a row for each token, [N, ...]."""
    return take_rows(x, plan.sent[0] // plan.slot.shape[-1])


def rows_to_experts(dispatch: Dispatch, values: Array, plan: DispatchPlan) -> Array:
    """Sends values of the send buffer, [*S, ...], to rows in the order of the experts, [R, ...]."""
    if plan.counts is not None:
        return _ragged_send(dispatch, values, plan)
    dims = plan.sent.ndim - 1
    values = exchange_parts(dispatch, values)
    if plan.sizes is None:
        values = values.swapaxes(0, 1)
    values = values.reshape(-1, *values.shape[dims:])
    return values if plan.order is None else take_rows(values, plan.order[0])


def rows_from_experts(
    dispatch: Dispatch, values: Array, plan: DispatchPlan, before: Array | None = None
) -> Array:
    """The inverse of `rows_to_experts`, as [S, ...]; if ragged, it starts after `before`."""
    if plan.counts is not None:
        return _ragged_return(dispatch, values, plan, before)
    shape = plan.sent.shape[1:]
    if plan.place is not None:
        values = take_rows(values, plan.place[0])
    if plan.sizes is None:
        ranks, own, rows = shape
        values = values.reshape(own, ranks, rows, *values.shape[1:]).swapaxes(0, 1)
        values = values.reshape(-1, *values.shape[3:])
    values = exchange_parts(dispatch, values.reshape(shape[0], -1, *values.shape[1:]))
    return values.reshape(-1, *values.shape[2:])


def send_tokens(dispatch: Dispatch, x_BTD: Array, plan: DispatchPlan) -> Array:
    """Dispatches a rank's tokens [B, T, D]; returns the rows [R, D] of its experts."""
    x_BTD = whole_tokens(dispatch, x_BTD)
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    for level, one in _hops(dispatch, plan):
        x_ND = rows_to_experts(level, sent_rows(x_ND, one), one)
    return x_ND


def send_choices(dispatch: Dispatch, gates_BTK: Array, plan: DispatchPlan) -> Array:
    """Dispatches a number for each choice, [B, T, K]; returns those of the rows, [R]."""
    *before, (last, own) = _hops(dispatch, plan)
    gates_NK = whole_tokens(dispatch, gates_BTK).reshape(-1, gates_BTK.shape[-1])
    for level, one in before:
        gates_NK = rows_to_experts(level, sent_rows(gates_NK, one), one)
    return rows_to_experts(last, take_rows(gates_NK.reshape(-1), own.sent[0]), own)


def collect_choices(dispatch: Dispatch, gates_R: Array, plan: DispatchPlan) -> Array:
    """The inverse of `send_choices`: [B, T, K] of the numbers of rows."""
    *before, (last, own) = _hops(dispatch, plan)
    gates_BTK = take_rows(rows_from_experts(last, gates_R, own), own.slot[0])
    for level, one in before:
        rows_RK = gates_BTK.reshape(-1, gates_BTK.shape[-1])
        # Of a choice one node has a number, the others zeros.
        rows_BTMK = take_rows(rows_from_experts(level, rows_RK, one), one.slot[0])
        gates_BTK = jnp.sum(rows_BTMK, axis=-2)
    return own_part(dispatch, gates_BTK)


def collect_tokens(
    dispatch: Dispatch, rows_RD: Array, plan: DispatchPlan, before: Array | None = None
) -> Array:
    """Combines rows [R, D], partial sums over tensor, to the sum over each token's choices,
    [B, T, D]. `before` as in `rows_from_experts`."""
    x_BTD = rows_RD
    for level, one in reversed(_hops(dispatch, plan)):
        x_BTD = _sum_of_choices(level, x_BTD.reshape(-1, x_BTD.shape[-1]), one, before)
    if dispatch.axis("tensor") is None:
        return x_BTD
    return jax.lax.psum_scatter(x_BTD, "tensor", scatter_dimension=1, tiled=True)


def _sum_of_choices(
    dispatch: Dispatch, rows_RD: Array, plan: DispatchPlan, before: Array | None
) -> Array:
    rows_SD = rows_from_experts(dispatch, rows_RD, plan, before)
    wide = jnp.promote_types(rows_SD.dtype, jnp.float32)
    slot_BTK = plan.slot[0]
    parts = [take_rows(rows_SD, slot_BTK[..., k]).astype(wide) for k in range(slot_BTK.shape[-1])]
    return sum(parts[1:], parts[0]).astype(rows_RD.dtype)
