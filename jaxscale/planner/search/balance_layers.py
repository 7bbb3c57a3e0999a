"""Balances the layers of pipeline stages by predicted seconds.

The default balances FLOPs (`pipeline.partition.partition_layers`): all stages have the same
number of layers but the last, which also has the head. Here single layers move between stages as
long as the makespan gets shorter.
"""

import dataclasses
import itertools

import numpy as np

from jaxscale.planner.cost.uneven_pipeline import UnevenPipelineCost
from jaxscale.planner.search.plan import Plan, predict_plan
from jaxscale.planner.search.space import Query
from jaxscale.planner.tables.table_makespan import TableSpec

WORTH = 1e-3
"""Share of a step that another split of the layers must save to be proposed."""

ALL_PAIRS = 24
"""Number of stages up to which a layer may move between any two of them; beyond, one of the two is
the first or the last stage."""


def rebalance_layers(query: Query, plan: Plan) -> Plan:
    """The plan, or the same plan with its layers split in a way that is faster and fits."""
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
    """Moves one layer at a time, the one that shortens the step most, until no move does."""
    costs, spec = (
        UnevenPipelineCost.of(query.shape, query.cluster, plan.parallelism),
        TableSpec.of(plan.layout),
    )
    layers = np.array(plan.layers)

    def makespans(splits: np.ndarray) -> np.ndarray:
        return costs.makespan([0], spec, splits)

    now = makespans(layers[None])[0]
    while True:
        splits = _moves(layers)
        found = makespans(splits) if len(splits) else np.array([np.inf])
        if found.min() >= now * (1 - 1e-6):
            return tuple(layers.tolist())
        layers, now = splits[found.argmin()], found.min()


def _moves(layers: np.ndarray) -> np.ndarray:
    """int [moves, stages], the splits that moving one layer gives."""
    stages = range(len(layers))
    ends = {0, len(layers) - 1}
    moves = [
        (source, target)
        for source, target in itertools.permutations(stages, 2)
        if layers[source] > 1 and (len(layers) <= ALL_PAIRS or ends & {source, target})
    ]
    splits = np.repeat(layers[None], len(moves), axis=0)
    rows = np.arange(len(moves))
    sources, targets = np.array(moves, int).reshape(-1, 2).T
    splits[rows, sources] -= 1
    splits[rows, targets] += 1
    return splits
