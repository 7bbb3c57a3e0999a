"""Every pipeline gives the loss, gradients and parameters of one device."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxscale.pipeline import layer_placement
from jaxscale.pipeline.buffer_slots import OFFLOADED
from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.schedule_csv import write_csv
from jaxscale.pipeline.simulator import Costs
from jaxscale.pipeline.solve_order import solve_order
from jaxscale.pipeline_schedules.operations import F, X
from jaxscale.planner.memory.step import step_memory
from jaxscale.run.setup.layout_report import describe_layout
from jaxscale.sharding.mesh import make_mesh
from jaxscale.sharding.resolve import is_axes
from jaxscale.training.engine import Engine, make_engine
from tests.invariants.layouts import (
    CLIP_NORM,
    EXPERTS,
    GPT,
    LEAST_GRADIENT,
    VOCABULARY,
    batches,
    compile_step,
    initial_state,
    make_config,
    open_engine,
    relative_error,
    run,
)
from tests.invariants.matrix import sample
from tests.invariants.test_layouts import INVOLUNTARY

# Nine layers, which divide over no number of stages here.
LLAMA = {
    "num_layers": 9,
    "d_model": 32,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 8,
    "d_ff": 48,
    "vocab_size": VOCABULARY,
    "z_loss": 1e-3,
}
DEEP_GPT = {**GPT, "num_layers": 5, "d_model": 32, "num_heads": 4, "num_kv_heads": 4, "d_ff": 64}
MODELS = {"llama": LLAMA, "gpt": DEEP_GPT, "experts": {**EXPERTS, "num_layers": 4}}
MODELS["deep experts"] = {
    **EXPERTS,
    "num_layers": 8,
    "balance_weight": 0.0,
}
MODELS["window"] = {**LLAMA, "num_kv_heads": 2, "sliding_window": 11}
ROWS = {"tensor": 2, "tensor_rows": 2}

CHOICES = (
    [
        {"schedule": "gpipe"},
        {"schedule": "1f1b"},
        {"schedule": "1f1b:fused"},
        {"schedule": "interleaved", "virtual_stages": 2},
        {"schedule": "breadth_first", "virtual_stages": 2},
        {"schedule": "zb_h2"},
        {"schedule": "zb_v"},
    ],
    [
        {"pipeline": 4, "fsdp": 2},
        {"pipeline": 2, "data": 2, "fsdp": 2},
        {"pipeline": 2, "fsdp": 2, "tensor": 2},
        {"pipeline": 2, "fsdp": 2, "context": 2, "context_method": "ulysses"},
    ],
    [{"zero_stage": stage} for stage in range(4)],
    [{"remat": "none"}, {"remat": "full"}, {"remat": "keep:1"}, {"remat": "save:query,attention"}],
)


# The program is of a table whatever the order in it: one layout of each schedule that differs from
# "1f1b", "interleaved" or "zb_v" in its order alone.
ALIKE = (
    {"schedule": "gpipe", "pipeline": 2, "data": 2, "fsdp": 2, "zero_stage": 1}
    | {"remat": "full", "microbatches": 4},
    {"schedule": "1f1b:fused", "pipeline": 2, "data": 2, "fsdp": 2, "zero_stage": 3}
    | {"remat": "keep:1", "microbatches": 4, "pipeline_gather": "layer"},
    {"schedule": "breadth_first", "virtual_stages": 2, "pipeline": 2, "fsdp": 2, "tensor": 2}
    | {"zero_stage": 2, "remat": "full", "microbatches": 8},
    {"schedule": "zb_h2", "pipeline": 4, "fsdp": 2, "zero_stage": 3}
    | {"remat": "save:query,attention", "microbatches": 8, "pipeline_gather": "layer"},
)
DIRECTIONS = (
    {"schedule": "chimera", "pipeline": 2, "data": 2, "fsdp": 2, "zero_stage": 1}
    | {"remat": "full", "microbatches": 4},
    {"schedule": "dualpipe_v", "virtual_stages": 2, "pipeline": 4, "fsdp": 2, "zero_stage": 3}
    | {"remat": "save:query,attention", "microbatches": 8, "pipeline_gather": "layer"},
)
"""Two directions, or overlapped pairs of operations."""
V_IN_TWO_DIRECTIONS = {
    "schedule": "bitpipe",
    "virtual_stages": 2,
    "pipeline": 4,
    "fsdp": 2,
    "zero_stage": 3,
} | {"remat": "none", "microbatches": 8}
PAIRED_EXPERTS = {"schedule": "dualpipe", "pipeline": 2, "expert": 2, "fsdp": 2, "microbatches": 4}
TURNS = (0, 0, 0), (0, 1, 3), (0, 2, 1)
"""Of each schedule, by how many places the choices of meshes, stages and policies are turned."""
BY_LAYER = {
    "schedule": "interleaved",
    "virtual_stages": 2,
    "pipeline": 2,
    "fsdp": 2,
    "tensor": 2,
} | {"remat": "full", "microbatches": 8, "pipeline_gather": "layer"}
"""Weights and gradients a layer at a time, as in others here."""


def pipeline(*parts: dict[str, Any]) -> dict[str, Any]:
    """A layout, with as many micro-batches as the schedule and the batch allow."""
    layout = dict(itertools.chain(*(part.items() for part in parts)))
    return {**layout, "microbatches": 4 if "data" in layout else 8}


def every_pipeline() -> list[dict[str, Any]]:
    """The whole product."""
    return [pipeline(*parts) for parts in itertools.product(*CHOICES)]


def each_schedule() -> list[Any]:
    """Each schedule that is like no other one with each other choice, and three of four pairs of
    these: a mesh has another ZeRO stage, and another remat policy, with each schedule. Every other
    one is slow."""
    schedules, *others = CHOICES
    alike = {layout["schedule"] for layout in ALIKE}
    schedules = [choice for choice in schedules if choice["schedule"] not in alike]
    layouts = [
        pipeline(schedule, *(each[(place + turn) % 4] for each, turn in zip(others, turns)))
        for schedule, turns in zip(schedules, TURNS, strict=True)
        for place in range(4)
    ]
    return [
        pytest.param(layout, marks=pytest.mark.slow) if sum(divmod(number, 4)) % 2 else layout
        for number, layout in enumerate(layouts)
    ]


def name(layout: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in layout.items())


@functools.cache
def one_device(family: str):
    return run(open_engine(make_config(MODELS[family], {})))


def check_pipeline(layout: dict[str, Any], family: str = "llama"):
    """Five steps against one device."""
    engine = open_engine(make_config(MODELS[family], layout))
    errors_of(engine, family)
    return engine


def errors_of(engine: Engine, family: str) -> dict[str, float]:
    """Runs five steps; the relative errors against one device."""
    state = initial_state(make_config(MODELS[family], {}))
    got = run(engine, on_ranks(engine, state), step=compile_step(engine))
    expected = one_device(family)
    errors = {
        "loss": np.max(np.abs(got.losses / expected.losses - 1)),
        "gradient norm": np.max(np.abs(got.norms / expected.norms - 1)),
        "gradients": 0.0,
        "parameters": relative_error(in_order(engine, got.params), expected.params),
    }
    for gradients, wanted in zip(got.gradients, expected.gradients, strict=True):
        error = relative_error(in_order(engine, gradients), wanted, LEAST_GRADIENT)
        errors["gradients"] = max(errors["gradients"], error)
    assert max(errors.values()) < 1e-10, errors
    assert np.all(expected.norms > CLIP_NORM), "clipping must act for this to test it"
    return errors


def on_ranks(engine, state):
    """A canonical state of NumPy arrays as the engine has it."""
    rows = engine.placement.layer_of_row["layers"]

    def one(axes, x, leaf):
        if "layers" in axes:
            x = np.where(rows.reshape(-1, *(1,) * (x.ndim - 1)) >= 0, x[rows], 0)
        return jax.device_put(x, leaf.sharding)

    return jax.tree.map(one, engine.placement.axes, state, engine.abstract_state, is_leaf=is_axes)


def in_order(engine, params):
    """The layers of NumPy arrays in the order of the model; the rows beside them are zeros."""
    rows = engine.placement.layer_of_row["layers"]
    place = np.argsort(np.where(rows < 0, len(rows), rows), kind="stable")
    layers = np.sum(rows >= 0)
    for leaf in jax.tree.leaves(params["layers"]):
        assert not leaf[place[layers:]].any(), "what fills up a stack must stay zero"
    return {**params, "layers": jax.tree.map(lambda x: x[place[:layers]], params["layers"])}


SEGMENTS = (
    {"schedule": "seq1f1b", "sequence_chunks": 4, "pipeline": 4, "fsdp": 2, "zero_stage": 3}
    | {"remat": "none", "microbatches": 8},
    {"schedule": "seq1f1b", "sequence_chunks": 2, "pipeline": 2, "fsdp": 2, "context": 2}
    | {"context_method": "gather", "zero_stage": 2, "remat": "full", "microbatches": 8},
    {"schedule": "seq1f1b_interleaved", "sequence_chunks": 2, "segment_lengths": "24,8"}
    | {"virtual_stages": 2, "pipeline": 2, "fsdp": 2, "tensor": 2, "zero_stage": 1}
    | {"remat": "keep:3", "microbatches": 8},
)
"""Of packed documents, as all rows here."""
MORE_SEGMENTS = (
    {"schedule": "seq1f1b_interleaved", "sequence_chunks": 2, "virtual_stages": 2, "pipeline": 2}
    | {"fsdp": 2, "tensor": 2, "zero_stage": 1, "remat": "keep:3", "microbatches": 8},
    {"schedule": "seq1f1b", "sequence_chunks": 3, "segment_lengths": "16,8,8", "pipeline": 4}
    | {"fsdp": 2, "zero_stage": 3, "remat": "none", "microbatches": 8},
    {"schedule": "seq1f1b", "sequence_chunks": 2, "segment_lengths": "20,12", "pipeline": 2}
    | {"fsdp": 2, "context": 2, "context_method": "gather", "zero_stage": 2, "remat": "full"}
    | {"microbatches": 8},
)

SLICED = (
    # Neither the columns of the head, padded to 384, nor d_model divide over the ranks.
    {"schedule": "1f1b", "pipeline": 5, "remat": "none", "microbatches": 8},
    {"schedule": "interleaved", "virtual_stages": 2, "pipeline": 2, "fsdp": 2, "tensor": 2}
    | {"zero_stage": 3, "remat": "full", "microbatches": 8},
    {"schedule": "zb_v", "pipeline": 4, "fsdp": 2, "zero_stage": 1, "remat": "keep:1"}
    | {"microbatches": 8},
    {"schedule": "seq1f1b", "sequence_chunks": 2, "pipeline": 2, "fsdp": 2, "context": 2}
    | {"context_method": "gather", "zero_stage": 2, "remat": "full", "microbatches": 8},
    *DIRECTIONS,
)
"""With a slice of the head on each rank."""
SLICED_ALIKE = *SLICED[2:4], DIRECTIONS[0]
"""Whose programs are those of others here, in another order or by segments."""

SLOW = [
    pytest.param(layout, marks=pytest.mark.slow)
    for layout in (*ALIKE[:-1], V_IN_TWO_DIRECTIONS, *MORE_SEGMENTS)
]


@pytest.mark.proof
@pytest.mark.parametrize(
    "layout",
    [*each_schedule(), ALIKE[-1], BY_LAYER, *DIRECTIONS, *SEGMENTS, *SLOW],
    ids=name,
)
def test_every_pipeline_is_one_device_in_float64(layout, capfd):
    check_pipeline(layout)
    assert INVOLUNTARY not in capfd.readouterr().err


@pytest.mark.proof
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=pytest.mark.slow) if layout in SLICED_ALIKE else layout
        for layout in SLICED
    ],
    ids=name,
)
def test_a_sliced_head_is_one_device_in_float64(layout, capfd):
    check_pipeline({**layout, "head": "sliced"})
    assert INVOLUNTARY not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("layout", sample(every_pipeline()), ids=name)
def test_a_sample_of_all_pipelines_is_one_device_in_float64(layout):
    check_pipeline(layout)


@pytest.mark.proof
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            {"pipeline": 4, "schedule": "1f1b", "microbatches": 8, "tensor": 2},
            marks=pytest.mark.slow,
        ),
        {"pipeline": 4, "schedule": "1f1b", "microbatches": 8, "tensor": 2, "head": "sliced"},
        {"pipeline": 2, "schedule": "zb_v", "microbatches": 4, "fsdp": 2, **ROWS}
        | {"pipeline_gather": "layer"},
        # Layers as one chooses; d_model does not divide over three ranks, so what is outside the
        # layers is whole on each.
        {"pipeline": 3, "schedule": "zb_h1:1,3,1", "microbatches": 8, "fsdp": 2, "zero_stage": 2}
        | {"pipeline_gather": "layer"},
    ],
    ids=name,
)
def test_a_tied_gpt_is_one_device_in_float64(layout):
    check_pipeline(layout, "gpt")


@pytest.mark.proof
@pytest.mark.parametrize(
    "layout",
    [
        {"schedule": "1f1b", "pipeline": 2, "context": 4, "microbatches": 8},
        pytest.param(
            {"schedule": "1f1b", "pipeline": 2, "context": 2, "fsdp": 2, "zero_stage": 2}
            | {"remat": "full", "microbatches": 8},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"schedule": "zb_v", "virtual_stages": 2, "pipeline": 2, "context": 4}
            | {"zero_stage": 1, "remat": "keep:1", "microbatches": 8},
            marks=pytest.mark.slow,
        ),
        {"schedule": "dualpipe", "pipeline": 2, "context": 2, "fsdp": 2, "microbatches": 8}
        | {"pipeline_gather": "layer"},
    ],
    ids=name,
)
def test_a_ring_in_a_pipeline_is_one_device(layout, capfd):
    """Neighbours of a stage exchange keys; windows end inside the parts of other ranks."""
    engine = check_pipeline(layout, "window")
    assert engine.layout.context_method == "ring"
    assert INVOLUNTARY not in capfd.readouterr().err


@pytest.mark.proof
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            {"schedule": "1f1b", "pipeline": 2, "fsdp": 2, "microbatches": 4},
            marks=pytest.mark.slow,
        ),
        {"schedule": "zb_v", "virtual_stages": 2, "pipeline": 2, "fsdp": 2, "microbatches": 8}
        | {"remat": "keep:2"},
    ],
    ids=name,
)
def test_offloaded_activations_change_no_bit(layout):
    """And what the planner has in host memory is what the slots have."""
    state = initial_state(make_config(LLAMA, {}))
    results = []
    for offload in ("none", "activations"):
        engine = open_engine(make_config(LLAMA, {**layout, "offload": offload}))
        results.append(run(engine, on_ranks(engine, state), step=compile_step(engine)))
    jax.tree.map(np.testing.assert_array_equal, *results)
    slots = engine.pipeline_buffers()
    held = jax.tree.leaves([slots[name] for name in OFFLOADED])
    stored = sum(x.size * x.dtype.itemsize for x in held)
    needs, whole = (step_memory(engine.config, own_host=own) for own in (True, False))
    assert needs.host_stash == whole.stash - needs.stash == pytest.approx(stored, rel=0.02)


@pytest.mark.proof
def test_experts_in_two_directions_and_overlapped_pairs_are_one_device():
    """Both passes of a pair have all-to-alls over the same ranks, in one loop."""
    engine = check_pipeline(PAIRED_EXPERTS, "experts")
    assert engine.stages is not None
    assert engine.stages.joint_pairs == ((F, X),)
    assert engine.stages.table.order.directions == 2


@pytest.mark.proof
def test_a_solved_order_from_a_file_is_one_device(tmp_path):
    file, costs = tmp_path / "mine.csv", Costs(b=(1.2, 2.0), w=0.8)
    start = [make_order("zb_h1", 2, 4)]
    found = solve_order(start, (2, 4, 1), costs, 3, seconds=600, threads=1).table.order
    assert found.rows != start[0].rows
    file.write_text(write_csv(found))
    check_pipeline({"pipeline": 2, "schedule": str(file), "microbatches": 4})


@pytest.mark.proof
def test_evaluation_is_one_device():
    """Forward passes alone, of every placement, with weights gathered on the way."""
    batch, num_bytes = batches()[0], np.arange(VOCABULARY, dtype=np.float32)
    layouts = [
        {},
        {"pipeline": 2, "schedule": "zb_v", "microbatches": 4, "fsdp": 2, "zero_stage": 3},
        {
            "pipeline": 2,
            "schedule": "interleaved",
            "virtual_stages": 2,
            "microbatches": 4,
            **ROWS,
        },
    ]
    results = []
    for layout in layouts:
        engine = open_engine(make_config(LLAMA, layout))
        params = on_ranks(engine, initial_state(make_config(LLAMA, {}))).params
        results.append(np.array(engine.evaluate(params, engine.shard(batch), num_bytes)))
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-12)


def device_bytes() -> int:
    """What is alive in the first device's own memory."""
    device, arrays = jax.devices()[0], jax.live_arrays()
    parts = (part.data for x in arrays if not x.is_deleted() for part in x.addressable_shards)
    found = {
        part.unsafe_buffer_pointer(): part.nbytes
        for part in parts
        if part.device == device and part.sharding.memory_kind == "device"
    }
    return sum(found.values())


