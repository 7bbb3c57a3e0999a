"""Seconds of other trainers' steps: our formula, and the terms in which they differ."""

import functools
from dataclasses import dataclass, replace

from jaxscale.planner.cost import step
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.collectives import Levels, axis_levels, reduce_seconds
from jaxscale.planner.cost.communication import (
    LayerTraffic,
    LocalParams,
    StateTraffic,
    layer_traffic,
    state_traffic,
)
from jaxscale.planner.cost.layer import LayerCompute
from jaxscale.planner.cost.step import StepParts, StepSeconds, cost_of_parts
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.sharding.model_trace import ModelWork
from tools.planner_validation.trainer_compute import trainer_compute
from tools.planner_validation.trainer_layout import TrainerLayout
from tools.planner_validation.trainer_traffic import (
    trainer_expert_traffic,
    trainer_levels,
    trainer_params,
    trainer_tensor_traffic,
)

EAGER_END_SECONDS = 8e-3
"""`step.END_SECONDS` of eager trainers, which synchronise with the host several times a step (loss
scale, norm, timers)."""


def trainer_cost(work: ModelWork, cluster: Cluster, layout: TrainerLayout) -> StepSeconds:
    """Predicted seconds of a step; what waits for launches counts as elementwise work."""
    return cost_of_parts(TrainerParts(work, cluster, layout))


@dataclass(frozen=True)
class TrainerParts(StepParts):
    """The parts of a step with their replacements."""

    parallelism: TrainerLayout

    @functools.cached_property
    def layer(self) -> LayerCompute:
        return trainer_compute(self.work, self.cluster, self.parallelism)

    @functools.cached_property
    def levels(self) -> dict[str, Levels]:
        return trainer_levels(self.cluster, self.parallelism)

    @functools.cached_property
    def params(self) -> LocalParams:
        return trainer_params(self.work, self.parallelism)

    @functools.cached_property
    def sent(self) -> LayerTraffic:
        return layer_traffic(
            self.work,
            self.parallelism,
            self.levels,
            trainer_tensor_traffic,
            trainer_expert_traffic,
        )

    @functools.cached_property
    def state(self) -> StateTraffic:
        if not self.parallelism.traits.folded_experts:
            return state_traffic(self.work, self.params, self.parallelism, self.levels)
        # Folded expert ranks have no tokens of their own: what they reduce is in the groups of data
        # and fsdp, and a reduction of its own.
        alone = axis_levels(self.cluster, Parallelism())["expert"]
        levels = self.levels | {"expert": alone}
        state = state_traffic(self.work, self.params, self.parallelism, levels)
        start = reduce_seconds(self.levels["expert"], 0.0)
        return replace(state, replicas=state.replicas + start, whole=state.whole + start)

    @property
    def end_seconds(self) -> float:
        traits = self.parallelism.traits
        launched = traits.eager and traits.graph != "step"
        return EAGER_END_SECONDS if launched else step.END_SECONDS
