"""The compiled executor: its memory is what the table says, and nothing in it is copied."""

import functools
import re

import jax
import numpy as np
import pytest

from jaxscale.compiled import hlo
from jaxscale.compiled.flops import computation_costs, instruction_flops
from jaxscale.config import from_dict
from jaxscale.planner.memory.step import step_memory
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine

pytestmark = pytest.mark.compiles

RANKS, SEQ_LEN = 4, 64
MEMORIES = "residual_b", "memory", "memory_gradient"


@functools.cache
def opened(schedule: str, microbatches: int, model=(), **layout):
    """The engine of a small model whose activations outweigh its parameters, with other settings
    of the `model`."""
    shards = layout.get("fsdp", 1)
    config = from_dict(
        {
            "model": {
                "num_layers": 8,
                "d_model": 32,
                "num_heads": 2,
                "num_kv_heads": 2,
                "head_dim": 16,
                "d_ff": 96,
                "vocab_size": 64,
                "compute_dtype": "float32",
                **dict(model),
            },
            "data": {"global_batch_size": 2 * microbatches * shards, "seq_len": SEQ_LEN},
            "layout": {
                "data": 1,
                "pipeline": RANKS,
                "microbatches": microbatches,
                "schedule": schedule,
                **layout,
            },
        }
    )
    return make_engine(config, make_mesh(config.layout, jax.devices()[: RANKS * shards]))


@functools.cache
def compiled(schedule: str, microbatches: int, **layout):
    """(engine, its compiled step)."""
    engine = opened(schedule, microbatches, **layout)
    lowered = engine.step.lower(engine.abstract_state, engine.abstract_batch)
    options = {"xla_backend_optimization_level": 0}
    return engine, lowered.compile(compiler_options=options)


def temporaries(*args, **layout) -> int:
    return compiled(*args, **layout)[1].memory_analysis().temp_size_in_bytes


def kept(*args, **layout) -> list[jax.ShapeDtypeStruct]:
    """The arrays that a rank keeps between ticks."""
    engine, _ = compiled(*args, **layout)
    return jax.tree.leaves(engine.pipeline_buffers())


def predicted(*args, **layout) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in kept(*args, **layout))


@pytest.mark.proof
def test_1f1b_needs_no_more_for_more_microbatches():
    few, many = temporaries("1f1b", 4 * RANKS), temporaries("1f1b", 8 * RANKS)
    assert many == pytest.approx(few, rel=0.02)
    assert temporaries("gpipe", 8 * RANKS) > 1.8 * temporaries("gpipe", 4 * RANKS)


@pytest.mark.proof
def test_memory_is_that_of_the_slots():
    """In addition to a rank's buffers only the working set of one operation, for any schedule."""
    work = temporaries("1f1b", 4 * RANKS) - predicted("1f1b", 4 * RANKS)
    for schedule, microbatches in (
        ("gpipe", 4 * RANKS),
        ("gpipe", 8 * RANKS),
        ("1f1b", 8 * RANKS),
        ("zb_h2", 4 * RANKS),
        ("chimera", 4 * RANKS),
    ):
        expected = predicted(schedule, microbatches) + work
        assert temporaries(schedule, microbatches) == pytest.approx(expected, rel=0.02), schedule


CHUNKS = {"virtual_stages": 2}
EQUAL = {"sequence_chunks": 4}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("schedule", "layout", "same_work"),
    [
        ("bitpipe", CHUNKS, ("interleaved", CHUNKS)),
        pytest.param(
            *("seq1f1b", {**EQUAL, "segment_lengths": "24,16,16,8"}, ("seq1f1b", EQUAL)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["bitpipe", "unequal segments"],
)
def test_memory_is_that_of_the_slots_and_the_same_working_set(schedule, layout, same_work):
    """Bodies over as many layers, or as long a sequence at most, have the same working set."""
    other, its_layout = same_work
    work = temporaries(other, 16, **its_layout) - predicted(other, 16, **its_layout)
    expected = predicted(schedule, 16, **layout) + work
    assert temporaries(schedule, 16, **layout) == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "layout"), [("bitpipe", CHUNKS), ("dualpipe", {}), ("dualpipe_v", CHUNKS)]
)
def test_two_directions_need_no_more_for_more_microbatches(schedule, layout):
    few, many = (temporaries(schedule, count, **layout) for count in (16, 32))
    assert predicted(schedule, 16, **layout) == predicted(schedule, 32, **layout)
    assert many == pytest.approx(few, rel=0.02)


