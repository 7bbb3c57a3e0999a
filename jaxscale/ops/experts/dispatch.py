"""MoE dispatch plans: the rank and the buffer row of each token's experts.

Letters: B batch, T time, K choices of a token, E experts, N tokens of a rank, S rows of a send
buffer, R rows of a receive buffer, in the order of the experts; c ranks of context.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxscale.ops.attention.context_chunks import balanced_order
from jaxscale.sharding.specs import manually


@dataclass(frozen=True)
class Dispatch:
    """Sharding of tokens and experts over ranks; the default is one device.

    Ranks of `expert` (a manual axis) have different tokens and experts, and exchange tokens by
    all-to-all. Ranks of `tensor` have the same tokens and experts, with some columns of each. Ranks
    of `context` have parts of each sequence, and all experts of their rank of expert.
    """

    experts: int = 1  # ranks of each axis
    tensor: int = 1
    context: int = 1
    automatic: tuple[str, ...] = ()  # automatic mesh axes
    matmul: str = "blocks"  # of `ops.experts.grouped_matmul`
    ragged: bool = False  # whether the back end supports ragged_all_to_all
    keeps_all: bool = False  # whether the capacity is ignored, as in evaluation
    dtype: str = ""  # `model.matmul_dtype`
    halves: bool = False  # whether the halves of a rank's sequences are dispatched separately
    # Whether experts are gathered before their tokens are dispatched, and the gradient of the
    # matrices back is computed before that of their input.
    weights_first: bool = False
    nodes: int = 1  # of the ranks of expert; several exchange in two levels
    groups: tuple[tuple[int, ...], ...] | None = None  # of ranks in a level; None: all together

    @property
    def levels(self) -> tuple["Dispatch", "Dispatch"]:
        """The exchange between the nodes, and that inside each; consecutive ranks of expert are in
        the same node."""
        size = self.experts // self.nodes
        inside = tuple(tuple(range(n, n + size)) for n in range(0, self.experts, size))
        across = tuple(zip(*inside, strict=True))
        pairs = (self.nodes, across), (size, inside)
        first, second = (replace(self, experts=n, nodes=1, groups=one) for n, one in pairs)
        return first, second

    @property
    def rank(self) -> Array:
        """The number of this rank in its group of an exchange."""
        me = jax.lax.axis_index("expert")
        if self.groups is None:
            return me
        numbers = {rank: n for group in self.groups for n, rank in enumerate(group)}
        return jnp.asarray([numbers[rank] for rank in range(len(numbers))])[me]

    def parts(self, x: Array) -> tuple[Array, ...]:
        """Splits an array of sequences, [B, ...], into the parts that are dispatched separately."""
        if not self.halves:
            return (x,)
        middle = len(x) // 2
        return x[:middle], x[middle:]

    @property
    def stream(self) -> PartitionSpec:
        """The spec of arrays [B, T, ...] between the layers."""
        time = tuple(
            axis for axis in ("context", "tensor") if self.automatic and getattr(self, axis) > 1
        )
        return PartitionSpec(None, time or None)

    @property
    def whole(self) -> PartitionSpec:
        """The spec of replicated arrays."""
        return PartitionSpec()

    @property
    def rows(self) -> PartitionSpec:
        """The spec of arrays [c, R, ...], replicated over tensor."""
        return PartitionSpec(self.axis("context"))

    @property
    def hidden(self) -> PartitionSpec:
        """The spec of arrays [c, R, F]."""
        return PartitionSpec(self.axis("context"), None, self.axis("tensor"))

    @property
    def columns(self) -> PartitionSpec:
        """The spec of weights [E, D, F]."""
        return PartitionSpec(None, None, self.axis("tensor"))

    @property
    def back(self) -> PartitionSpec:
        """The spec of weights [E, F, D]."""
        return PartitionSpec(None, self.axis("tensor"))

    def axis(self, name: str) -> str | None:
        """The name of an axis if it is automatic and has several ranks, else None."""
        return name if name in self.automatic and getattr(self, name) > 1 else None

    def manual(self, function: Callable, in_specs: tuple, out_specs: PartitionSpec) -> Callable:
        """The function with every mesh axis manual."""
        if not self.automatic:
            return function
        return manually(function, self.automatic, in_specs, out_specs)


ONE_DEVICE = Dispatch()


class DispatchPlan(NamedTuple):
    """Dispatch indices, [c, ...] each; an index one beyond the last marks a dropped choice or an
    empty row.

    The send buffer has a part for each rank of expert: [experts, rows]; with a capacity each part
    has equally many rows for each expert of that rank, [experts, E, rows]. Ragged parts follow one
    another without gaps: [rows].
    """

    sent: Array  # token * K + choice, in each row of the send buffer
    slot: Array  # [c, B, T, K]: the row of the send buffer with a token's choice
    order: Array | None  # [c, R]: the received row for each row in the order of the experts
    place: Array | None  # [c, S]: the inverse of `order`
    sizes: Array | None  # [c, E]: rows of each expert of this rank; None: equally many
    counts: Array | None = None  # [c, experts, all E]: rows that each rank sends, if ragged
    # The plan of the exchange between nodes, [c, B, T, M] its slots; this plan is then of the rows
    # that arrived, as one sequence.
    across: "DispatchPlan | None" = None

    @property
    def num_choices(self) -> int:
        """The choices of a rank's tokens, dropped ones included: K N."""
        first = self if self.across is None else self.across
        return self.slot.shape[-1] * math.prod(first.slot.shape[1:-1])


