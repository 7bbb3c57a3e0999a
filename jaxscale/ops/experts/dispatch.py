"""Tokens to their experts and back, over the ranks that share the experts.

`plan_dispatch` says where each chosen token goes; `expert_columns` sends tokens and multiplies
them by their experts' matrices out of the residual stream; `expert_rows` multiplies by those back
into it, and returns each token the sum over its experts. Their backward passes are each other's
forward pass: what one sends the other collects.

Letters: B batch, T time, D features of the residual stream, F hidden features, K choices of a
token, E experts, N tokens of a rank, S rows of a send buffer, R rows of a receive buffer, in the
order of the experts; c ranks of context.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxscale.ops.context_attention import balanced_order
from jaxscale.ops.experts.grouped_matmul import grouped_matmul, grouped_weight_gradient


@dataclass(frozen=True)
class Dispatch:
    """How tokens and experts are spread over ranks; the defaults are one device with everything.

    The ranks of `expert`, whose axis is manual, have tokens and experts of their own, and exchange
    tokens. Those of `tensor` have the same tokens and experts, and some columns of each. Those of
    `context` have parts of each sequence, and all experts that their rank of expert has.
    """

    experts: int = 1  # ranks of each axis
    tensor: int = 1
    context: int = 1
    automatic: tuple[str, ...] = ()  # mesh axes that are still automatic
    matmul: str = "blocks"  # of `ops.experts.grouped_matmul`
    ragged: bool = False  # whether the back end can exchange parts of any size
    keeps_all: bool = False  # whether nothing is dropped, whatever the capacity: in evaluation

    @property
    def stream(self) -> PartitionSpec:
        """Of arrays [B, T, ...] between the layers."""
        time = tuple(
            axis for axis in ("context", "tensor") if self.automatic and getattr(self, axis) > 1
        )
        return PartitionSpec(None, time or None)

    @property
    def whole(self) -> PartitionSpec:
        """Of what every rank has whole."""
        return PartitionSpec()

    @property
    def rows(self) -> PartitionSpec:
        """Of arrays [c, R, ...] that the ranks of tensor have whole."""
        return PartitionSpec(self._axis("context"))

    @property
    def hidden(self) -> PartitionSpec:
        """Of arrays [c, R, F]."""
        return PartitionSpec(self._axis("context"), None, self._axis("tensor"))

    @property
    def columns(self) -> PartitionSpec:
        """Of weights [E, D, F]."""
        return PartitionSpec(None, None, self._axis("tensor"))

    @property
    def back(self) -> PartitionSpec:
        """Of weights [E, F, D]."""
        return PartitionSpec(None, self._axis("tensor"))

    def _axis(self, name: str) -> str | None:
        return name if name in self.automatic and getattr(self, name) > 1 else None

    def manual(self, function: Callable, in_specs: tuple, out_specs: PartitionSpec) -> Callable:
        """The function with every mesh axis manual."""
        if not self.automatic:
            return function
        return jax.shard_map(
            function,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.automatic),
            check_vma=False,
        )


ONE_DEVICE = Dispatch()


class DispatchPlan(NamedTuple):
    """Where each chosen token goes; [c, ...] each. An index of one beyond the last is nowhere.

    The send buffer has a part for each rank of expert: [experts, rows]; with a capacity each part
    has as many rows for each expert of that rank, [experts, E, rows]. Where parts may have any
    size, they follow one another without gaps: [rows].
    """

    sent: Array  # token * K + choice, in each row of the send buffer
    slot: Array  # [c, B, T, K]: the row of the send buffer that a token's choice is in
    order: Array | None  # [c, R]: the received row for each row in the order of the experts
    place: Array | None  # [c, S]: its inverse
    sizes: Array | None  # [c, E]: rows of each expert of this rank; None: all have equally many
    counts: Array | None = None  # [c, experts, all E]: rows that each rank sends, in any size


def capacity_of(factor: float, seq_len: int, choices: int, num_experts: int) -> int:
    """Rows of an expert for a sequence: `factor` times its even share, rounded up; 0: no limit."""
    return min(math.ceil(factor * seq_len * choices / num_experts), seq_len)


def plan_dispatch(
    dispatch: Dispatch, experts_BTK: Array, num_experts: int, capacity: int = 0
) -> DispatchPlan:
    """Where the tokens go.

    Args:
      experts_BTK: the experts of each token, different ones; -1 for none.
      capacity: tokens that an expert takes of each sequence, in the order of the text; the others
        are dropped. 0 drops none.
    """

    def local(experts_BTK: Array) -> DispatchPlan:
        experts_BTK = _whole(dispatch, experts_BTK)
        if capacity:
            found = _plan_with_capacity(dispatch, experts_BTK, num_experts, capacity)
        else:
            found = _plan_of_all(dispatch, experts_BTK, num_experts)
        return jax.tree.map(lambda x: x[None], found)

    return dispatch.manual(local, (dispatch.stream,), dispatch.rows)(experts_BTK)


def over_sequences(dispatch: Dispatch, function: Callable[[Array], Array], x_BTE: Array) -> Array:
    """`function` of whole sequences in the order of the text, which keeps their shape."""

    def local(x_BTE: Array) -> Array:
        whole_BTE = function(_in_text_order(dispatch, _whole(dispatch, x_BTE)))
        return _own_part(dispatch, _own_tokens(dispatch, whole_BTE))

    return dispatch.manual(local, (dispatch.stream,), dispatch.stream)(x_BTE)


def num_kept(plan: DispatchPlan) -> Array:
    """How many choices of tokens reach their expert, int32."""
    size = math.prod(plan.sent.shape[1:])
    return jnp.sum(plan.slot < size, dtype=jnp.int32)


def _plan_with_capacity(
    dispatch: Dispatch, experts_BTK: Array, num_experts: int, capacity: int
) -> DispatchPlan:
    """Every rank sends `capacity` rows of each sequence to each expert, empty ones too."""
    rows = experts_BTK.shape[0]
    place = functools.partial(_place_in_queue, num_experts=num_experts)
    place_BTK = _own_tokens(dispatch, jax.vmap(place)(_in_text_order(dispatch, experts_BTK)))
    slot_BTK = (experts_BTK * rows + jnp.arange(rows)[:, None, None]) * capacity + place_BTK
    size = num_experts * rows * capacity
    slot_BTK = jnp.where((experts_BTK >= 0) & (place_BTK < capacity), slot_BTK, size)
    sent = _inverse(slot_BTK, size).reshape(dispatch.experts, -1, rows * capacity)
    return DispatchPlan(sent, slot_BTK, None, None, None)


def _plan_of_all(dispatch: Dispatch, experts_BTK: Array, num_experts: int) -> DispatchPlan:
    """Every rank sends to each as many rows as that rank's experts could be chosen by all of its
    tokens, empty ones too; or just those that there are, where the back end can."""
    ranks, (rows, time, choices) = dispatch.experts, experts_BTK.shape
    own = num_experts // ranks
    width = rows * time * min(choices, own)
    counts_E = jnp.sum(
        experts_BTK[..., None] == jnp.arange(num_experts), axis=(0, 1, 2), dtype=jnp.int32
    )
    if dispatch.ragged and ranks > 1:
        return _ragged_plan(experts_BTK, counts_E, ranks)
    starts_E = _before(counts_E.reshape(ranks, own), axis=1).reshape(-1)
    place_BTK = _place_in_queue(experts_BTK, num_experts)
    slot_BTK = experts_BTK // own * width + starts_E[experts_BTK] + place_BTK
    slot_BTK = jnp.where(experts_BTK >= 0, slot_BTK, ranks * width)
    sent = _inverse(slot_BTK, ranks * width).reshape(ranks, width)
    if ranks == 1:
        return DispatchPlan(sent, slot_BTK, None, None, counts_E)
    # What arrives is in the order of the ranks, and of each rank in that of this rank's experts.
    counts_se = _exchange(dispatch, counts_E.reshape(ranks, own))
    sizes_E = jnp.sum(counts_se, axis=0)
    first_se = _before(sizes_E, axis=0) + _before(counts_se, axis=0)
    row_w = jnp.arange(width)

    def places(first_e: Array, counts_e: Array) -> Array:
        ends_e = jnp.cumsum(counts_e)
        expert_w = jnp.minimum(jnp.searchsorted(ends_e, row_w, side="right"), own - 1)
        place_w = first_e[expert_w] + row_w - (ends_e - counts_e)[expert_w]
        return jnp.where(row_w < ends_e[-1], place_w, ranks * width)

    place_S = jax.vmap(places)(first_se, counts_se).reshape(-1)
    return DispatchPlan(sent, slot_BTK, _inverse(place_S, ranks * width), place_S, sizes_E)


def _ragged_plan(experts_BTK: Array, counts_E: Array, ranks: int) -> DispatchPlan:
    """Rows are sent in the order of their experts, and arrive in it."""
    slot_BTK = _before(counts_E, axis=0)[experts_BTK] + _place_in_queue(experts_BTK, len(counts_E))
    slot_BTK = jnp.where(experts_BTK >= 0, slot_BTK, experts_BTK.size)
    sent = _inverse(slot_BTK, experts_BTK.size)
    counts = jax.lax.all_gather(counts_E, "expert")
    own = len(counts_E) // ranks
    mine = jax.lax.axis_index("expert") * own
    sizes_E = jax.lax.dynamic_slice_in_dim(jnp.sum(counts, axis=0), mine, own)
    return DispatchPlan(sent, slot_BTK, None, None, sizes_E, counts)


def _place_in_queue(experts_TK: Array, num_experts: int) -> Array:
    """How many choices of the same expert come before each one, in the order of the tokens."""
    experts = jnp.where(experts_TK < 0, num_experts, experts_TK).reshape(-1)
    order = jnp.argsort(experts, stable=True)
    first = jnp.searchsorted(experts[order], jnp.arange(num_experts + 1), side="left")
    place = jnp.arange(experts.size) - first[experts[order]]
    return jnp.zeros_like(place).at[order].set(place).reshape(experts_TK.shape).astype(jnp.int32)


def _before(x: Array, axis: int) -> Array:
    """Sums of what comes before."""
    return jnp.cumsum(x, axis=axis) - x


def _inverse(index: Array, size: int) -> Array:
    """[size]: where `index` has each number below `size`; its length where it has not."""
    empty = jnp.full(size, index.size, jnp.int32)
    numbers = jnp.arange(index.size, dtype=jnp.int32)
    return empty.at[index.reshape(-1)].set(numbers, mode="drop")


def _whole(dispatch: Dispatch, x_BT: Array) -> Array:
    """All tokens of this rank of context, of which each rank of tensor has a part."""
    if dispatch._axis("tensor") is None:
        return x_BT
    return jax.lax.all_gather(x_BT, "tensor", axis=1, tiled=True)


def _own_part(dispatch: Dispatch, x_BT: Array) -> Array:
    """The inverse of `_whole`."""
    if dispatch._axis("tensor") is None:
        return x_BT
    part = x_BT.shape[1] // dispatch.tensor
    first = jax.lax.axis_index("tensor") * part
    return jax.lax.dynamic_slice_in_dim(x_BT, first, part, axis=1)


def _in_text_order(dispatch: Dispatch, x_BT: Array) -> Array:
    """All tokens of a sequence, of which each rank of context has a part."""
    if dispatch.context == 1:
        return x_BT
    x_BT = jax.lax.all_gather(x_BT, "context", axis=1, tiled=True)
    order = balanced_order(x_BT.shape[1], dispatch.context)
    return x_BT[:, jnp.argsort(jnp.asarray(order))]


def _own_tokens(dispatch: Dispatch, x_BT: Array) -> Array:
    """This rank's part of what is in the order of the text."""
    if dispatch.context == 1:
        return x_BT
    order = jnp.asarray(balanced_order(x_BT.shape[1], dispatch.context))
    own = order.reshape(dispatch.context, -1)[jax.lax.axis_index("context")]
    return x_BT[:, own]


