"""Seconds of other trainers' steps: our formula, and the terms in which they differ."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxscale.planner.cost import step
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.collectives import Levels, axis_levels, reduce_seconds
from jaxscale.planner.cost.communication import (
    LayerTraffic,
    LocalParams,
    StateTraffic,
    layer_traffic,
)
from jaxscale.planner.cost.layer import LayerCompute
from jaxscale.planner.cost.passes import LayerPass, make_passes
from jaxscale.planner.cost.pipeline import StageLayers
from jaxscale.planner.cost.state import accumulate_seconds, overlapped_state_seconds
from jaxscale.planner.cost.step import StepParts, StepSeconds, cost_of_parts
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.tables.state_ticks import TickCollectives
from jaxscale.sharding.model_trace import ModelWork
from tools.planner_validation.trainer_compute import trainer_compute
from tools.planner_validation.trainer_layout import TrainerLayout
from tools.planner_validation.trainer_pipeline import free_bubble_seconds, weight_sweeps
from tools.planner_validation.trainer_traffic import (
    trainer_expert_traffic,
    trainer_levels,
    trainer_params,
    trainer_state_traffic,
    trainer_tensor_traffic,
)

Floats = Any  # a float, or float [N]

EAGER_END_SECONDS = 8e-3
"""`step.END_SECONDS` of eager trainers, which synchronise with the host several times a step (loss
scale, norm, timers)."""


def trainer_cost(work: ModelWork, cluster: Cluster, layout: TrainerLayout) -> StepSeconds:
    """Predicted seconds of a step; waits for launches count as elementwise work."""
    return cost_of_parts(TrainerParts(work, cluster, layout))


@dataclass(frozen=True)
class TrainerParts(StepParts):
    """Parts of a step, replaced where the trainer differs."""

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
            return trainer_state_traffic(self.work, self.params, self.parallelism, self.levels)
        # Folded expert ranks have no separate tokens: they reduce in the groups of data and fsdp,
        # in a separate reduction.
        alone = axis_levels(self.cluster, Parallelism())["expert"]
        levels = self.levels | {"expert": alone}
        state = trainer_state_traffic(self.work, self.params, self.parallelism, levels)
        start = reduce_seconds(self.levels["expert"], 0.0)
        return replace(state, replicas=state.replicas + start, whole=state.whole + start)

    @functools.cached_property
    def passes(self) -> tuple[dict[str, LayerPass], dict[str, Floats]]:
        layout, sent = self.parallelism, self.sent.expert
        passes, hidden = make_passes(self.cluster, layout, self.layer, self.sent)
        exposed = sent
        if layout.traits.overlap_experts:
            work = self.layer.forward.seconds, self.layer.backward.seconds
            exposed = tuple(np.maximum(0.0, one - over) for one, over in zip(sent, work))
        again, resent = passes["recompute"], passes["recompute"].expert
        if layout.remat.startswith("modules:"):
            resent = exposed[0] if "moe" in layout.remat else 0.0
        elif not layout.traits.lockstep:  # whole layers are recomputed
            resent = exposed[0] if layout.remat == "full" else 0.0
        share = layout.remat_share
        again = replace(
            again, work=again.work * share, context=again.context * share, expert=resent * share
        )
        passes |= {
            "forward": replace(passes["forward"], expert=exposed[0]),
            "input": replace(passes["input"], expert=exposed[1]),
            "recompute": again,
        }
        return passes, hidden | {"expert": sum(one - left for one, left in zip(sent, exposed))}

    @functools.cached_property
    def stages(self) -> StageLayers:
        if not self.parallelism.traits.balanced_ends:
            return super().stages
        layers, p = self.work.layers, np.asarray(self.parallelism.pipeline)
        v = np.asarray(self.parallelism.virtual_stages)
        most = np.where(p > 1, np.ceil((layers + 2) / (p * v)) * v, float(layers))
        return StageLayers(most, most - (p > 1), layers)

    @functools.cached_property
    def bubble(self) -> Floats:
        if self.parallelism.traits.lockstep:
            return super().bubble
        return free_bubble_seconds(
            self.parallelism, self.passes[0], self.sent.message, self.stages, self.busiest
        )

    @functools.cached_property
    def state_seconds(self) -> tuple[Floats, Floats, dict[str, Floats]]:
        return overlapped_state_seconds(
            self.cluster,
            self.parallelism,
            self.passes[0],
            self.layer,
            self.stages,
            self.state,
            weight_sweeps(self.parallelism),
            self.parallelism.traits,
        )

    @functools.cached_property
    def in_ticks(self) -> TickCollectives:
        return TickCollectives(*[np.zeros(())] * len(TickCollectives._fields))

    @property
    def accumulate_seconds(self) -> Floats:
        """Sums of whole gradients, as ours in the first ZeRO stages."""
        return accumulate_seconds(
            self.params, self.cluster, replace(self.parallelism, zero_stage=0)
        )

    @property
    def offload_seconds(self) -> Floats:
        return super().offload_seconds * self.parallelism.offload_share

    @property
    def end_seconds(self) -> float:
        traits = self.parallelism.traits
        launched = traits.eager and traits.graph != "step"
        return EAGER_END_SECONDS if launched else step.END_SECONDS
