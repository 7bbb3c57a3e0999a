"""A schedule from outside the package is drawn, simulated, planned, searched over and run, through
its record alone.
"""

import dataclasses
import sys
import types

import jax
import numpy as np
import pytest

from jaxscale.autotune.search_space import candidates
from jaxscale.config import from_dict, load, to_dict
from jaxscale.config.schedule_spec import parse_schedule
from jaxscale.pipeline import draw
from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.simulator import peak_stash, simulate
from jaxscale.pipeline.table import compile_order
from jaxscale.pipeline_schedules.shipped import find_schedule
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.search.search import search_layouts
from jaxscale.planner.search.space import Query
from jaxscale.planner.tables.table_makespan import OperationSeconds, TableSpec, makespan
from tests.invariants.layouts import (
    LEAST_GRADIENT,
    compile_step,
    initial_state,
    make_config,
    open_engine,
    relative_error,
    run,
)
from tests.pipeline.eager_1f1b import EAGER_1F1B

EAGER = "tests.pipeline.eager_1f1b:EAGER_1F1B"
MODEL = {
    "num_layers": 3,
    "d_model": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 24,
    "vocab_size": 257,
}


@pytest.mark.proof
def test_it_gives_the_gradients_of_one_device():
    one = make_config(MODEL, {})
    engine = open_engine(make_config(MODEL, {"pipeline": 3, "microbatches": 8, "schedule": EAGER}))
    assert max(engine.stages.program.slots.values()) > 3, "1F1B would need no more on three ranks"
    state = jax.tree.map(
        lambda x, leaf: jax.device_put(x, leaf.sharding), initial_state(one), engine.abstract_state
    )
    got = run(engine, state, step=compile_step(engine))
    expected = run(reference := open_engine(one), step=compile_step(reference))
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-10, atol=0)
    np.testing.assert_allclose(got.norms, expected.norms, rtol=1e-10, atol=0)
    assert relative_error(got.params, expected.params) < 1e-10
    assert relative_error(got.gradients[0], expected.gradients[0], LEAST_GRADIENT) < 1e-10


def test_it_is_drawn_and_simulated():
    table = compile_order(make_order(EAGER, 3, 4, fused=True))
    played = simulate(table)
    assert played.makespan == simulate(compile_order(make_order("1f1b", 3, 4, fused=True))).makespan
    assert draw.timeline_text(table, played.start, played.duration).splitlines() == [
        "rank 0 |F0F1F2F3......X0==..X1==..X2==..X3==|",
        "rank 1 |..F0F1F2..X0==F3X1==..X2==..X3==....|",
        "rank 2 |....F0X0==F1X1==F2X2==F3X3==........|",
    ]
    assert peak_stash(compile_order(make_order(EAGER, 4, 16))).tolist() == [7, 5, 3, 1]


def test_the_planner_knows_how_long_it_takes():
    for ranks, microbatches in ((3, 40), (4, 33)):
        played = simulate(compile_order(make_order(EAGER, ranks, microbatches)))
        seconds = makespan(TableSpec(EAGER, ranks, microbatches), OperationSeconds())
        assert seconds == pytest.approx(played.lockstep_makespan, rel=1e-12)
        assert TableSpec(EAGER, ranks, microbatches).settled < microbatches


@pytest.mark.proof
def test_it_is_searched_over():
    config = load("configs/tiny.py", ["data.global_batch_size=16", "model.num_layers=8"])
    found = search_layouts(
        Query(config, make_cluster("A100-40", 4), {"schedule": EAGER, "pipeline": 4}), 3
    )
    assert {parse_schedule(layout.schedule).name for layout in found.layouts} == {EAGER}
    own = from_dict(to_dict(config) | {"layout": {"pipeline": 2, "schedule": EAGER}})
    assert {one["schedule"] for one in candidates(config, 4)} < {
        one["schedule"] for one in candidates(own, 4)
    }
    pinned = candidates(config, 4, {"schedule": EAGER, "pipeline": 2})
    assert {(one["schedule"], one["virtual_stages"]) for one in pinned} == {(EAGER, 1)}


@pytest.mark.parametrize("choices", ["", ":fused", ":fused:3,2", ":3,2"])
def test_a_config_keeps_what_was_written(choices):
    config = from_dict({"layout": {"pipeline": 2, "schedule": EAGER + choices}})
    assert config.layout.schedule_spec.name == EAGER
    assert str(config.layout.schedule_spec) == to_dict(config)["layout"]["schedule"]
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("tests.pipeline.missing:EAGER_1F1B", "No module named 'tests.pipeline.missing'"),
        ("tests.pipeline.eager_1f1b:EAGER", "has no attribute 'EAGER'"),
        ("tests.pipeline.eager_1f1b:F", "is of type int; it must be a jaxscale.pipeline_schedules"),
        ("zbv:record", "did you mean 'zb_v'"),
        (f"{EAGER}:fuse", "'fuse' is not an option"),
    ],
)
def test_what_cannot_be_found_is_refused_with_the_config(schedule, said):
    with pytest.raises(ValueError, match=r"^layout\.schedule = ") as error:
        load("configs/tiny.py", [f"layout.schedule={schedule}"])
    assert said in str(error.value)


def cell_of(monkeypatch, record) -> types.ModuleType:
    """A module with a record, "cell:MINE"."""
    cell = types.ModuleType("cell")
    cell.MINE = record
    monkeypatch.setitem(sys.modules, "cell", cell)
    return cell


def test_a_record_that_a_cell_defines_anew_is_the_new_one(monkeypatch):
    cell = cell_of(monkeypatch, EAGER_1F1B)
    assert make_order("cell:MINE", 3, 4).rows == make_order(EAGER, 3, 4).rows
    cell.MINE = find_schedule("gpipe")
    assert make_order("cell:MINE", 3, 4).rows == make_order("gpipe", 3, 4).rows


def test_rows_of_another_number_of_ranks_are_refused(monkeypatch):
    cell_of(monkeypatch, dataclasses.replace(EAGER_1F1B, make_rows=lambda p, m, v, k: [[]] * 2))
    with pytest.raises(ValueError, match="cell:MINE makes the rows of 2 ranks for stages = 3"):
        make_order("cell:MINE", 3, 4)