# Rows that travel.


def _exchange(dispatch: Dispatch, parts: Array) -> Array:
    """[experts, ...]: a part for each rank of expert, to those ranks; its own inverse."""
    if dispatch.experts == 1:
        return parts
    return jax.lax.all_to_all(parts, "expert", 0, 0, tiled=True)


def _take(x: Array, index: Array) -> Array:
    """Rows, zeros for an index beyond the last."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def _ragged_offsets(dispatch: Dispatch, plan: DispatchPlan) -> tuple[Array, ...]:
    """Of the parts that this rank exchanges with each other rank's experts, [experts * E] each:
    where they are in its own rows and how many they are, and where they begin on the other rank;
    and the same for the parts that the others have of its experts."""
    assert plan.counts is not None
    counts_se, ranks = plan.counts[0], dispatch.experts  # e: all experts
    own, me = counts_se.shape[1] // ranks, jax.lax.axis_index("expert")
    first_se = _before(counts_se, axis=1)  # in the rows that s sends
    each_sre = counts_se.reshape(ranks, ranks, own)
    # In the rows that arrive at r: after those of r's earlier experts, and of earlier senders.
    arrived_sre = _before(jnp.sum(each_sre, axis=0), axis=1) + _before(each_sre, axis=0)
    to = first_se[me], counts_se[me], arrived_sre[me].reshape(-1)
    back = arrived_sre[:, me].reshape(-1), each_sre[:, me].reshape(-1)
    return *to, *back, first_se.reshape(ranks, ranks, own)[:, me].reshape(-1)


def _num_rows(dispatch: Dispatch, plan: DispatchPlan) -> int:
    """Rows that may arrive at this rank's experts."""
    if plan.counts is None or plan.sizes is None:
        return math.prod(plan.sent.shape[1:])
    tokens, choices = plan.slot[0, ..., 0].size, plan.slot.shape[-1]
    return dispatch.experts * tokens * min(choices, plan.sizes.shape[-1])


