"""The plan's FLOPs of a token are the engine's."""

import jax
import pytest

from jaxscale.config import from_dict, load
from jaxscale.planner.search.trainable_model import TrainableModel
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine
from tests.models import two_stacks

CUSTOM = {"family": "tests.models.two_stacks:make", **two_stacks.SETTINGS}
LAYOUT = {"layout": {"data": 1, "remat": "full"}}
OVERRIDES = ["layout.data=1", "layout.fsdp=1", "layout.remat=full"]


@pytest.mark.parametrize(
    "config",
    [
        load("tiny", OVERRIDES),
        load("mt5_small", [*OVERRIDES, "model.num_layers=2", "model.num_encoder_layers=3"]),
        load("moe_tiny", OVERRIDES),
        from_dict({"model": CUSTOM, **LAYOUT}),
    ],
    ids=["decoder", "encoder-decoder", "experts", "custom"],
)
def test_plan_and_engine_count_the_same(config):
    rules = {"distances": ()}  # of the custom model
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[:1]), rules=rules)
    counted, planned = engine.count_flops(), TrainableModel(config)
    assert counted.model == pytest.approx(planned.flops_per_token, rel=1e-12)
    assert counted.model > 0
    hardware = planned.hardware_flops_per_token("full", 0.0)
    assert counted.hardware == pytest.approx(hardware, rel=1e-12)
    assert hardware > counted.model
