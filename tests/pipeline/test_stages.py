"""Which layers live where, and what a pipeline refuses before anything is compiled."""

import numpy as np
import pytest

from jaxscale.config.layout import Layout
from jaxscale.pipeline.buffer_slots import HEAD_COLUMNS, HEAD_RANK
from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.partition import (
    StackLayers,
    assign_stages,
    best_partition,
    partition_layers,
)
from jaxscale.pipeline.schedule_csv import write_csv
from jaxscale.pipeline.simulator import Costs, simulate
from jaxscale.pipeline.stages import HEAD, open_stages
from jaxscale.pipeline.table import compile_order
from jaxscale.pipeline_schedules.operations import B, F, X


def stages_of(
    schedule, pipeline, microbatches, num_layers, virtual_stages=0, head_cost=0.0, **layout
):
    layout = Layout(
        schedule=schedule,
        pipeline=pipeline,
        microbatches=microbatches,
        data=1,
        virtual_stages=virtual_stages,
        **layout,
    )
    return open_stages(layout, num_layers, head_cost)


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "rows"),
    [
        ("1f1b", 0, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("interleaved", 2, [0, 1, 4, 5, 2, 3, 6, 7]),
        ("zb_v", 2, [0, 1, 6, 7, 2, 3, 4, 5]),
        ("interleaved", 4, [0, 2, 4, 6, 1, 3, 5, 7]),
        ("1f1b:5,3", 0, [0, 1, 2, 3, 4, 5, 6, 7, -1, -1]),
        ("zb_v:1,3,3,1", 0, [0, -1, -1, 7, -1, -1, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_rows_of_the_stack(schedule, virtual_stages, rows):
    """Rank 0's chunks, then rank 1's, each filled up to the largest."""
    stages = stages_of(schedule, 2, 4, 8, virtual_stages)
    assert stages.layer_of_row["layers"].tolist() == rows
    assert stages.counts.sum() == 8
    assert len(rows) == stages.counts.size * stages.capacity()


def test_layers_that_do_not_divide_are_split_evenly():
    assert stages_of("1f1b", 4, 8, 10).layers == (2, 3, 3, 2)
    assert stages_of("interleaved", 2, 4, 9, 2).layers == (2, 3, 2, 2)


@pytest.mark.parametrize("head", [0.5, 1, 2, 5])
def test_the_last_stage_gets_as_few_layers_as_make_the_step_shortest(head):
    """Of all ways to assign twelve layers to three stages, by the simulator."""
    table = compile_order(make_order("1f1b", 3, 6))

    def seconds(layers):
        each = tuple(map(float, layers))
        b = (*each[:-1], each[-1] + 3 * head)
        return simulate(table, Costs(f=each, b=b, w=each)).lockstep_makespan

    every = [(a, b, 12 - a - b) for a in range(1, 11) for b in range(1, 12 - a)]
    chosen = partition_layers(table, [StackLayers("layers", 12)], [table.order.stages], head)
    assert sum(chosen) == 12
    assert seconds(chosen) == min(map(seconds, every))


def test_of_partitions_that_are_equally_short_the_most_even_is_chosen():
    """To nine digits: sums of seconds in another order differ in the last ones."""
    assigned = [(1, 5, 3), (3, 2, 4), (4, 4, 1), (3, 3, 3)]
    assert best_partition(assigned, [7.0, 7.0 + 1e-12, 7.0, 8.0]) == 1
    assert best_partition(assigned, [7.0, 7.1, 6.9, 8.0]) == 2


def test_stacks_share_the_stages_by_their_layers_in_whole_periods():
    assert assign_stages([12, 12], 4) == (2, 2)
    assert assign_stages([2, 4], 6) == (2, 4)
    assert assign_stages([1, 9], 4) == (1, 3)
    # The one layer after the last whole period is in the last stage.
    stacks = [StackLayers("encoder", 5), StackLayers("decoder", 7, period=2)]
    stages = stages_of("interleaved", 2, 4, stacks, 2)
    assert stages.layers == (3, 2, 4, 3)
    assert stages.layer_of_row["encoder"].tolist() == [0, 1, 2, 3, 4, -1]
    assert stages.layer_of_row["decoder"].tolist() == [0, 1, 2, 3, 4, 5, 6, -1]


@pytest.mark.parametrize("schedule", ["chimera", "bitpipe", "dualpipe"])
def test_a_second_direction_adds_the_chunks_of_the_mirrored_rank(schedule):
    """At rest a stage is on one rank; an operation's chunk is its stage's, in either direction."""
    stages = stages_of(schedule, 4, 8, 9)
    chunks, columns = stages.chunks, stages.program.columns
    own = {name: array[:, : stages.counts.shape[1]] for name, array in chunks.items()}
    rows = len(stages.layer_of_row["layers"]) // 4
    assert sorted(stages.layer_of_row["layers"].tolist())[-9:] == list(range(9))
    for name, array in chunks.items():
        added = rows if name == "begin" else 0
        assert (array == np.concatenate([own[name], own[name][::-1] + added], axis=1)).all()
    first = np.cumsum([0, *stages.layers[:-1]])
    for place in np.argwhere(columns["kind"] > 0):
        rank, cell = place[1], {name: column[tuple(place)] for name, column in columns.items()}
        assert chunks["first"][rank, cell["chunk"]] == first[cell["stage"]]
        assert chunks["count"][rank, cell["chunk"]] == stages.layers[cell["stage"]]


def test_two_stacks_in_two_directions_have_their_own_rows():
    stages = stages_of("bitpipe", 4, 8, [StackLayers("encoder", 5), StackLayers("decoder", 9)])
    chunks = stages.chunks
    for number, (name, rows) in enumerate(stages.layer_of_row.items()):
        of_rank = rows.reshape(4, -1)
        both = np.concatenate([of_rank, of_rank[::-1]], axis=1)
        for rank, chunk in np.argwhere(chunks["stack"] == number):
            begin, count = (chunks[key][rank, chunk] for key in ("begin", "count"))
            wanted = chunks["first"][rank, chunk] + np.arange(count)
            assert (both[rank, begin : begin + count] == wanted).all(), name


def test_the_forward_program_evaluates_every_microbatch_at_every_stage():
    stages = stages_of("zb_v", 2, 5, 4)
    columns = stages.forward_program.columns
    ran = np.argwhere(columns["kind"] == F)
    cells = {(columns["stage"][tuple(i)], columns["microbatch"][tuple(i)]) for i in ran}
    assert len(ran) == 20
    assert cells == {(s, m) for s in range(4) for m in range(5)}
    assert stages.forward_program.slots["residual_w"] == 0


@pytest.mark.parametrize(
    ("numbers", "layout", "most"),
    [
        (("1f1b", 4, 8, 8), {}, 1),
        (("zb_v", 2, 5, 8), {"remat": "keep:1"}, 1),
        (("seq1f1b", 4, 8, 8), {"sequence_chunks": 2}, 1),
        (("chimera", 4, 8, 8), {}, 2),
        (("dualpipe", 4, 10, 8), {}, 2),
        (("dualpipe_v", 4, 8, 8, 2), {}, 1),
    ],
    ids=str,
)
def test_all_ranks_compute_the_head_of_each_backward_pass_of_the_last_stage(numbers, layout, most):
    """At the tick of that pass, from the slot of its rank's inbox, on every rank alike."""
    assert "head_rank" not in stages_of(*numbers, **layout).columns
    stages = stages_of(*numbers, head="sliced", **layout)
    program, columns = stages.program.columns, stages.columns
    heads = [columns[name] for name in HEAD_COLUMNS]
    assert heads[0].shape[-1] == most
    found = set()
    for tick, lane in np.argwhere(columns[HEAD_RANK][:, 0] >= 0):
        cells = np.stack([one[tick, :, lane] for one in heads])
        assert (cells == cells[:, :1]).all()
        found.add((int(tick), *cells[:, 0].tolist()))
    last = (program["stage"] == stages.table.order.stages - 1) & np.isin(program["kind"], (B, X))
    wanted = {
        (tick, program["microbatch"][cell], program["segment"][cell], rank, program["inbox"][cell])
        for tick, rank, lane in np.argwhere(last).tolist()
        for cell in [(tick, rank, lane)]
    }
    segments = layout.get("sequence_chunks", 1)
    assert len(found) == len(wanted) == numbers[2] * segments
    assert found == wanted
    assert stages.trips[HEAD] == pytest.approx(len(found) / (len(heads[0]) * most))


def test_a_sliced_head_leaves_stages_even_and_is_in_every_tick_that_has_one():
    """Of a head of four layers, 2 stages of 8 layers: a tick of a backward pass of the last stage
    is longer by 3 * 4 / 2."""
    last, sliced = (
        stages_of("1f1b", 2, 8, 16, head_cost=4.0, head=head) for head in ("last", "sliced")
    )
    assert sliced.layers == (8, 8)
    plain = simulate(sliced.table, Costs(f=8.0, b=8.0, w=8.0))
    run = sliced.simulated
    assert run.lockstep_makespan == plain.lockstep_makespan + 8 * 6.0
    work = 2 * 8 * (3 * 8.0 + 6.0)
    assert run.lockstep_idle_fraction == pytest.approx(1 - work / 2 / run.lockstep_makespan)
    assert run.lockstep_makespan < last.simulated.lockstep_makespan


REFUSED = [
    (("seq1f1b", 2, 4, 8), {}, None),
    (("chimera", 3, 6, 8), {}, "chimera needs an even number of pipeline"),
    (("1f1b", 4, 8, 3), {}, "model.num_layers = 3 is less than the 4 stages"),
    (("interleaved", 4, 8, 6, 2), {}, "set model.num_layers = 8, or layout.pipeline = 3"),
    (
        ("interleaved", 4, 6, 8, 2),
        {},
        "needs microbatches to be a multiple of pipeline",
    ),
    (("zb_v", 4, 6, 8), {}, "needs microbatches >= 2 \\* pipeline - 1.*microbatches = 7"),
    (("1f1b", 2, 4, 8, 2), {}, "1f1b needs virtual_stages = 1"),
    (("zb_h1:fused", 2, 4, 8), {}, "has separate input and weight gradients"),
    (("1f1b:4,4,4", 2, 4, 8), {}, "2: layout.pipeline = 2 x 1 chunks; give 2 numbers"),
    (("1f1b:4,3", 2, 4, 8), {}, "7 in all, and model.num_layers = 8; give numbers that sum"),
    (("missing.csv", 2, 4, 8), {}, "missing.csv"),
]


@pytest.mark.parametrize(("numbers", "options", "match"), REFUSED, ids=str)
def test_refusals_name_the_setting(numbers, options, match):
    if match is None:
        assert stages_of(*numbers, **options).layers == (4, 4)  # whole sequences: plain 1F1B
        return
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        stages_of(*numbers, **options)


def test_an_order_from_a_file(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(write_csv(make_order("zb_h1", 2, 4)))
    assert stages_of(str(file), 2, 4, 8).table.ticks == stages_of("zb_h1", 2, 4, 8).table.ticks
    with pytest.raises(ValueError, match="is an order for pipeline = 2"):
        stages_of(str(file), 4, 4, 8)
    with pytest.raises(ValueError, match="is an order for microbatches = 4"):
        stages_of(str(file), 2, 8, 8)
    with pytest.raises(ValueError, match="has no R"):
        stages_of(str(file), 2, 4, 8, remat="full")
    file.write_text("0F0,0B0,0W0\n1B0,1F0,1W0\n")
    with pytest.raises(ValueError, match="deadlock"):
        stages_of(str(file), 2, 1, 8)
