"""What ranks hold is what the engine's own pipeline has."""

import dataclasses
import itertools

import pytest

from jaxscale.layout import Layout
from jaxscale.pipeline.stages import open_stages
from jaxscale.planner.tables import pipeline_slots
from jaxscale.planner.tables.table_makespan import TableSpec
from tests.planner.tables.test_table_makespan import CASES


@pytest.mark.parametrize(("name", "chunks", "fused", "recompute"), CASES)
def test_slots_are_those_of_the_program(name, chunks, fused, recompute):
    for ranks, rounds in itertools.product((2, 4), (2, 3, 7)):
        layout = Layout(
            pipeline=ranks,
            data=1,
            microbatches=ranks * rounds,
            virtual_stages=chunks,
            schedule=name + ":fused" * fused,
            remat="full" if recompute else "none",
        )
        slots = open_stages(layout, ranks * chunks).program.slots
        assert pipeline_slots.most_slots(TableSpec.of(layout)) == slots


@pytest.mark.parametrize("head_cost", [0.0, 0.4, 2.0])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb_v", 2)])
def test_layers_are_dealt_as_the_engine_deals_them(name, chunks, head_cost):
    for num_layers in (8, 13, 22):
        layout = Layout(pipeline=4, data=1, microbatches=12, virtual_stages=chunks, schedule=name)
        spec = TableSpec.of(layout)
        layers = pipeline_slots.default_stage_layers(spec, num_layers, head_cost)
        stages = open_stages(layout, num_layers, head_cost)
        assert layers == stages.layers
        one = pipeline_slots.busiest_rank_buffers(spec, layers)
        assert (one.rows, one.capacity) == (chunks * stages.capacity(), stages.capacity())
        each = pipeline_slots.buffers_by_rank(spec, layers)
        assert [rank.rows for rank in each] == [sum(row) for row in stages.counts]
        for field in dataclasses.fields(pipeline_slots.RankBuffers)[1:]:
            most = max(getattr(rank, field.name) for rank in each)
            assert most == getattr(one, field.name)