def capacity_of(factor: float, seq_len: int, choices: int, num_experts: int) -> int:
    """Expert capacity per sequence: `factor` times the even share, rounded up; 0 is no limit."""
    return min(math.ceil(factor * seq_len * choices / num_experts), seq_len)


def over_sequences(dispatch: Dispatch, function: Callable[[Array], Array], x_BTE: Array) -> Array:
    """Applies a shape-preserving function to whole sequences in text order."""

    def local(x_BTE: Array) -> Array:
        whole_BTE = function(_in_text_order(dispatch, whole_tokens(dispatch, x_BTE)))
        return own_part(dispatch, _own_tokens(dispatch, whole_BTE))

    return dispatch.manual(local, (dispatch.stream,), dispatch.stream)(x_BTE)


def num_kept(plan: DispatchPlan) -> Array:
    """The number of choices that are not dropped, int32."""
    size = math.prod(plan.sent.shape[1:])
    return jnp.sum(plan.slot < size, dtype=jnp.int32)


def plan_with_capacity(
    dispatch: Dispatch, experts_BTK: Array, num_experts: int, capacity: int
) -> DispatchPlan:
    """Every rank sends `capacity` rows per sequence to each expert, empty rows included."""
    rows = experts_BTK.shape[0]
    place = functools.partial(_place_in_queue, num_experts=num_experts)
    place_BTK = _own_tokens(dispatch, jax.vmap(place)(_in_text_order(dispatch, experts_BTK)))
    slot_BTK = (experts_BTK * rows + jnp.arange(rows)[:, None, None]) * capacity + place_BTK
    size = num_experts * rows * capacity
    slot_BTK = jnp.where((experts_BTK >= 0) & (place_BTK < capacity), slot_BTK, size)
    sent = _inverse(slot_BTK, size).reshape(dispatch.experts, -1, rows * capacity)
    return DispatchPlan(sent, slot_BTK, None, None, None)


def plan_of_all(dispatch: Dispatch, experts_BTK: Array, num_experts: int) -> DispatchPlan:
    """Dropless dispatch: every rank sends to each rank the most rows that its tokens could need
    there, empty rows included; or only used rows if the back end supports ragged exchanges."""
    ranks, (rows, time, choices) = dispatch.experts, experts_BTK.shape
    own = num_experts // ranks
    width = rows * time * min(choices, own)
    counts_E = jnp.sum(
        experts_BTK[..., None] == jnp.arange(num_experts), axis=(0, 1, 2), dtype=jnp.int32
    )
    if dispatch.ragged and ranks > 1:
        return _ragged_plan(dispatch, experts_BTK, counts_E)
    starts_E = exclusive_sums(counts_E.reshape(ranks, own), axis=1).reshape(-1)
    place_BTK = _place_in_queue(experts_BTK, num_experts)
    slot_BTK = experts_BTK // own * width + starts_E[experts_BTK] + place_BTK
    slot_BTK = jnp.where(experts_BTK >= 0, slot_BTK, ranks * width)
    sent = _inverse(slot_BTK, ranks * width).reshape(ranks, width)
    if ranks == 1:
        return DispatchPlan(sent, slot_BTK, None, None, counts_E)
    # Received rows are ordered by sending rank, then by this rank's experts.
    counts_se = exchange_parts(dispatch, counts_E.reshape(ranks, own))
    sizes_E = jnp.sum(counts_se, axis=0)
    first_se = exclusive_sums(sizes_E, axis=0) + exclusive_sums(counts_se, axis=0)
    row_w = jnp.arange(width)

    def places(first_e: Array, counts_e: Array) -> Array:
        ends_e = jnp.cumsum(counts_e)
        expert_w = jnp.minimum(jnp.searchsorted(ends_e, row_w, side="right"), own - 1)
        place_w = first_e[expert_w] + row_w - (ends_e - counts_e)[expert_w]
        return jnp.where(row_w < ends_e[-1], place_w, ranks * width)

    place_S = jax.vmap(places)(first_se, counts_se).reshape(-1)
    return DispatchPlan(sent, slot_BTK, _inverse(place_S, ranks * width), place_S, sizes_E)