def counted_flops(schedule: str, **layout) -> float:
    """FLOPs of a step of a rank, by the trips of the table."""
    engine, step = compiled(schedule, 4 * RANKS, **layout)
    assert engine.stages is not None
    program = hlo.parse_hlo(step.as_text(), engine.stages.trips)
    return computation_costs(program, instruction_flops)[program.entry]


@pytest.mark.proof
def test_all_schedules_of_a_step_count_the_same_flops():
    """Nothing is computed in ticks without an operation: with one layer in a chunk XLA would move
    the matmuls of W out of its loop."""
    expected = counted_flops("1f1b")
    for schedule, layout in (
        ("zb_h2", {}),
        ("chimera", {}),
        ("dualpipe_v", {"virtual_stages": 2}),  # chunks of one layer
    ):
        assert counted_flops(schedule, **layout) == pytest.approx(expected, rel=1e-9), schedule
    # Attention skips more of the hidden scores in shorter blocks.
    assert 0.95 * expected < counted_flops("seq1f1b", sequence_chunks=2) < expected


@pytest.mark.proof
def test_memory_of_segments_is_that_of_their_slots():
    """Activations of (p + k - 1) / k micro-batches on the first rank, one array of keys and values
    for each of these micro-batches, and one of their gradients, as the planner counts them."""
    saved, again = ({"sequence_chunks": 2, "remat": remat} for remat in ("none", "full"))
    engine, _ = compiled("seq1f1b", 4 * RANKS, **saved)
    buffers = engine.pipeline_buffers()
    slots = {name: [x.shape[0] for x in jax.tree.leaves(buffers[name])] for name in MEMORIES}
    assert set(slots["residual_b"]) == {RANKS + 1}
    assert slots["memory"] == [-(-(RANKS + 1) // 2)] * 2  # keys and values
    assert slots["memory_gradient"] == [1] * 2
    arrays = jax.tree.leaves([buffers[name] for name in (*MEMORIES, "residual_w", "cotangent")])
    held = sum(x.size * x.dtype.itemsize for x in arrays)
    assert step_memory(engine.config).stash == pytest.approx(held, rel=0.001)
    # The bodies are the same, except for the input of a pass.
    work = [
        temporaries("seq1f1b", 4 * RANKS, **one) - predicted("seq1f1b", 4 * RANKS, **one)
        for one in (saved, again)
    ]
    needs = [temporaries("seq1f1b", 4 * RANKS, **one) for one in (saved, again)]
    assert needs[0] > 1.3 * needs[1]
    assert abs(work[0] - work[1]) < 0.02 * needs[1]


@pytest.mark.slow
def test_memory_of_passes_that_are_kept_is_that_of_their_slots():
    layouts = [{"remat": remat} for remat in ("full", "keep:2")]
    work = [
        temporaries("1f1b", 4 * RANKS, **one) - predicted("1f1b", 4 * RANKS, **one)
        for one in layouts
    ]
    assert predicted("1f1b", 4 * RANKS, **layouts[1]) > 1.3 * predicted(
        "1f1b", 4 * RANKS, **layouts[0]
    )
    needs = temporaries("1f1b", 4 * RANKS, **layouts[0])
    # The bodies are the same, except for the input of a pass.
    assert np.abs(np.subtract(work, work[0])).max() < 0.02 * needs


@pytest.mark.proof
def test_memory_of_a_sliced_head_is_a_part_of_it():
    """Of the buffers the accumulators; the planner's bytes and the compiled ones differ by as much
    as with a whole head."""
    wide = {"vocab_size": 4096}
    last, sliced = ({"model": tuple(wide.items()), "head": head} for head in ("last", "sliced"))
    saved = predicted("1f1b", 4 * RANKS, **last) - predicted("1f1b", 4 * RANKS, **sliced)
    assert saved == (RANKS - 1) * 4 * 32 * 4096 // RANKS
    needs = [temporaries("1f1b", 4 * RANKS, **one) for one in (last, sliced)]
    planned = [
        step_memory(compiled("1f1b", 4 * RANKS, **one)[0].config).temporaries
        for one in (last, sliced)
    ]
    assert needs[1] < 0.75 * needs[0]
    assert planned[1] == pytest.approx(needs[1], rel=0.02)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("1f1b", {}),
        ("1f1b", {"head": "sliced"}),
        ("zb_h2", {}),
        ("1f1b", {"remat": "keep:2"}),
        # Forward and backward passes in one loop read and write the same buffers.
        ("dualpipe_v", {"virtual_stages": 2}),
        ("seq1f1b", {"sequence_chunks": 2}),
    ],
    ids=str,
)
def test_no_tick_copies_a_buffer(schedule, layout):
    """Every update is in place: an array of the shape of a buffer or of an accumulator is copied
    before the first tick, if at all."""
    _, program = compiled(schedule, 4 * RANKS, **layout)
    buffers = kept(schedule, 4 * RANKS, **layout)
    shapes = {leaf.shape for leaf in buffers if leaf.size > 1000}
    assert len(shapes) > 5
    assert copies(program.as_text(), shapes) == []


