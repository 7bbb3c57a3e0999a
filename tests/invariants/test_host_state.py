"""A state with arrays in host memory trains to the bit as one on the device."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxscale.planner.memory import at_rest
from jaxscale.sharding.host_arrays import choose_host_arrays, most_host_bytes
from jaxscale.training.engine import Engine
from jaxscale.training.state_placement import state_arrays
from jaxscale.training.tracing.traces import model_trace
from tests.invariants.layouts import (
    EXPERTS,
    LLAMA,
    batches,
    make_config,
    one_devices_state,
    open_engine,
)

SMALL = {**LLAMA, "num_layers": 3, "d_model": 16, "num_heads": 4, "num_kv_heads": 2, "d_ff": 24}
# More experts than choices of a rank's tokens in a micro-batch: some have no token.
SPARSE = {**EXPERTS, "num_layers": 3, "d_model": 16, "d_ff": 8, "num_experts": 256}
LAYERED = {"microbatches": 2, "accumulation": "layered"}


def arrays_of(engine: Engine) -> list:
    return list(state_arrays(engine.abstract_state, engine.state_axes).values())


def open_with(model: dict, layout: dict, share: float = 1.0, **optimizer) -> Engine:
    """The engine with a share of what can be in host memory there; float32, in which sums in
    another order show."""
    resident = open_engine(make_config(model, layout, "float32", **optimizer))
    wanted = int(share * most_host_bytes(arrays_of(resident)))
    layout = {**layout, "offload_bytes": wanted}
    return open_engine(make_config(model, layout, "float32", **optimizer))


def train(engine: Engine, state) -> tuple:
    for batch in batches()[:2]:
        state, metrics = engine.step(state, engine.shard(batch))
    return state, metrics


def kinds(tree) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def check(model: dict, layout: dict, share: float = 1.0, **optimizer) -> Engine:
    """Two steps of both engines."""
    resident = open_engine(make_config(model, layout, "float32", **optimizer))
    engine = open_with(model, layout, share, **optimizer)
    got, expected = (train(one, one_devices_state(one)) for one in (engine, resident))
    assert "pinned_host" in kinds(got[0].opt_state)
    assert kinds(got[0]) == kinds(engine.abstract_state)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    return engine


@pytest.mark.proof
def test_weights_and_moments_in_host_memory_train_to_the_bit():
    """In stage 0, where nothing is gathered."""
    engine = check(SMALL, {"data": 2, "zero_stage": 0, "microbatches": 2})
    on_host = kinds(jax.tree.leaves(engine.abstract_state.params["layers"]))
    assert on_host == {"device", "pinned_host"}, "vectors stay on the device"
    assert kinds(engine.abstract_state.params["embed"]) == {"device"}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(
            SMALL, {"fsdp": 2, "zero_stage": 2, "microbatches": 2}, marks=pytest.mark.slow
        ),
        (SMALL, {"fsdp": 2, "context": 2, "zero_stage": 3, "microbatches": 2, "remat": "full"}),
        (SPARSE, {"fsdp": 2, "expert": 2, "zero_stage": 3, **LAYERED}),
    ],
    ids=str,
)
def test_every_stage_trains_to_the_bit(model, layout):
    check(model, layout)


@pytest.mark.parametrize(
    ("model", "layout", "name"),
    [
        (SMALL, {"context": 2, "fsdp": 2, "zero_stage": 1}, "adamw"),
        pytest.param(SPARSE, {"expert": 2, "fsdp": 2}, "muon", marks=pytest.mark.proof),
        pytest.param(SPARSE, {"expert": 2, "zero_stage": 0}, "adafactor", marks=pytest.mark.proof),
        pytest.param(SMALL, {"tensor": 2}, "lion", marks=pytest.mark.proof),
    ],
)
def test_the_planner_moves_the_arrays_that_the_engine_moves(model, layout, name):
    engine = open_engine(make_config(model, layout, "float32", name=name))
    config, rows = engine.config, model_trace(engine.config.model).stack_layers
    planned = at_rest.planned_arrays(config.model, config.optimizer, config.layout, rows)
    ours, theirs = (
        [(one.path, one.axes, one.device_bytes) for one, _ in choose_host_arrays(arrays, 0)]
        for arrays in (arrays_of(engine), planned)
    )
    assert ours == theirs
    totals = at_rest.host_totals(config.model, config.optimizer, config.layout, rows)
    half = dataclasses.replace(config.layout, offload_bytes=int(totals[len(totals) // 2]))
    on_host = at_rest.host_state(config.model, config.optimizer, half, rows)
    assert on_host.moments + sum(on_host.weights.values()) == half.offload_bytes


def test_more_than_the_state_is_refused():
    with pytest.raises(ValueError, match=r"offload_bytes = 99999999 is more than the \d+ bytes"):
        open_engine(make_config(SMALL, {"data": 1, "offload_bytes": 99_999_999}))
