"""What a report says of the largest buffers."""

import jax
import pytest

from jaxscale.compiled import hlo
from jaxscale.compiled.attribute import SAVED, attribute_buffers
from jaxscale.compiled.live_buffers import live_at_peak
from jaxscale.config import from_dict
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine

pytestmark = pytest.mark.compiles

MODEL = {
    "num_layers": 8,
    "d_model": 32,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "d_ff": 96,
    "vocab_size": 64,
}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        # Settings that are set already are not proposed again.
        ({"fsdp": 2, "remat": "none"}, "remat = 'full', microbatches, offload = 'activations'"),
        ({"fsdp": 2, "remat": "full"}, "microbatches, offload = 'activations', context"),
        ({"pipeline": 2, "schedule": "gpipe", "microbatches": 8}, "schedule = '1f1b', context"),
    ],
    ids=str,
)
def test_what_waits_for_the_backward_pass_is_found(layout, settings):
    uses = _uses({**MODEL, "compute_dtype": "float32"}, layout)
    assert uses == sorted(uses, key=lambda use: -use.num_bytes)
    kept = [use for use in uses[:3] if use.what == SAVED]
    assert kept
    assert settings in kept[0].smaller_with


@pytest.mark.proof
def test_weights_that_a_step_keeps_are_found():
    uses = _uses({**MODEL, "d_ff": 1536}, {"fsdp": 2, "zero_stage": 2, "microbatches": 2})
    whole = next(use for use in uses if use.shape == "bf16[8,32,1536]")
    assert whole.what == "weights in use"
    assert whole.smaller_with == "zero_stage = 3, tensor, pipeline"


def _uses(model, layout):
    """Of the buffers of a step on two devices, 16 sequences of 256 tokens."""
    config = from_dict(
        {
            "model": model,
            "data": {"global_batch_size": 16, "seq_len": 256},
            "layout": {"data": 1, **layout},
        }
    )
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[:2]))
    lowered = engine.step.lower(engine.abstract_state, engine.abstract_batch)
    program = lowered.compile()
    scopes = engine.stages.trips if engine.stages else {}
    return attribute_buffers(live_at_peak(hlo.parse_hlo(program.as_text(), scopes)), engine)