def _ragged_travel(dispatch: Dispatch, values: Array, plan: DispatchPlan) -> Array:
    first, size, arrived, _, received, _ = _ragged_offsets(dispatch, plan)
    output = jnp.zeros((_num_rows(dispatch, plan), *values.shape[1:]), values.dtype)
    return jax.lax.ragged_all_to_all(
        values, output, first, size, arrived, received, axis_name="expert"
    )


def _ragged_return(dispatch: Dispatch, values: Array, plan: DispatchPlan) -> Array:
    _, received, _, arrived, size, first = _ragged_offsets(dispatch, plan)
    output = jnp.zeros((plan.sent.shape[1], *values.shape[1:]), values.dtype)
    return jax.lax.ragged_all_to_all(
        values, output, arrived, size, first, received, axis_name="expert"
    )


def _travel(dispatch: Dispatch, values: Array, plan: DispatchPlan) -> Array:
    """What belongs to the rows of the send buffer, [*S, ...], to the rows in the order of the
    experts, [R, ...]."""
    if plan.counts is not None:
        return _ragged_travel(dispatch, values, plan)
    dims = plan.sent.ndim - 1
    values = _exchange(dispatch, values)
    if plan.sizes is None:
        values = values.swapaxes(0, 1)
    values = values.reshape(-1, *values.shape[dims:])
    return values if plan.order is None else _take(values, plan.order[0])


