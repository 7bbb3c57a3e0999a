"""Pipelines whose ranks do not wait for each other."""

from dataclasses import replace

import numpy as np
import pytest

from jaxscale.config import load
from jaxscale.pipeline.simulator import Costs, simulate
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.cost.pipeline import stage_operation_seconds
from jaxscale.planner.cost.step import cost_of_parts
from jaxscale.planner.search.trainable_model import TrainableModel
from jaxscale.planner.tables.table_makespan import TableSpec, pipeline_table
from tools.planner_validation.trainer_cost import TrainerParts, trainer_cost
from tools.planner_validation.trainer_layout import Trainer, TrainerLayout

WORK = TrainableModel(load("llama2_7b")).work
FREE = Trainer(lockstep=False)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "breadth_first", "gpipe"])
def test_closed_forms_are_the_tables_own(schedule):
    """Where a rank continues as soon as it can, without messages and with equal stages."""
    v = 1 if schedule in ("1f1b", "gpipe") else 2
    fast = make_cluster("h100", 64, network_bytes_per_second=1e18, network_latency_seconds=0.0)
    sizes = {"pipeline": 4, "tensor": 8, "microbatches": 8, "virtual_stages": v}
    layout = TrainerLayout(**sizes, schedule=schedule, fused=True, traits=FREE)
    parts = TrainerParts(replace(WORK, vocab=1), fast, layout)  # no head
    found, passes = cost_of_parts(parts), parts.passes[0]
    costs = stage_operation_seconds(parts.stages, layout, passes, parts.layer, 0.0, 4 * v)
    table = pipeline_table(TableSpec(schedule, 4, 8, v, fused=True))
    each = Costs(*(tuple(np.broadcast_to(cost, 4 * v)) for cost in costs))
    busy = sum(float(cost.ravel()[0]) for cost in costs) * 8
    assert float(found.bubble) == pytest.approx(simulate(table, each).makespan - busy, rel=0.02)


def test_ticks_are_longer_where_ranks_wait_for_each_other():
    sizes = {"pipeline": 4, "tensor": 8, "fsdp": 2, "microbatches": 16, "zero_stage": 1}
    machine = make_cluster("h100", 512)
    free, waiting = (
        trainer_cost(WORK, machine, TrainerLayout(**sizes, remat="full", traits=traits)).bubble
        for traits in (FREE, Trainer())
    )
    assert free < waiting


def test_schedules_without_a_closed_form_are_refused():
    layout = TrainerLayout(pipeline=4, microbatches=8, schedule="zb_h1", traits=FREE)
    with pytest.raises(ValueError, match="schedule = 'zb_h1' has no closed form"):
        trainer_cost(WORK, make_cluster("h100", 4), layout)


def test_ends_that_count_as_layers_leave_one_less():
    layout = TrainerLayout(pipeline=4, traits=Trainer(balanced_ends=True))
    stages = TrainerParts(WORK, make_cluster("h100", 4), layout).stages
    assert (float(stages.busiest), float(stages.last)) == (9, 8)  # 32 and two
