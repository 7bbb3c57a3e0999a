"""Layers dealt to the stages of a pipeline by the seconds of the formulas.

Left to itself the engine deals by FLOPs (`pipeline.stages.deal`): all stages alike but the last,
which has the head. Here any layer may move, as long as the real table gets shorter.
"""

import dataclasses
import itertools

import numpy as np

from jaxscale.layout import parse_schedule
from jaxscale.planner.cost.uneven_pipeline import UnevenPipelineCost
from jaxscale.planner.search.plan import Plan, predict_plan
from jaxscale.planner.search.space import Query
from jaxscale.planner.tables.table_makespan import TableSpec

WORTH = 1e-3
"""Of a step, that another dealing must save to be proposed."""

ALL_PAIRS = 24
"""Stages up to which a layer may move between any two; beyond, one of them is the first or last."""


def rebalance_layers(query: Query, plan: Plan) -> Plan:
    """The plan, or the same with its layers dealt in a way that is faster and fits."""
    layout = plan.layout
    given = parse_schedule(layout.schedule)[2]
    if layout.pipeline == 1 or given or "schedule" in query.pins:
        return plan
    layers = balance_by_seconds(query, plan)
    if layers == plan.layers:
        return plan
    name = f"{layout.schedule}:{','.join(map(str, layers))}"
    other = predict_plan(query, dataclasses.replace(layout, schedule=name))
    better = other.step_seconds < (1 - WORTH) * plan.step_seconds
    return other if other.fits and better else plan


def balance_by_seconds(query: Query, plan: Plan) -> tuple[int, ...]:
    """Moves one layer at a time, each time the one that shortens the step most, until none does."""
    parts, spec = (
        UnevenPipelineCost.of(query.shape, query.cluster, plan.parallelism),
        TableSpec.of(plan.layout),
    )
    layers = np.array(plan.layers)

    def makespans(dealt: np.ndarray) -> np.ndarray:
        return parts.makespan([0], spec, dealt)

    now = makespans(layers[None])[0]
    while True:
        dealt = _moves(layers)
        found = makespans(dealt) if len(dealt) else np.array([np.inf])
        if found.min() >= now * (1 - 1e-6):
            return tuple(layers.tolist())
        layers, now = dealt[found.argmin()], found.min()


def _moves(layers: np.ndarray) -> np.ndarray:
    """int [moves, stages], what one layer's move can make of a dealing."""
    stages = range(len(layers))
    ends = {0, len(layers) - 1}
    moves = [
        (giver, taker)
        for giver, taker in itertools.permutations(stages, 2)
        if layers[giver] > 1 and (len(layers) <= ALL_PAIRS or ends & {giver, taker})
    ]
    dealt = np.repeat(layers[None], len(moves), axis=0)
    rows = np.arange(len(moves))
    givers, takers = np.array(moves, int).reshape(-1, 2).T
    dealt[rows, givers] -= 1
    dealt[rows, takers] += 1
    return dealt
