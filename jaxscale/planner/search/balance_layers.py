"""Balances the layers of pipeline stages by predicted seconds.

The default balances FLOPs (`pipeline.partition.partition_layers`): all stages have the same
number of layers except the last, which also has the head. Here single layers move between stages
while the makespan gets shorter.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jaxscale.pipeline.partition import StackLayers, model_partitions
from jaxscale.planner.cost.uneven_pipeline import UnevenPipelineCost
from jaxscale.planner.search.plan import Plan, predict_plan
from jaxscale.planner.search.space import Query
from jaxscale.planner.tables.pipeline_slots import stage_stacks
from jaxscale.planner.tables.table_makespan import TableSpec

WORTH = 1e-3
"""Share of a step that another split of the layers must save to be proposed."""

ALL_PAIRS = 24
"""Number of stages up to which a layer may move between any two of them; beyond, one of the two is
the first or the last stage."""


def rebalance_layers(query: Query, plan: Plan) -> Plan:
    """The plan, with its layers split in another way where that is faster and fits."""
    layout = plan.layout
    if layout.pipeline == 1 or layout.schedule_spec.layers or "schedule" in query.pins:
        return plan
    layers = balance_by_seconds(query, plan)
    if layers == plan.layers:
        return plan
    spec = dataclasses.replace(layout.schedule_spec, layers=layers)
    other = predict_plan(query, dataclasses.replace(layout, schedule=str(spec)))
    better = other.step_seconds < (1 - WORTH) * plan.step_seconds
    return other if other.fits and better else plan


def balance_by_seconds(query: Query, plan: Plan) -> tuple[int, ...]:
    """Repeats the move of layers between stages of a stack that shortens the step most, until none
    does; from every number of stages that a stack may have."""
    costs, spec = (
        UnevenPipelineCost.of(query.work, query.cluster, plan.parallelism),
        TableSpec.of(plan.layout),
    )
    stacks = plan.planned_model.stacks

    def makespans(splits: np.ndarray) -> np.ndarray:
        return costs.makespan([0], spec, splits)

    def balanced(layers: np.ndarray) -> tuple[float, tuple[int, ...]]:
        now = makespans(layers[None])[0]
        while True:
            splits = _moves(layers, stacks)
            found = makespans(splits) if len(splits) else np.array([np.inf])
            # Above rounding errors, by which equal splits could alternate forever.
            if found.min() >= now * (1 - 1e-6):
                return float(now), tuple(layers.tolist())
            layers, now = splits[found.argmin()], found.min()

    starts = {plan.layers: None, **dict.fromkeys(_even_splits(stacks, len(plan.layers)))}
    return min((balanced(np.array(one)) for one in starts), key=lambda found: found[0])[1]


def _even_splits(stacks: Sequence[StackLayers], stages: int) -> list[tuple[int, ...]]:
    """The most even split for each number of stages of the first of two stacks."""
    if len(stacks) != 2:
        return []
    shares = [(n, stages - n) for n in range(1, stages)]
    return [
        min(model_partitions(stacks, share), key=lambda one: max(one) - min(one))
        for share in shares
        if all(stack.num_layers >= n * stack.period for stack, n in zip(stacks, share))
    ]


def _moves(layers: np.ndarray, stacks: Sequence[StackLayers]) -> np.ndarray:
    """int [moves, stages], the splits that moving one layer gives, or one period of layers."""
    stages, of_stack = range(len(layers)), stage_stacks(tuple(layers.tolist()), stacks)
    ends = {0, len(layers) - 1}
    moves = [
        (source, target, stacks[of_stack[source]].period)
        for source, target in itertools.permutations(stages, 2)
        if of_stack[source] == of_stack[target]
        and layers[source] > stacks[of_stack[source]].period
        and (len(layers) <= ALL_PAIRS or ends & {source, target})
    ]
    splits = np.repeat(layers[None], len(moves), axis=0)
    rows = np.arange(len(moves))
    sources, targets, many = np.array(moves, int).reshape(-1, 3).T
    splits[rows, sources] -= many
    splits[rows, targets] += many
    return splits
