"""Predicted seconds of a step by term, in closed form over arrays of layouts.

Terms are those of the busiest pipeline rank, its idle time is the bubble, and communication counts
where it is exposed.
"""

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.collectives import Levels, axis_levels
from jaxscale.planner.cost.communication import (
    LayerTraffic,
    LocalParams,
    StateTraffic,
    layer_traffic,
    local_params,
    state_traffic,
)
from jaxscale.planner.cost.layer import ComputeSeconds, LayerCompute, layer_compute
from jaxscale.planner.cost.passes import LayerPass, make_passes
from jaxscale.planner.cost.pipeline import (
    BusiestRank,
    StageLayers,
    bubble_seconds,
    stage_operation_seconds,
    tick_seconds,
)
from jaxscale.planner.cost.state import (
    accumulate_seconds,
    offload_seconds,
    optimizer_seconds,
    state_seconds,
    tick_collectives,
    weight_cast_seconds,
)
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.tables import table_makespan
from jaxscale.planner.tables.state_ticks import TickCollectives
from jaxscale.sharding.model_trace import ModelWork

Floats = Any  # a float, or float [N]

JITTER = 0.0054
"""Relative standard deviation of a device's step time; the slowest of N devices is sqrt(2 ln N) of
them late: 2 % at 1,000 devices, where 1 to 3 % are typical."""

END_SECONDS = 1e-3
"""Fixed cost per step: reductions of loss and norm, launches of the optimizer's kernels, the
loader."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step by term, floats or float [N]; `hidden` seconds are overlapped with them."""

    matmul: Floats
    attention: Floats
    elementwise: Floats
    weights: Floats  # casts, and sums of their gradients over micro-batches
    recompute: Floats
    tensor: Floats
    context: Floats
    expert: Floats
    fsdp: Floats
    data: Floats
    bubble: Floats  # sends of a pipeline, too
    optimizer: Floats
    offload: Floats
    stragglers: Floats
    end: Floats
    hidden: dict[str, Floats] = field(default_factory=dict)

    @property
    def terms(self) -> dict[str, Floats]:
        """The terms that add up to the step, by name."""
        return {name: value for name, value in vars(self).items() if name != "hidden"}

    @property
    def step_seconds(self) -> Floats:
        total = sum(self.terms.values())
        return float(total) if np.ndim(total) == 0 else total


@dataclass(frozen=True)
class StepParts:
    """Parts of the terms of a step, each computed once, on first use.

    `tools/planner_validation` replaces the parts in which other trainers differ.
    """

    work: ModelWork
    cluster: Cluster
    parallelism: Parallelism

    @functools.cached_property
    def levels(self) -> dict[str, Levels]:
        return axis_levels(self.cluster, self.parallelism)

    @functools.cached_property
    def layer(self) -> LayerCompute:
        return layer_compute(self.work, self.cluster, self.parallelism)

    @functools.cached_property
    def sent(self) -> LayerTraffic:
        return layer_traffic(self.work, self.parallelism, self.levels)

    @functools.cached_property
    def passes(self) -> tuple[dict[str, LayerPass], dict[str, Floats]]:
        """The passes over a layer, and the seconds overlapped with them, by axis."""
        return make_passes(self.cluster, self.parallelism, self.layer, self.sent)

    @functools.cached_property
    def stages(self) -> StageLayers:
        return StageLayers.of(self.work, self.parallelism)

    @functools.cached_property
    def state(self) -> StateTraffic:
        return state_traffic(self.work, self.params, self.parallelism, self.levels)

    @functools.cached_property
    def params(self) -> LocalParams:
        return local_params(self.work, self.parallelism)

    @functools.cached_property
    def busiest(self) -> BusiestRank:
        return BusiestRank.of(self.parallelism, self.passes[0], self.layer, self.stages)

    @functools.cached_property
    def bubble(self) -> Floats:
        return bubble_seconds(
            self.parallelism,
            self.passes[0],
            self.layer,
            self.sent,
            self.stages,
            self.busiest,
        )

    @functools.cached_property
    def state_seconds(self) -> tuple[Floats, Floats, dict[str, Floats]]:
        return state_seconds(
            self.cluster, self.parallelism, self.passes[0], self.layer, self.stages, self.state
        )

    @functools.cached_property
    def in_ticks(self) -> TickCollectives:
        return tick_collectives(self.parallelism, self.state)

    @property
    def accumulate_seconds(self) -> Floats:
        return accumulate_seconds(self.params, self.cluster, self.parallelism)

    @property
    def offload_seconds(self) -> Floats:
        return offload_seconds(
            self.work, self.params, self.cluster, self.parallelism, self.passes[0], self.stages
        )

    @property
    def end_seconds(self) -> float:
        return END_SECONDS


