"""The layer loop's collectives, as its timing diagram has them."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config import from_dict
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.layer_loop import ascend, descend
from jaxscale.training.step import make_engine

MODEL = {
    "d_model": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 32,
    "vocab_size": 32,
}


def lowered_step(num_layers: int = 3, **layout) -> str:
    """The step with its loops over layers unrolled."""
    config = from_dict(
        {
            "model": {**MODEL, "num_layers": num_layers},
            "data": {"global_batch_size": 8, "seq_len": 16},
            "layout": {"data": 1, "fsdp": 2, "zero_stage": 3, "microbatches": 4, **layout},
        }
    )
    mesh = make_mesh(config.layout, jax.devices()[:2])
    engine = make_engine(config, mesh, unroll_layers=True)
    return engine.step.lower(engine.abstract_state, engine.abstract_batch).as_text()


def timeline(program: str) -> str:
    """Gathers (g) and reductions (r) of the MLP's last weight, which alone has its shape, and the
    matmuls that read it (.), in the order of the program; a run of matmuls is one."""
    whole, shard = "tensor<32x16x{}>", "tensor<32x8x{}>"
    found = []
    for line in program.splitlines():
        if "stablehlo.all_gather" in line and line.endswith(whole.format("bf16")):
            found.append("g")
        # A reduction holds a function: its types are on the line that closes that.
        elif line.endswith(f"}}) : ({whole.format('f32')}) -> {shard.format('f32')}"):
            found.append("r")
        elif "stablehlo.dot_general" in line and f" {whole.format('bf16')})" in line:
            found.append(".")
    return re.sub(r"\.+", ".", "".join(found))


@pytest.mark.parametrize("accumulation", ["layered", "sequential"])
def test_each_layer_is_prefetched_and_reduced_during_its_neighbours_compute(accumulation):
    # With L = 3: gather 0; gather 1, F0; gather 2, F1; F2, head; gather 1, B2; gather 0, reduce 2,
    # B1; reduce 1, B0; reduce 0. The group of a sequential step is one micro-batch.
    assert timeline(lowered_step(accumulation=accumulation)) == "gg.g.g.gr.r.r"


def test_a_single_layer_is_gathered_once():
    assert timeline(lowered_step(num_layers=1)) == "g.r"


@pytest.mark.parametrize(("num_layers", "period"), [(8, 3), (6, 3), (2, 3), (5, 1)])
def test_each_layer_of_a_period_has_its_own_settings_up_and_down(num_layers, period):
    """Layers after the last whole period are written out: they have theirs, too."""
    loop: Any = SimpleNamespace(stack=SimpleNamespace(period=period), unroll=False)

    def visit(carry, place):
        seen, count = carry
        both = jnp.array([place.index, place.kind], jnp.int32)
        return seen.at[count].set(both), count + 1

    def up(carry, place):
        return visit(carry, place), (jnp.asarray(10 * place.index + place.kind, jnp.int32),)

    begin = jnp.full((num_layers, 2), -1, jnp.int32), 0
    wanted = np.array([(index, index % period) for index in range(num_layers)])
    (seen, _), kept = ascend(up, begin, num_layers, loop)
    np.testing.assert_array_equal(seen, wanted)
    assert kept
    places = [SimpleNamespace(index=index, kind=kind) for index, kind in wanted.tolist()]
    assert [int(kept.at(place)[0]) for place in places] == (wanted @ [10, 1]).tolist()
    for top, bottom in ((num_layers - 1, 0), (num_layers - 2, 1)):
        seen, count = descend(visit, begin, top, bottom, loop)
        np.testing.assert_array_equal(seen[:count], wanted[bottom : top + 1][::-1])