# On three ranks some arrays of the canonical form are whole on each: 32 does not divide.
@pytest.mark.proof
@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2, "fsdp": 2},
        {"pipeline": 2, "schedule": "zb_v", "offload": "optimizer"},
        {"pipeline": 3, "schedule": "zb_h1:4,3,2", **ROWS},
    ],
    ids=name,
)
def test_places_and_back_to_the_bit(layout, monkeypatch, capfd):
    """Nor do the devices hold a second state on the way."""
    engine = open_engine(make_config(LLAMA, {"microbatches": 4, **layout}))
    fresh = initial_state(make_config(LLAMA, {}))
    placement, held, take = engine.placement, [], layer_placement._take
    placed = placement.from_canonical(fresh)
    jax.tree.map(np.testing.assert_array_equal, placed, on_ranks(engine, fresh))
    assert placement.from_canonical(placed) is placed

    def measured(*arguments):
        taken = jax.block_until_ready(take(*arguments))
        held.append(device_bytes())
        return taken

    monkeypatch.setattr(layer_placement, "_take", measured)
    before, forms = device_bytes(), (placement.abstract, placement.canonical)
    sizes = [
        np.prod(x.sharding.shard_shape(x.shape)) * 8
        for tree in forms
        for x in jax.tree.leaves(tree)
    ]
    saved = placement.to_canonical(placed, on_host=True)
    # One that came from host memory, the one it became, and what the host has still to copy.
    assert max(held) - before <= 3 * max(sizes) < sum(sizes) / 8
    assert device_bytes() == before
    jax.tree.map(np.testing.assert_array_equal, saved, fresh)

    canonical = placement.to_canonical(placed, donate=True)
    kept = zip(jax.tree.leaves(placement.to_canonical(canonical)), jax.tree.leaves(canonical))
    assert all(one is other for one, other in kept)
    shardings = (
        jax.tree.map(lambda x: x.sharding, tree) for tree in (canonical, placement.canonical)
    )
    assert next(shardings) == next(shardings)
    again = placement.from_canonical(canonical, donate=True)
    jax.tree.map(np.testing.assert_array_equal, again, on_ranks(engine, fresh))
    with pytest.raises(ValueError, match=r"in canonical form it is .*: pass a state from"):
        placement.from_canonical(jax.tree.map(lambda x: np.stack([x, x]), fresh))
    assert INVOLUNTARY not in capfd.readouterr().err


