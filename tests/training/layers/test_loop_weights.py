"""The time at which a layer's weights are gathered, and their gradients reduced."""

import re

import jax
import pytest

from jaxscale.config import from_dict
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine

pytestmark = pytest.mark.compiles

MODEL = {
    "family": "mixtral",
    "num_layers": 3,
    "num_experts": 4,
    "experts_per_token": 2,
    "capacity_factor": 1.25,  # the experts' matmuls are no loops
    "d_model": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 32,
    "vocab_size": 32,
}


def timeline() -> str:
    """Gathers (g) and reductions (r) of the experts' matrix into the residual stream, and the
    matmuls that read it (.), in the order of the step's program; a run of matmuls is one."""
    config = from_dict(
        {
            "model": MODEL,
            "data": {"global_batch_size": 4, "seq_len": 16},
            "layout": {"data": 1, "fsdp": 2, "zero_stage": 3, "remat": "full"},
        }
    )
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[:2]), unroll_loops=True)
    program = engine.step.lower(engine.abstract_state, engine.abstract_batch).as_text()
    whole, shard, found = "tensor<4x32x16x{}>", "tensor<4x32x8x{}>", []
    for line in program.splitlines():
        if "stablehlo.all_gather" in line and line.endswith(whole.format("bf16")):
            found.append("g")
        elif line.endswith(f"}}) : ({whole.format('f32')}) -> {shard.format('f32')}"):
            found.append("r")
        elif "stablehlo.dot_general" in line and f" {whole.format('bf16')})" in line:
            found.append(".")
    return re.sub(r"\.+", ".", "".join(found))


def test_experts_are_gathered_and_reduced_in_their_own_layer():
    """Gather 0, F0; gather 1, F1; gather 2, F2 and B2, reduce 2; gather 1, B1, reduce 1 ..."""
    assert timeline() == "g.g.g.rg.rg.r"
