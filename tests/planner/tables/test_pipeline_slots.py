"""What ranks hold is what the engine's own pipeline has."""

import itertools

import pytest

from jaxscale.config.layout import Layout
from jaxscale.pipeline.partition import StackLayers
from jaxscale.pipeline.stages import open_stages
from jaxscale.pipeline_schedules.shipped import SHIPPED, find_schedule
from jaxscale.planner.tables import pipeline_slots
from jaxscale.planner.tables.table_makespan import TableSpec
from tests.planner.tables.test_table_makespan import CASES


@pytest.mark.proof
@pytest.mark.parametrize(("name", "chunks", "fused", "recompute"), CASES)
def test_slots_are_those_of_the_program(name, chunks, fused, recompute):
    for ranks, rounds in itertools.product((2, 4), (2, 3, 7)):
        if not find_schedule(name).serves(ranks, ranks * rounds, chunks, 1):
            continue
        layout = Layout(
            pipeline=ranks,
            data=1,
            microbatches=ranks * rounds,
            virtual_stages=chunks,
            schedule=name + ":fused" * fused,
            remat="full" if recompute else "none",
        )
        slots = open_stages(layout, ranks * chunks).program.slots
        without = dict.fromkeys(pipeline_slots.SLOTS, 0)  # of buffers that the table has no use for
        assert pipeline_slots.most_slots(TableSpec.of(layout)) == {**without, **slots}


@pytest.mark.proof
@pytest.mark.parametrize("keep", [None, 0], ids=["saved", "recomputed"])
@pytest.mark.parametrize("schedule", SHIPPED, ids=lambda one: one.name)
def test_more_microbatches_need_no_fewer_slots(schedule, keep):
    """By which the search leaves layouts out without their tables."""
    fused = {False, not schedule.splits_backward}
    for chunks, whole in itertools.product(schedule.searched_virtual_stages, fused):
        for ranks in (2, 3, 4):
            before = dict.fromkeys(pipeline_slots.SLOTS, 0)
            for microbatches in range(ranks, 4 * ranks + 1):
                if not schedule.serves(ranks, microbatches, chunks, 1):
                    continue
                spec = TableSpec(schedule.name, ranks, microbatches, chunks, whole, keep)
                slots = pipeline_slots.most_slots(spec)
                assert all(slots[one] >= before[one] for one in slots), (spec, slots, before)
                before = slots


STACKS = (
    *((StackLayers("layers", count),) for count in (8, 13, 22)),
    (StackLayers("layers", 26, 3),),
    (StackLayers("encoder", 12), StackLayers("decoder", 12)),
    (StackLayers("encoder", 5), StackLayers("decoder", 9)),
)


@pytest.mark.parametrize("head_cost", [0.0, 0.4, 2.0])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb_v", 2)])
def test_layers_are_split_as_the_engine_splits_them(name, chunks, head_cost):
    for stacks in STACKS:
        layout = Layout(pipeline=4, data=1, microbatches=12, virtual_stages=chunks, schedule=name)
        spec = TableSpec.of(layout)
        layers = pipeline_slots.default_stage_layers(spec, stacks, head_cost)
        stages = open_stages(layout, stacks, head_cost)
        assert layers == stages.layers
        assert pipeline_slots.stage_stacks(layers, stacks).tolist() == [*stages.stack_of_stage]
        one = pipeline_slots.busiest_rank_buffers(spec, layers, stacks)
        rows = [len(layer_of_row) // 4 for layer_of_row in stages.layer_of_row.values()]
        assert [*one.rows] == rows
        assert [*one.capacity] == [stages.capacity(n) for n in range(len(stacks))]
        each = pipeline_slots.buffers_by_rank(spec, layers, stacks)
        assert [sum(rank.rows) for rank in each] == [sum(row) for row in stages.counts]
        for n in range(len(stacks)):
            assert max(rank.capacity[n] for rank in each) == one.capacity[n]
        for slot in pipeline_slots.SLOTS:
            assert max(getattr(rank, slot) for rank in each) == getattr(one, slot)
