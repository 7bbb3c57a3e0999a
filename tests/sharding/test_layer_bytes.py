"""What a layer's collectives leave on a device."""

import jax
import pytest

from jaxscale.config import from_dict
from jaxscale.sharding.layer_bytes import LayerBytes, largest_layer
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine

D, HEADS, F = 32, 2 * 16, 64
MATRICES = 4 * D * HEADS + 3 * D * F
NORMS = 2 * D


@pytest.mark.parametrize(
    ("layout", "reduction_dtype", "gathered", "reduced"),
    [
        ({"zero_stage": 0, "data": 2, "fsdp": 4}, "float32", 0, 4 * (MATRICES + NORMS)),
        ({"zero_stage": 1, "fsdp": 8}, "float32", 2 * (MATRICES + NORMS), (MATRICES + NORMS) / 2),
        ({"fsdp": 4, "tensor": 2}, "float32", MATRICES + 2 * NORMS, MATRICES / 2 + NORMS),
        (
            {"fsdp": 2, "context": 4},
            "bfloat16",
            2 * (MATRICES + NORMS),
            (MATRICES + NORMS) / 4,
        ),
        ({"data": 8}, "float32", 0, 4 * (MATRICES + NORMS)),
    ],
    ids=str,
)
def test_bytes_of_a_layer(layout, reduction_dtype, gathered, reduced):
    config = from_dict(
        {
            "model": {"num_layers": 3, "d_model": D, "num_heads": 2, "num_kv_heads": 2}
            | {"head_dim": 16, "d_ff": F, "vocab_size": 64, "compute_dtype": "bfloat16"},
            "data": {"global_batch_size": 8, "seq_len": 64},
            "layout": {"data": 1, **layout},
            "optimizer": {"reduction_dtype": reduction_dtype},
        }
    )
    engine = make_engine(config, make_mesh(config.layout, jax.devices()))
    found = largest_layer(engine.zero, engine.abstract_state.params)
    assert found == LayerBytes(gathered, reduced)