def _return(dispatch: Dispatch, values: Array, plan: DispatchPlan) -> Array:
    """The inverse of `_travel`, as [S, ...]."""
    if plan.counts is not None:
        return _ragged_return(dispatch, values, plan)
    shape = plan.sent.shape[1:]
    if plan.place is not None:
        values = _take(values, plan.place[0])
    if plan.sizes is None:
        ranks, own, rows = shape
        values = values.reshape(own, ranks, rows, *values.shape[1:]).swapaxes(0, 1)
        values = values.reshape(-1, *values.shape[3:])
    values = _exchange(dispatch, values.reshape(shape[0], -1, *values.shape[1:]))
    return values.reshape(-1, *values.shape[2:])


def _send(dispatch: Dispatch, x_BTD: Array, plan: DispatchPlan) -> Array:
    """[B, T, D] of a rank to [R, D] of the experts that it has."""
    x_BTD = _whole(dispatch, x_BTD)
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    return _travel(dispatch, _take(x_ND, plan.sent[0] // plan.slot.shape[-1]), plan)


def _collect(dispatch: Dispatch, rows_RD: Array, plan: DispatchPlan) -> Array:
    """[R, D], parts of a sum over the ranks of tensor, to the sum over its choices of each token,
    [B, T, D]."""
    rows_SD = _return(dispatch, rows_RD, plan)
    wide = jnp.promote_types(rows_SD.dtype, jnp.float32)
    slot_BTK = plan.slot[0]
    parts = [_take(rows_SD, slot_BTK[..., k]).astype(wide) for k in range(slot_BTK.shape[-1])]
    x_BTD = sum(parts[1:], parts[0]).astype(rows_RD.dtype)
    if dispatch._axis("tensor") is None:
        return x_BTD
    return jax.lax.psum_scatter(x_BTD, "tensor", scatter_dimension=1, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def send_gates(dispatch: Dispatch, gates_BTK: Array, plan: DispatchPlan) -> Array:
    """The gate of each row, [c, R]."""

    def local(gates_BTK: Array, plan: DispatchPlan) -> Array:
        gates = _take(_whole(dispatch, gates_BTK).reshape(-1), plan.sent[0])
        return _travel(dispatch, gates, plan)[None]

    specs = (dispatch.stream, dispatch.rows)
    return dispatch.manual(local, specs, dispatch.rows)(gates_BTK, plan)


def _send_gates_forward(dispatch: Dispatch, gates_BTK: Array, plan: DispatchPlan):
    return send_gates(dispatch, gates_BTK, plan), plan


def _send_gates_backward(dispatch: Dispatch, plan: DispatchPlan, dgates_cR: Array):
    def local(dgates_cR: Array, plan: DispatchPlan) -> Array:
        gates_BTK = _take(_return(dispatch, dgates_cR[0], plan), plan.slot[0])
        return _own_part(dispatch, gates_BTK)

    specs = (dispatch.rows, dispatch.rows)
    return dispatch.manual(local, specs, dispatch.stream)(dgates_cR, plan), None


send_gates.defvjp(_send_gates_forward, _send_gates_backward)


# Matmuls of the rows that arrived.


def expert_columns(
    dispatch: Dispatch, x_BTD: Array, weights: Sequence[Array], plan: DispatchPlan
) -> tuple[Array, ...]:
    """Tokens to their experts, and through their matrices out of the residual stream:
    [B, T, D] x [E, D, F] -> [c, R, F] for each weight. The rows that arrived are kept for the
    backward pass."""
    return _expert_columns(dispatch, x_BTD, tuple(weights), plan)


def expert_bias(dispatch: Dispatch, bias_EF: Array, plan: DispatchPlan) -> Array:
    """The bias of each row's expert, [c, R, F]."""
    return _expert_bias(dispatch, bias_EF[:, None], plan)


def expert_rows(
    dispatch: Dispatch,
    hidden_cRF: Array,
    w_EFD: Array,
    plan: DispatchPlan,
    bias_ED: Array | None = None,
    gates_cR: Array | None = None,
) -> Array:
    """Back into the residual stream, and back to the tokens: [c, R, F] x [E, F, D] -> [B, T, D],
    summed over a token's experts; with `bias_ED` each of them adds its bias times its gate."""
    hidden, weights = (hidden_cRF,), (w_EFD,)
    if bias_ED is not None and gates_cR is not None:
        # As a further feature of each rank of tensor, which has its share of the gate there.
        shares = dispatch.tensor
        gates_cR1 = (gates_cR / shares)[..., None].astype(hidden_cRF.dtype)
        hidden += (jnp.broadcast_to(gates_cR1, (*gates_cR.shape, shares)),)
        weights += (jnp.broadcast_to(bias_ED[:, None], (len(bias_ED), shares, bias_ED.shape[1])),)
    return _expert_rows(dispatch, hidden, weights, plan)


def _matmul(
    dispatch: Dispatch, x_RD: Array, w: Array, plan: DispatchPlan, transposed: bool
) -> Array:
    """Each row by the matrix of its expert, or by that matrix transposed."""
    if plan.sizes is not None:
        sizes_E = plan.sizes[0]
        return grouped_matmul(
            x_RD,
            w,
            sizes_E,
            dispatch.matmul,
            expected=plan.slot[0].size,
            transposed=transposed,
        )
    x_ErD = x_RD.reshape(w.shape[0], -1, x_RD.shape[-1])
    contracted = (2,), (2 if transposed else 1,)
    y_ErF = jax.lax.dot_general(x_ErD, w, (contracted, ((0,), (0,))))
    return y_ErF.reshape(-1, y_ErF.shape[-1])


def _weight_gradient(dispatch: Dispatch, x_RD: Array, dy_RF: Array, plan: DispatchPlan) -> Array:
    """[E, D, F], summed over the rows of each expert on every rank of context."""
    if plan.sizes is not None:
        dw_EDF = grouped_weight_gradient(
            x_RD, dy_RF, plan.sizes[0], dispatch.matmul, expected=plan.slot[0].size
        )
    else:
        own = plan.sent.shape[2]
        x_ErD, dy_ErF = (y.reshape(own, -1, y.shape[-1]) for y in (x_RD, dy_RF))
        dw_EDF = jax.lax.dot_general(x_ErD, dy_ErF, (((1,), (1,)), ((0,), (0,))))
    return jax.lax.psum(dw_EDF, "context") if dispatch._axis("context") else dw_EDF


def _sent(dispatch: Dispatch, x_BTD: Array, plan: DispatchPlan) -> Array:
    """Tokens in the order of the experts, [c, R, D]."""

    def local(x_BTD: Array, plan: DispatchPlan) -> Array:
        return _send(dispatch, x_BTD, plan)[None]

    return dispatch.manual(local, (dispatch.stream, dispatch.rows), dispatch.rows)(x_BTD, plan)


def _collected(
    dispatch: Dispatch,
    hidden: Sequence[Array],
    weights: Sequence[Array],
    plan: DispatchPlan,
    transposed: bool,
) -> Array:
    """The sum of matmuls [c, R, F] x weight, back at the tokens, [B, T, D]."""

    def local(hidden: Sequence[Array], weights: Sequence[Array], plan: DispatchPlan) -> Array:
        products = [
            _matmul(dispatch, x_cRF[0], w, plan, transposed) for x_cRF, w in zip(hidden, weights)
        ]
        return _collect(dispatch, sum(products[1:], products[0]), plan)

    of_weights = dispatch.columns if transposed else dispatch.back
    specs = (dispatch.hidden, of_weights, dispatch.rows)
    return dispatch.manual(local, specs, dispatch.stream)(tuple(hidden), tuple(weights), plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expert_columns(dispatch: Dispatch, x_BTD: Array, weights: tuple, plan: DispatchPlan):
    return _columns_forward(dispatch, x_BTD, weights, plan)[0]


def _columns_forward(dispatch: Dispatch, x_BTD: Array, weights: tuple, plan: DispatchPlan):
    rows_cRD = _sent(dispatch, x_BTD, plan)

    def local(rows_cRD: Array, weights: tuple, plan: DispatchPlan) -> tuple[Array, ...]:
        return tuple(_matmul(dispatch, rows_cRD[0], w, plan, False)[None] for w in weights)

    specs = (dispatch.rows, dispatch.columns, dispatch.rows)
    hidden = dispatch.manual(local, specs, dispatch.hidden)(rows_cRD, weights, plan)
    return hidden, (rows_cRD, weights, plan)


def _columns_backward(dispatch: Dispatch, residuals, dhidden: tuple):
    rows_cRD, weights, plan = residuals
    dx_BTD = _collected(dispatch, dhidden, weights, plan, transposed=True)

    def local(rows_cRD: Array, dhidden: tuple, plan: DispatchPlan) -> tuple[Array, ...]:
        rows_RD = rows_cRD[0]
        return tuple(_weight_gradient(dispatch, rows_RD, dy_cRF[0], plan) for dy_cRF in dhidden)

    specs = (dispatch.rows, dispatch.hidden, dispatch.rows)
    dweights = dispatch.manual(local, specs, dispatch.columns)(rows_cRD, dhidden, plan)
    return dx_BTD, dweights, None


_expert_columns.defvjp(_columns_forward, _columns_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expert_bias(dispatch: Dispatch, bias_E1F: Array, plan: DispatchPlan) -> Array:
    def local(bias_E1F: Array, plan: DispatchPlan) -> Array:
        return _matmul(dispatch, _ones(dispatch, plan, bias_E1F.dtype), bias_E1F, plan, False)[None]

    specs = (dispatch.columns, dispatch.rows)
    return dispatch.manual(local, specs, dispatch.hidden)(bias_E1F, plan)


def _bias_forward(dispatch: Dispatch, bias_E1F: Array, plan: DispatchPlan):
    return _expert_bias(dispatch, bias_E1F, plan), plan


def _bias_backward(dispatch: Dispatch, plan: DispatchPlan, dy_cRF: Array):
    def local(dy_cRF: Array, plan: DispatchPlan) -> Array:
        return _weight_gradient(dispatch, _ones(dispatch, plan, dy_cRF.dtype), dy_cRF[0], plan)

    specs = (dispatch.hidden, dispatch.rows)
    return dispatch.manual(local, specs, dispatch.columns)(dy_cRF, plan), None


_expert_bias.defvjp(_bias_forward, _bias_backward)


def _ones(dispatch: Dispatch, plan: DispatchPlan, dtype: DTypeLike) -> Array:
    """A feature that is one in every row, [R, 1]."""
    return jnp.ones((_num_rows(dispatch, plan), 1), dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expert_rows(dispatch: Dispatch, hidden: tuple, weights: tuple, plan: DispatchPlan) -> Array:
    return _collected(dispatch, hidden, weights, plan, transposed=False)


def _rows_forward(dispatch: Dispatch, hidden: tuple, weights: tuple, plan: DispatchPlan):
    return _expert_rows(dispatch, hidden, weights, plan), (hidden, weights, plan)


def _rows_backward(dispatch: Dispatch, residuals, dy_BTD: Array):
    hidden, weights, plan = residuals
    dy_cRD = _sent(dispatch, dy_BTD, plan)

    def into_hidden(dy_cRD: Array, weights: tuple, plan: DispatchPlan) -> tuple[Array, ...]:
        return tuple(_matmul(dispatch, dy_cRD[0], w, plan, True)[None] for w in weights)

    def into_weights(hidden: tuple, dy_cRD: Array, plan: DispatchPlan) -> tuple[Array, ...]:
        return tuple(_weight_gradient(dispatch, x_cRF[0], dy_cRD[0], plan) for x_cRF in hidden)

    rows, columns, back = dispatch.rows, dispatch.hidden, dispatch.back
    dhidden = dispatch.manual(into_hidden, (rows, back, rows), columns)(dy_cRD, weights, plan)
    dweights = dispatch.manual(into_weights, (columns, rows, rows), back)(hidden, dy_cRD, plan)
    return dhidden, dweights, None


_expert_rows.defvjp(_rows_forward, _rows_backward)
