"""The layer loop's collectives, as its timing diagram has them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config import Config, from_dict
from jaxscale.data.synthetic import synthetic_batch
from jaxscale.ops.sizes import HIDING_TOKENS
from jaxscale.planner.memory.step import step_memory
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine
from jaxscale.training.layers import loop_form
from jaxscale.training.layers.loop_form import ReductionTiming, early_reductions

pytestmark = pytest.mark.compiles

MODEL = {
    "d_model": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 32,
    "vocab_size": 32,
}


def tiny(num_layers: int = 3, **layout) -> Config:
    return from_dict(
        {
            "model": {**MODEL, "num_layers": num_layers},
            "data": {"global_batch_size": 8, "seq_len": 16},
            "layout": {"data": 1, "fsdp": 2, "zero_stage": 3, "microbatches": 4, **layout},
        }
    )


def lowered_step(num_layers: int = 3, **layout) -> str:
    """The step with its loops over layers unrolled."""
    config = tiny(num_layers, **layout)
    mesh = make_mesh(config.layout, jax.devices()[:2])
    engine = make_engine(config, mesh, unroll_loops=True)
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


@pytest.mark.proof
@pytest.mark.parametrize("accumulation", ["layered", "sequential"])
def test_each_layer_is_prefetched_and_reduced_during_its_neighbours_compute(accumulation):
    # With L = 3: gather 0; gather 1, F0; gather 2, F1; F2, head; gather 1, B2; gather 0, reduce 2,
    # B1; reduce 1, B0; reduce 0. The group of a sequential step is one micro-batch.
    assert timeline(lowered_step(accumulation=accumulation)) == "gg.g.g.gr.r.r"


@pytest.mark.proof(but=("1-gg.g.r.r.r",))
@pytest.mark.parametrize(
    ("stage", "expected"), [(1, "gg.g." + "r.r.r"), (2, "gg.g." + "r.r.r." + "r.r.r")]
)
def test_the_first_microbatch_gathers_and_the_last_one_reduces(stage, expected):
    """Of four: gather 0; gather 1, F0; gather 2, F1; F2, head, B2. Stage 1 reduces during B1 and B0
    of the last one alone, which is apart from a loop over those between; stage 2 in all of them, of
    which those after the first one are a loop."""
    assert timeline(lowered_step(zero_stage=stage, microbatches=4)) == expected


def test_reductions_that_end_early_are_for_long_microbatches_that_are_recomputed_on_tpus():
    def early(platform="tpu", tokens=HIDING_TOKENS, waits=False, **layout) -> ReductionTiming:
        config = from_dict({"layout": {"data": 1, "fsdp": 2, "remat": "full", **layout}})
        engine = make_engine(config, make_mesh(config.layout, jax.devices()[:2]))
        zero = dataclasses.replace(engine.zero, waits_for_gathers=waits)
        return early_reductions(config.layout, zero, platform, tokens)

    assert early() == ReductionTiming(head=True, layers=True)
    assert early(waits=True) == ReductionTiming(head=True, layers=True, defer_gathers=True)
    assert not early(waits=True, offload="activations").defer_gathers, "which are prefetched too"
    assert early(platform="gpu") == ReductionTiming()
    assert early(zero_stage=1) == ReductionTiming(), "which reduces the last micro-batch's only"
    only_head = ReductionTiming(head=True)
    assert early(tokens=HIDING_TOKENS - 1) == only_head
    assert early(remat="save_matmuls") == only_head
    assert early(microbatches=2, accumulation="layered") == only_head
    assert early(microbatches=2) == ReductionTiming(head=True, layers=True)


def test_layers_that_gather_late_prefetch_in_the_forward_pass_alone(monkeypatch):
    """Gather 0; gather 1, F0; gather 2, F1; F2, head, B2; gather 1, reduce 2, B1; gather 0, reduce
    1, B0; reduce 0."""
    early = ReductionTiming(head=True, layers=True, defer_gathers=True)
    monkeypatch.setattr(loop_form, "early_reductions", lambda *_: early)
    assert timeline(lowered_step(remat="full")) == "gg.g.gr.gr.r"


@pytest.mark.proof
@pytest.mark.parametrize("layout", [{"fsdp": 2}, {"fsdp": 1, "microbatches": 1}])
def test_early_reductions_and_unfilled_arrays_are_the_same(layout, monkeypatch):
    """To the bit: loss, and parameters after two steps. What begins unfilled on GPUs, residuals and
    on one device gradients, is written before it is read: it is NaN here."""
    expected, shapes = after_two_steps(layout), []
    early = ReductionTiming(head=True, layers=True, defer_gathers=True)

    def empty(shape, dtype):
        shapes.append(shape)
        return jnp.full(shape, jnp.nan, dtype)

    monkeypatch.setattr(loop_form, "early_reductions", lambda *_: early)
    monkeypatch.setattr(jax.lax, "empty", empty)
    monkeypatch.setattr(loop_form, "_can_leave_unfilled", lambda *_: True)
    jax.tree.map(np.testing.assert_array_equal, after_two_steps(layout), expected)
    gradients = (3, 32, 16) in shapes
    assert shapes
    assert gradients == (layout["fsdp"] == 1)


def after_two_steps(layout: dict) -> tuple[float, dict]:
    """The loss of the second step, and the parameters after it."""
    config = tiny(remat="full", **layout)
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[: layout["fsdp"]]))
    batch = engine.shard(synthetic_batch(config))
    state = engine.init(jax.random.key(0))
    for _ in range(2):
        state, metrics = engine.step(state, batch)
    return float(metrics.loss), jax.device_get(state.params)


@pytest.mark.proof
def test_a_single_layer_is_gathered_once():
    assert timeline(lowered_step(num_layers=1)) == "g.r"


@pytest.mark.proof
def test_layers_of_a_period_are_not_at_work_together():
    """Compiled as one region, every layer of a period kept what its weight gradients need: 31.8 MB
    of temporaries here, where layers without a period have 8.5 MB."""
    config = from_dict(
        {
            "model": {
                **MODEL,
                "family": "gemma3",
                "num_layers": 5,
                "d_ff": 1024,
                "sliding_window": 32,
                "layer_pattern": "LG",
                "compute_dtype": "float32",
            },
            "data": {"global_batch_size": 4, "seq_len": 128},
            "layout": {"data": 1, "fsdp": 2, "zero_stage": 3, "remat": "full"},
        }
    )
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[:2]))
    compiled = engine.step.lower(engine.abstract_state, engine.abstract_batch).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.4 * step_memory(config).temporaries
