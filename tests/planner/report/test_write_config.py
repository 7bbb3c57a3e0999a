"""A config that a plan is written to trains, and layers split by seconds can be run."""

import dataclasses

import numpy as np
import pytest

from jaxscale import config as configs
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.report.write_config import write_plan
from jaxscale.planner.search.balance_layers import balance_by_seconds, rebalance_layers
from jaxscale.planner.search.plan import predict_plan
from jaxscale.planner.search.search import search_layouts
from jaxscale.planner.search.space import Query
from tests.invariants.layouts import LLAMA, compile_step, make_config, open_engine, run


def losses(config) -> np.ndarray:
    """Of two steps."""
    engine = open_engine(config)
    return run(engine, first=3, step=compile_step(engine)).losses


@pytest.mark.proof
def test_a_written_config_trains(tmp_path):
    one = make_config(LLAMA, {}, "float32")
    pins = {
        "pipeline": 2,
        "context": 1,
        "microbatches": 4,
        "schedule": "1f1b",
        "remat": "full",
        "offload": "none",
    }
    query = Query(one, make_cluster("h100-sxm", 4), pins)
    plan = predict_plan(query, search_layouts(query, 1).layouts[0])
    write_plan(tmp_path / "mine.py", plan, "configs/tiny.py")
    loaded = configs.load(str(tmp_path / "mine.py"))
    assert loaded == plan.config
    np.testing.assert_allclose(losses(loaded), losses(one), rtol=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("mt5_base", []),
        # The default of another family, which is not that of this one.
        ("configs/tiny.py", ["model.family=gemma3", "model.tied_embeddings=False"]),
    ],
)
def test_a_written_config_has_the_settings_of_its_family(path, changes, tmp_path):
    config = configs.load(path, changes)
    query = Query(config, make_cluster("a100-80", 8), {"remat": "full", "pipeline": 1})
    plan = predict_plan(query, search_layouts(query, 1).layouts[0])
    write_plan(tmp_path / "mine.py", plan, path)
    assert configs.load(str(tmp_path / "mine.py")) == plan.config


@pytest.mark.proof
def test_layers_are_split_where_that_saves_time():
    config = configs.load("configs/llama3_8b.py")
    query = Query(config, make_cluster("h100-sxm", 64), {"pipeline": 8, "tensor": 1, "fsdp": 8})
    (layout,) = search_layouts(query, 1).layouts
    plan = predict_plan(query, layout)
    better = rebalance_layers(query, plan)
    assert sum(better.layers) == config.model.num_layers
    assert min(better.layers) >= 1
    assert better.step_seconds <= plan.step_seconds
    if better.layers != plan.layers:
        assert better.layout.schedule_spec.layers == better.layers
    # From a bad split it finds a good one.
    uneven = dataclasses.replace(layout, schedule="zb_h1:8,4,4,4,4,4,2,2", virtual_stages=0)
    bad = predict_plan(query, uneven)
    found = balance_by_seconds(query, bad)
    schedule = f"zb_h1:{','.join(map(str, found))}"
    good = predict_plan(query, dataclasses.replace(uneven, schedule=schedule))
    assert good.step_seconds < 0.9 * bad.step_seconds