@pytest.mark.proof
def test_a_state_goes_to_the_devices_of_another_engine_in_canonical_form_only():
    chunks = {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2, "microbatches": 4}
    placements = [
        open_engine(make_config(LLAMA, layout)).placement
        for layout in (chunks, {"fsdp": 2}, {**chunks, "fsdp": 2})
    ]
    fresh = initial_state(make_config(LLAMA, {}))
    placed = placements[0].from_canonical(fresh)
    for other in placements[1:]:
        for place in (other.from_canonical, other.to_canonical):
            with pytest.raises(ValueError, match="another engine's pipeline, in its order"):
                place(placed)
        taken = other.from_canonical(placements[0].to_canonical(placed))
        shardings = [x.sharding for x in jax.tree.leaves(taken)]
        assert shardings == [x.sharding for x in jax.tree.leaves(other.abstract)]
        jax.tree.map(np.testing.assert_array_equal, other.to_canonical(taken), fresh)


@pytest.mark.proof
def test_the_state_of_an_own_optimizer_may_hold_an_empty_tuple():
    optimizer = optax.MultiSteps(optax.lion(1e-3), 2).gradient_transformation()
    layout = {"pipeline": 2, "microbatches": 4, "fsdp": 2}  # of nine layers
    config = make_config(LLAMA, layout)
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[:4]), optimizer=optimizer)
    shapes, state = engine.placement.canonical.params, engine.abstract_state.opt_state
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(optimizer.init, shapes))
    assert "skip_state=()" in str(state)
    assert "padding" in describe_layout(engine)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), engine.placement.canonical)
    placed = engine.placement.from_canonical(zeros)
    jax.tree.map(np.testing.assert_array_equal, engine.placement.to_canonical(placed), zeros)