def _ragged_plan(dispatch: Dispatch, experts_BTK: Array, counts_E: Array) -> DispatchPlan:
    """Ragged dispatch: rows are sent, and received, in the order of their experts."""
    ranks = dispatch.experts
    slot_BTK = exclusive_sums(counts_E, axis=0)[experts_BTK] + _place_in_queue(
        experts_BTK, len(counts_E)
    )
    slot_BTK = jnp.where(experts_BTK >= 0, slot_BTK, experts_BTK.size)
    sent = _inverse(slot_BTK, experts_BTK.size)
    counts = jax.lax.all_gather(counts_E, "expert", axis_index_groups=dispatch.groups)
    own = len(counts_E) // ranks
    mine = dispatch.rank * own
    sizes_E = jax.lax.dynamic_slice_in_dim(jnp.sum(counts, axis=0), mine, own)
    return DispatchPlan(sent, slot_BTK, None, None, sizes_E, counts)


def _place_in_queue(experts_TK: Array, num_experts: int) -> Array:
    """The number of earlier choices of the same expert, in the order of the tokens."""
    experts = jnp.where(experts_TK < 0, num_experts, experts_TK).reshape(-1)
    order = jnp.argsort(experts, stable=True)
    first = jnp.searchsorted(experts[order], jnp.arange(num_experts + 1), side="left")
    place = jnp.arange(experts.size) - first[experts[order]]
    return jnp.zeros_like(place).at[order].set(place).reshape(experts_TK.shape).astype(jnp.int32)


def exclusive_sums(x: Array, axis: int) -> Array:
    """Exclusive cumulative sums along an axis."""
    return jnp.cumsum(x, axis=axis) - x


def _inverse(index: Array, size: int) -> Array:
    """[size]: the position in `index` of each number below `size`; its length if absent."""
    empty = jnp.full(size, index.size, jnp.int32)
    numbers = jnp.arange(index.size, dtype=jnp.int32)
    return empty.at[index.reshape(-1)].set(numbers, mode="drop")


def whole_tokens(dispatch: Dispatch, x_BT: Array) -> Array:
    """All-gathers over tensor the tokens of this rank of context."""
    if dispatch.axis("tensor") is None:
        return x_BT
    return jax.lax.all_gather(x_BT, "tensor", axis=1, tiled=True)


def own_part(dispatch: Dispatch, x_BT: Array) -> Array:
    """The inverse of `whole_tokens`."""
    if dispatch.axis("tensor") is None:
        return x_BT
    part = x_BT.shape[1] // dispatch.tensor
    first = jax.lax.axis_index("tensor") * part
    return jax.lax.dynamic_slice_in_dim(x_BT, first, part, axis=1)


def _in_text_order(dispatch: Dispatch, x_BT: Array) -> Array:
    """All-gathers a sequence over context, into text order."""
    if dispatch.context == 1:
        return x_BT
    x_BT = jax.lax.all_gather(x_BT, "context", axis=1, tiled=True)
    order = balanced_order(x_BT.shape[1], dispatch.context)
    return x_BT[:, jnp.argsort(jnp.asarray(order))]


def _own_tokens(dispatch: Dispatch, x_BT: Array) -> Array:
    """This rank of context's part of an array in text order."""
    if dispatch.context == 1:
        return x_BT
    order = jnp.asarray(balanced_order(x_BT.shape[1], dispatch.context))
    own = order.reshape(dispatch.context, -1)[jax.lax.axis_index("context")]
    return x_BT[:, own]


def exchange_parts(dispatch: Dispatch, parts: Array) -> Array:
    """All-to-all of [experts, ...], a part for each rank of expert; its own inverse."""
    if dispatch.experts == 1:
        return parts
    return jax.lax.all_to_all(parts, "expert", 0, 0, axis_index_groups=dispatch.groups, tiled=True)
