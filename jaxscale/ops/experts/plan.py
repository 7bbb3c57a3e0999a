"""The plan of an MoE layer's exchange: in one level, or in two, over nodes and inside each.

In two levels (DeepSeek-V3, arXiv 2412.19437, section 3.2.2) a token crosses the network once to
each node that has some of its experts: to the rank with the sender's number, which sends copies to
the ranks of the experts over the links inside the node. On the way back that rank adds the copies
up, so that a node returns one row. The first exchange is planned with nodes in place of experts.

Letters: as in `dispatch`; M nodes of a token.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jaxscale.ops.experts.dispatch import (
    Dispatch,
    DispatchPlan,
    plan_of_all,
    plan_with_capacity,
    whole_tokens,
)
from jaxscale.ops.experts.exchange import rows_to_experts, sent_rows


def plan_dispatch(
    dispatch: Dispatch,
    experts_BTK: Array,
    num_experts: int,
    capacity: int = 0,
    groups: tuple[int, int] = (1, 1),
) -> DispatchPlan:
    """Plans the dispatch of tokens to experts.

    Args:
      experts_BTK: the distinct experts of each token; -1 is no expert.
      capacity: tokens of each sequence that an expert accepts, in text order; the others are
        dropped. 0 is no limit, the only value for several nodes.
      groups: of consecutive experts; and how many of them a token's choices are from, at most.
    """

    def local(experts_BTK: Array) -> DispatchPlan:
        experts_BTK = whole_tokens(dispatch, experts_BTK)
        if dispatch.nodes > 1:
            assert not capacity  # refused by `sharding.layout_checks`
            return _plan_over_nodes(dispatch, experts_BTK, num_experts, groups)
        if capacity:
            return _local(plan_with_capacity(dispatch, experts_BTK, num_experts, capacity))
        return _local(plan_of_all(dispatch, experts_BTK, num_experts))

    return dispatch.manual(local, (dispatch.stream,), dispatch.rows)(experts_BTK)


def _plan_over_nodes(
    dispatch: Dispatch, experts_BTK: Array, num_experts: int, groups: tuple[int, int]
) -> DispatchPlan:
    across, inside = dispatch.levels
    nodes, choices = dispatch.nodes, experts_BTK.shape[-1]
    own, most = num_experts // nodes, min(choices, most_nodes(nodes, *groups))
    first = _local(plan_of_all(across, nodes_of_tokens(experts_BTK, own, nodes, most), nodes))
    # An empty row is zeros, so experts are counted from 1 on the way.
    sent_SK = sent_rows(experts_BTK.reshape(-1, choices) + 1, first)
    experts_RK = rows_to_experts(across, sent_SK, first) - 1 - across.rank * own
    experts_RK = jnp.where((experts_RK >= 0) & (experts_RK < own), experts_RK, -1)
    return _local(plan_of_all(inside, experts_RK[None], own))._replace(across=first)


def most_nodes(nodes: int, groups: int, kept: int) -> int:
    """The most nodes that have experts of `kept` groups of consecutive experts.

    >>> most_nodes(8, 8, 4), most_nodes(16, 8, 4), most_nodes(4, 8, 4), most_nodes(3, 8, 4)
    (4, 8, 4, 3)
    """
    if nodes % groups and groups % nodes:
        return nodes  # a group may be on several
    return min(nodes, kept * max(nodes // groups, 1))


def nodes_of_tokens(experts_BTK: Array, own: int, nodes: int, most: int) -> Array:
    """The distinct nodes of each token, [B, T, M]; -1 is no node.

    Args:
      own: experts of a node.
      most: M, which no token exceeds.
    """
    node_n = jnp.arange(nodes, dtype=jnp.int32)
    used_BTn = jnp.any((experts_BTK[..., None] // own) == node_n, axis=-2)
    ranked_BTn = jnp.where(used_BTn, nodes - node_n, 0)
    ranked_BTM = jax.lax.top_k(ranked_BTn, most)[0]
    return jnp.where(ranked_BTM > 0, nodes - ranked_BTM, -1)


def _local(plan: DispatchPlan) -> DispatchPlan:
    """With the dimension of the ranks of context."""
    return jax.tree.map(lambda x: x[None], plan)
