"""The memory of the compiled step falls with the ZeRO stage as the formulas say."""

import jax
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.config import from_dict
from jaxscale.mesh import make_mesh
from jaxscale.step import make_engine

FSDP = 8


@pytest.fixture(scope="module")
def memory():
    """(arguments, temporaries) of one device in multiples of the parameters, for each stage."""
    return [_compiled(stage) for stage in range(4)]


def _compiled(stage: int) -> tuple[float, float]:
    """Many thin layers and few tokens, so that what ZeRO shards is nearly all there is."""
    config = from_dict(
        {
            "model": {
                "num_layers": 16, "d_model": 128, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32,
                "d_ff": 512, "vocab_size": 256, "compute_dtype": "float32",
            },
            "data": {"global_batch_size": 16, "seq_len": 16},
            "layout": {"data": 1, "fsdp": FSDP, "zero_stage": stage, "remat": "full"},
        }
    )  # fmt: skip
    engine = make_engine(config, make_mesh(config.layout))
    ints = jax.ShapeDtypeStruct((16, 16), np.int32)
    floats = jax.ShapeDtypeStruct((16, 16), np.float32)
    batch = Batch(ints, ints, ints, ints, floats)
    analysis = engine.step.lower(engine.abstract_state, batch).compile().memory_analysis()
    params_bytes = 4 * config.model.num_params
    return (
        analysis.argument_size_in_bytes / params_bytes,
        analysis.temp_size_in_bytes / params_bytes,
    )


def test_what_stays_between_steps_is_exact(memory):
    """Parameters and two moments, each whole or an eighth."""
    expected = [1 + 2, 1 + 2 / FSDP, 1 + 2 / FSDP, 3 / FSDP]
    np.testing.assert_allclose([arguments for arguments, _ in memory], expected, rtol=1e-3)


def test_gradients_are_sharded_from_stage_two_on(memory):
    """Whole accumulators for stages 0 and 1, an eighth for 2 and 3; beside them at most one more
    whole copy (stage 0, the sum over replicas) or a few layers' weights and gradients."""
    _, temporaries = zip(*memory)
    assert temporaries[0] == pytest.approx(2, rel=0.01)
    assert 1 < temporaries[1] < 1.6
    assert 1 / FSDP < temporaries[2] < 0.4
    assert 1 / FSDP < temporaries[3] < 0.4


def test_every_stage_needs_less_than_the_one_before(memory):
    together = [arguments + temporaries for arguments, temporaries in memory]
    assert sorted(together, reverse=True) == together
    assert len(set(together)) == 4