def step_cost(work: ModelWork, cluster: Cluster, parallelism: Parallelism) -> StepSeconds:
    """Predicted seconds of a step.

    Args:
      parallelism: one layout or arrays of them; not checked against model and cluster.

    Returns:
      Terms whose sum is the step.
    """
    return cost_of_parts(StepParts(work, cluster, parallelism))


def cost_of_parts(parts: StepParts, *, waits: bool = True) -> StepSeconds:
    """Predicted seconds of a step.

    Args:
      waits: False leaves out the pipeline bubble and the collectives within ticks, for a lower
        bound that needs no table.
    """
    cluster, parallelism, params = parts.cluster, parts.parallelism, parts.params
    layer, stages = parts.layer, parts.stages
    passes, overlapped = parts.passes
    fsdp, data, more = parts.state_seconds
    if waits:
        fsdp = fsdp + tick_seconds(parallelism, parts.in_ticks)
    m, layers = np.asarray(parallelism.microbatches, float), stages.busiest
    hidden = {name: m * layers * seconds for name, seconds in overlapped.items()} | more
    spent = passes["forward"].work + passes["input"].work + passes["weights"].work
    head = (layer.head_forward + layer.head_backward) * parts.busiest.has_head
    recompute = passes["recompute"]
    optimizer = optimizer_seconds(params, cluster, parallelism)

    def communication(name: str) -> Floats:
        return m * layers * sum(getattr(one, name) for one in passes.values())

    terms = {
        "matmul": m * (layers * spent.matmul + head.matmul),
        "attention": m * (layers * spent.attention + head.attention),
        "elementwise": m * (layers * spent.elementwise + head.elementwise),
        "weights": parts.accumulate_seconds + weight_cast_seconds(params, cluster, parallelism),
        "recompute": m * layers * recompute.work.seconds,
        "tensor": communication("tensor"),
        "context": communication("context"),
        "expert": communication("expert"),
        "fsdp": fsdp,
        "data": data,
        "bubble": parts.bubble if waits else 0.0,
        "optimizer": optimizer,
        "offload": parts.offload_seconds,
        "end": np.asarray(parts.end_seconds),
    }
    count = np.asarray(parallelism.num_devices, float)
    late = JITTER * np.sqrt(2 * np.log(np.maximum(count, 1)))
    return StepSeconds(**terms, stragglers=late * sum(terms.values()), hidden=hidden)


def end_operation_seconds(parts: StepParts) -> table_makespan.OperationSeconds:
    """Seconds of the operations of a pipeline's first stage and of its last, which has the head;
    without the messages that end each operation, `message_seconds`.

    Returns:
      Float [..., 2] each, in seconds of a rank's whole share of the model.
    """
    return stage_operation_seconds(
        parts.stages, parts.parallelism, parts.passes[0], parts.layer, 0.0, count=2
    )


def end_attention_seconds(parts: StepParts) -> table_makespan.OperationSeconds:
    """The core attention in `end_operation_seconds`."""
    only = {
        name: LayerPass(ComputeSeconds(attention=one.work.attention))
        for name, one in parts.passes[0].items()
    }
    none = dataclasses.replace(
        parts.layer, head_forward=ComputeSeconds(), head_backward=ComputeSeconds()
    )
    return stage_operation_seconds(parts.stages, parts.parallelism, only, none, 0.0, count=2)


def message_seconds(parts: StepParts) -> Floats:
    """Seconds of the exchange of messages after each operation, of all chunks of a rank."""
    return np.asarray(parts.sent.message) * np.asarray(parts.parallelism.virtual_stages)