def copies(text: str, shapes: set[tuple[int, ...]]) -> list[str]:
    """Copies of such arrays inside of loops."""
    program = hlo.parse_hlo(text)
    inside = {
        callee
        for instructions in program.computations.values()
        for instruction in instructions
        if instruction.opcode == "while"
        for callee, _ in program.calls(instruction)
    }
    for name in program.callers_first():
        if name in inside:
            inside |= {c for i in program.computations[name] for c, _ in program.calls(i)}
    return [
        f"{name}: {instruction.name} {instruction.shape}"
        for name in inside
        for instruction in program.computations[name]
        if instruction.opcode in ("copy", "copy-start")
        if any(dims in shapes for _, dims in hlo.arrays(instruction.shape))
    ]


def test_the_test_of_copies_finds_them():
    """Buffers that change places cannot be updated in place."""
    shape = (4, 2, 32, 32)

    def run(state):
        return jax.lax.scan(lambda s, i: ((s[1].at[i].add(1), s[0]), None), state, np.arange(4))[0]

    buffer = jax.ShapeDtypeStruct(shape, np.float32)
    assert copies(jax.jit(run).lower((buffer, buffer)).compile().as_text(), {shape})


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_by_layer_a_rank_carries_no_weights_and_no_gradients_of_a_chunk(schedule):
    chunks = {"virtual_stages": 1 + (schedule == "interleaved")}
    for gather, carries in (("chunk", True), ("layer", False)):
        kept = opened(schedule, 4, fsdp=2, pipeline_gather=gather, **chunks).pipeline_buffers()
        pending, _ = kept["gradients"]
        assert bool(jax.tree.leaves(kept["weights"])) == carries
        assert bool(jax.tree.leaves(pending)) == carries


@pytest.mark.proof
def test_zero_3_gathers_a_chunk_once_a_window_and_scatters_once():
    """The sites of collectives over fsdp, each in a loop of no trip or one that the table's
    columns open: gathers of the chunk's stack, reductions of its gradients."""
    engine, program = compiled("breadth_first", 8, fsdp=2, zero_stage=3, virtual_stages=2)
    assert engine.stages is not None
    columns, (ranks, chunks) = engine.stages.program.columns, engine.stages.counts.shape
    assert np.all((columns["gather"] == 1).sum(axis=(0, 2)) <= 2 * chunks)
    assert np.all((columns["reduce"] == 1).sum(axis=(0, 2)) == chunks)
    matrices = sum(
        "embed" in axes
        for axes in jax.tree.leaves(
            engine.zero.axes["layers"], is_leaf=lambda node: type(node) is tuple
        )
    )
    text = program.as_text()
    of_layers = [
        line
        for line in text.splitlines()
        if re.search(r"= \S+ (all-gather|reduce-scatter)\(", line)
        and "{'fsdp'}" in line
        and "while/body" in line
    ]
    assert ranks == RANKS
    gathers = [line for line in of_layers if "all-gather(" in line]
    scatters = [line for line in of_layers if "reduce-scatter(" in line]
    outer = 3  # gradients of the embedding, of the head and of its norm, each visit
    assert len(gathers) == matrices
    assert len(scatters) == matrices + outer


@pytest.mark.proof
def test_what_is_outside_the_layers_is_spread_over_the_pipeline():
    engine, _ = compiled("1f1b", 4 * RANKS)
    for part in ("embed", "head"):
        for leaf in jax.tree.leaves(engine.abstract_state.params[part]):
            assert leaf.sharding.shard_shape(leaf.shape) != leaf.shape
            assert np.prod(leaf.sharding.shard_shape(leaf.shape)) == leaf.size // RANKS
