"""Seconds of other trainers' steps: our formula, and the terms in which they differ."""

import functools
from dataclasses import dataclass

from jaxscale.planner.cost import step
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.layer import LayerCompute
from jaxscale.planner.cost.step import StepParts, StepSeconds, cost_of_parts
from jaxscale.sharding.model_trace import ModelWork
from tools.planner_validation.trainer_compute import trainer_compute
from tools.planner_validation.trainer_layout import TrainerLayout

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

    @property
    def end_seconds(self) -> float:
        traits = self.parallelism.traits
        launched = traits.eager and traits.graph != "step"
        return EAGER_END_SECONDS if launched else step.END_SECONDS
