"""Traffic of other trainers in a layer, where it differs from ours."""

from dataclasses import replace
from typing import Any

import numpy as np

from jaxscale.planner.cost import collectives
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.collectives import Levels, axis_levels
from jaxscale.planner.cost.communication import (
    LocalParams,
    StateTraffic,
    TensorTraffic,
    expert_traffic,
    local_params,
    state_traffic,
)
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.sharding.model_trace import ModelWork, StackWork
from tools.planner_validation.trainer_layout import TrainerLayout

Floats = Any  # a float, or float [N]


def trainer_levels(cluster: Cluster, layout: TrainerLayout) -> dict[str, Levels]:
    """The levels of each axis' groups; a folded expert group spans the tensor, context and data
    ranks, nearest first."""
    if not layout.traits.folded_experts:
        levels = axis_levels(cluster, layout)
        return levels | {"zero": levels["zero_experts"]}
    folded = axis_levels(cluster, Parallelism(expert=layout.expert))["expert"]
    return axis_levels(cluster, replace(layout, expert=1)) | {"expert": folded}


def trainer_params(work: ModelWork, layout: TrainerLayout) -> LocalParams:
    """Parameters of a device. Folded experts are not split over tensor: a device has as many as
    with fewer ranks of expert, and ours split over tensor."""
    if not layout.traits.folded_experts:
        return local_params(work, layout)
    ranks = np.asarray(layout.expert) / np.asarray(layout.tensor)
    return local_params(work, replace(layout, expert=ranks))


def trainer_state_traffic(
    work: ModelWork, params: LocalParams, layout: TrainerLayout, levels: dict[str, Levels]
) -> StateTraffic:
    """State that is sharded over data ranks alone, by the same ranks for all parameters; expert
    ranks with separate tokens reduce the gradients of all but the experts."""
    merged = LocalParams(params.layers, 0.0, params.outer)
    state = state_traffic(work, merged, replace(layout, expert=1), levels)
    t, p, x = (np.asarray(v) for v in (layout.tensor, layout.pipeline, layout.expert))
    width = 0.0 if layout.frozen else layout.gradient_bytes
    common = width * (params.total - work.routed_params / (x * t * p))
    ranks = collectives.group_size(levels["zero"])
    return replace(
        state,
        replicas=state.replicas + collectives.reduce_seconds(levels["expert"], common / ranks),
        whole=state.whole + collectives.reduce_seconds(levels["expert"], common),
    )


def trainer_tensor_traffic(
    work: ModelWork,
    stack: StackWork,
    layout: TrainerLayout,
    levels: dict[str, Levels],
    stream: Floats,
) -> TensorTraffic:
    """Two all-reduces of the residual stream per pass; with sequence parallelism each of them is a
    reduce-scatter, and an all-gather before the next matmul. A forward pass that is recomputed
    sends them again."""
    branches = stack.sent
    if layout.traits.folded_experts:  # experts are not split: no all-reduce
        shared = any(one.of_shared for one in stack.matmuls)
        branches = branches - sum(one.share for one in stack.experts) * (not shared)
    if layout.traits.sequence_parallel:
        once = branches * (2 * collectives.gather_seconds(levels["tensor"], stream))
    else:
        once = branches * collectives.reduce_seconds(levels["tensor"], stream)
    full = layout.remat_share if layout.remat == "full" else 0.0
    return TensorTraffic(once, once, 0.0 * once, full * once)


def trainer_expert_traffic(
    stack: StackWork, layout: TrainerLayout, levels: Levels, tokens: Floats
) -> Floats:
    """Dispatch and combine; each tensor rank sends a share of the tokens to folded experts."""
    own, total = tokens / layout.tensor if layout.traits.folded_experts else tokens, np.zeros(())
    for one in stack.experts:
        links = merged_levels(levels, one.choices) if layout.traits.merged_dispatch else levels
        total = total + expert_traffic(replace(stack, experts=(one,)), layout, links, own)
    return total


EXCHANGE_KERNEL = 460e9
"""Most bytes per second that a device sends in the dispatch and combine kernels of expert
parallelism, with the 16 to 32 multiprocessors that trainers give them: 472 to 550 GB/s on GB200 and
B200 among 8 to 32 devices, local tokens included (16-bit tokens, the whole call; table in the
README of Hybrid-EP, a branch of DeepEP). Links of Hopper are slower than that."""


def merged_levels(levels: Levels, choices: int) -> Levels:
    """Levels whose all-to-alls take as long as those in which a token's copies cross to a domain of
    the next level only once (as in DeepSeek-V3, arXiv 2412.19437, section 3.2.2).

    Args:
      choices: number of copies of each token, for members chosen at random.
    """
    whole, inner, found = collectives.group_size(levels), np.ones(()), []
    for level in levels:
        reached = inner * level.members
        outside = (reached - inner) / whole  # share of a member's bytes that crosses this level
        domains = np.maximum(whole / inner, 1)
        copies = (domains - 1) * (1 - (1 - 1 / domains) ** choices) / choices
        fewer = np.where(outside > copies, outside / np.where(copies > 0, copies, 1.0), 1.0)
        rate = np.minimum(level.exchange_rate, EXCHANGE_KERNEL)
        found.append(replace(level, exchange_rate=rate * fewer))
        inner = reached
    return tuple(found)
