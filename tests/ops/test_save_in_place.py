"""Residuals that layers write where they make them, as a step on one GPU does."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxscale.compiled import compile_ahead, hlo, topology
from jaxscale.config import Config, from_dict
from jaxscale.data.synthetic import synthetic_batch
from jaxscale.ops.save_in_place import save_in_place
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training import engine
from jaxscale.training.layers import layer_loop, loop_form
from tools.bench.bytes_moved import bytes_moved

pytestmark = pytest.mark.compiles

LAYERS = 3


def tiny(**layout) -> Config:
    model = {"num_layers": LAYERS, "d_model": 16, "num_heads": 2, "head_dim": 8, "d_ff": 32}
    return from_dict(
        {
            "model": {**model, "num_kv_heads": 2, "vocab_size": 32, "compute_dtype": "float32"},
            "data": {"global_batch_size": 4, "seq_len": 16},
            "layout": {"data": 1, "microbatches": 2, **layout},
        }
    )


def after_two_steps(config: Config) -> tuple[float, dict]:
    """The loss of the second step, and the parameters after it."""
    made = engine.make_engine(config, make_mesh(config.layout, jax.devices()[:1]))
    batch, state = made.shard(synthetic_batch(config)), made.init(jax.random.key(0))
    for _ in range(2):
        state, metrics = made.step(state, batch)
    return float(metrics.loss), jax.device_get(state.params)


@pytest.mark.proof
def test_the_same_steps(monkeypatch):
    """To the bit; and what is read back in a layer is what it wrote: the arrays begin as NaN."""
    config, written = tiny(remat="save_matmuls"), []
    expected = after_two_steps(config)

    def counted(function, x, saved, index):
        written.append(len(saved))
        return save_in_place(function, x, saved, index)

    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    monkeypatch.setattr(loop_form, "_can_leave_unfilled", lambda *_: True)
    monkeypatch.setattr(loop_form, "saves_in_place", lambda *_: True)
    monkeypatch.setattr(layer_loop, "save_in_place", counted)
    jax.tree.map(np.testing.assert_array_equal, after_two_steps(config), expected)
    assert set(written) == {9}


def test_a_value_is_written_where_it_is_made_and_read_from_there():
    """Also one that a checkpoint hands on; an argument is written at the end."""
    weights = jnp.arange(12.0).reshape(3, 4)

    def function(x):
        made = checkpoint_name(x @ weights, "made")
        handed_on = jax.checkpoint(lambda made: (-made, made))
        result, same = handed_on(jax.lax.reduce_precision(made, 8, 23))
        return result.sum(), [x, same]

    x = jnp.ones((2, 3))
    saved = [jnp.full((LAYERS, 1, 2, width), jnp.nan) for width in (3, 4)]
    traced = jax.jit(lambda x, saved, index: save_in_place(function, x, saved, index))
    y, after = traced(x, saved, 1)
    expected, residuals = function(x)
    np.testing.assert_array_equal(y, expected)
    for array, residual in zip(after, residuals):
        np.testing.assert_array_equal(array[1, 0], residual)
        assert np.isnan(array[0]).all()
        assert np.isnan(array[2]).all()
    write, read = "dynamic_update_slice", "dynamic_slice"
    operations = "|".join(("dot_general", write, "optimization_barrier", read, "negate"))
    found = re.findall(rf"stablehlo\.({operations})", traced.lower(x, saved, 1).as_text())
    assert found == ["dot_general", write, "optimization_barrier", read, "negate", write]


@pytest.mark.slow
def test_matmuls_on_a_gpu_write_residuals_into_the_arrays_of_all_layers():
    """None multiplies twice, and those of layers that are written out move and hold less. (XLA
    would make one of two small matmuls of the same operand.)"""
    model = {"d_model": 2048, "num_heads": 32, "num_kv_heads": 32, "head_dim": 64, "d_ff": 8192}
    config = from_dict(
        {
            "model": {**model, "num_layers": LAYERS, "vocab_size": 512, "attention": "flash"},
            "data": {"global_batch_size": 4, "seq_len": 8192},
            "layout": {"data": 1, "remat": "none"},
        }
    )
    if not topology.compiler_installed("gpu"):
        pytest.skip("no compiler for GPUs: uv sync --inexact --extra aot")
    with jax.enable_x64(False):  # in which loops count in 64 bits
        report = compile_ahead.compile_for(config, "h200:1x1")
        layout = dataclasses.replace(config.layout, unroll_layers=True)
        config = dataclasses.replace(config, layout=layout)
        unrolled = compile_ahead.compile_for(config, "h200:1x1")
    fused = r"%dynamic_slice_fusion[.\d]* = \(bf16\[3,1,4,8192,8192\]"
    assert len(re.findall(fused, report.program)) == 2, "the matmuls that widen"
    head = r"%dynamic_slice_fusion[.\d]* = \(f32"
    assert not re.findall(head, report.program), "whose matmuls are chosen by timing"
    assert report.flops == unrolled.flops is not None
    written_out, moved = (bytes_moved(hlo.parse_hlo(one.program)) for one in (unrolled, report))
    # Unrolled layers have only their residuals, in separate arrays, and the inputs of one layer's
    # weight gradients. Both have cuBLAS for all matmuls.
    assert written_out < 0.9 * moved
    assert unrolled.temp_bytes < 0.9 * report.temp_bytes
