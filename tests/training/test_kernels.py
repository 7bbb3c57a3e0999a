"""What a layout asks of a model and its sequences; refusals name what would do."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxscale import config as configs
from jaxscale.compiled import topology
from jaxscale.config.layout import MANUAL_AXES
from jaxscale.models.decoder import plain_kernels
from jaxscale.ops.attention.context_chunks import balanced_order
from jaxscale.planner.memory.step import step_memory
from jaxscale.sharding.mesh import make_mesh
from jaxscale.sharding.specs import BATCH_ROWS, REPLICATED
from jaxscale.training.engine import make_engine
from jaxscale.training.kernels import attention_name, attention_text, make_kernels
from tests.invariants.layouts import LLAMA, make_config, open_engine
from tests.ops.attention.test_attention import arguments

pytestmark = pytest.mark.compiles

# LLAMA has 8 key heads and a width of 64; sequences are of 24 tokens where nothing else is said.
REFUSED = [
    (
        {"tensor": 3},
        {},
        "model.num_kv_heads = 8 does not divide over layout.tensor = 3; the nearest"
        " that does is layout.tensor = 2 or 4",
    ),
    (
        {"tensor": 8},
        {"num_kv_heads": 2, "num_heads": 2},
        "model.num_heads = 2 does not divide "
        "over layout.tensor = 8; the nearest that does is layout.tensor = 2",
    ),
    (
        {"tensor": 8},
        {"num_kv_heads": 3, "num_heads": 24},
        "model.num_kv_heads = 3 does not divide over layout.tensor = 8",
    ),
    (
        {"tensor": 8},
        {"d_ff": 100},
        "model.d_ff = 100 does not divide over layout.tensor = 8; the "
        "nearest that does is layout.tensor = 5 or 10",
    ),
    ({"fsdp": 3}, {}, "model.d_model = 64 does not divide over layout.fsdp = 3"),
    (
        {"context": 8},
        {},
        "data.seq_len = 24 does not split over layout.context = 8 (two chunks a "
        "rank) x layout.tensor = 1, which takes multiples of 16; set data.seq_len = 16 or 32",
    ),
    ({"context": 2, "tensor": 4}, {"seq_len": 30}, "takes multiples of 8; set data.seq_len = 24"),
    (
        {"tensor": 4},
        {"seq_len": 30},
        "data.seq_len = 30 does not split over layout.context = 1 x "
        "layout.tensor = 4, which takes multiples of 4; set data.seq_len = 28 or 32",
    ),
    (
        {"context": 2},
        {"attention": "reference"},
        "model.attention = 'reference' needs whole "
        "sequences on a device, and layout.context = 2 shards them; set model.attention = 'auto'",
    ),
    (
        {"context": 4, "context_method": "ulysses", "tensor": 2},
        {"num_kv_heads": 6, "num_heads": 12},
        "layout.context_method = 'ulysses' cannot divide 6 heads and 3 key/value heads on each of "
        "2 ranks of tensor over layout.context = 4; set layout.context = 3, or "
        "layout.context_method = 'ring'",
    ),
]


def refused_config(layout, changed):
    model = {**LLAMA, **changed}
    data = {"global_batch_size": 48, "seq_len": model.pop("seq_len", 24)}
    config = make_config(model, layout)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **data))


@pytest.mark.proof(
    but=("layout7-changed7-said7", "layout8-changed8-said8", "layout9-changed9-said9")
)
@pytest.mark.parametrize(("layout", "changed", "said"), REFUSED)
def test_what_does_not_divide_is_refused(layout, changed, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        open_engine(refused_config(layout, changed))


def attention_of(config, platform):
    return attention_name(config.layout, config.model, config.data, platform)


def test_attention_says_how_keys_arrive():
    config = make_config(LLAMA, {})
    assert attention_text(config.layout, attention_of(config, "cpu")) == "blockwise"
    config = make_config(LLAMA, {"context": 2, "context_method": "gather"})
    assert attention_text(config.layout, attention_of(config, "cpu")) == "blockwise, by gather"


@pytest.mark.parametrize(
    ("base", "settings", "kernel"),
    [
        ("llama32_1b", [], "flash"),
        ("llama32_1b", ["layout.context=2", "layout.context_method=ulysses"], "flash"),
        ("llama32_1b", ["data.objective=causal_across_documents"], "cudnn"),
        ("llama32_1b", ["data.objective=causal_across_documents", "layout.context=2"], "flash"),
        ("llama32_1b", ["model.attention=cudnn"], "cudnn"),
        ("llama32_1b", ["model.compute_dtype=float32"], "blockwise"),
        ("llama32_1b", ["model.head_dim=96"], "flash"),
        ("bert_base", [], "cudnn"),
        ("mt5_base", [], "flash"),
        ("mt5_base", ["data.target_len=40"], "blockwise"),
        ("deepseek_v3", [], "flash"),
    ],
)
def test_attention_on_gpus_goes_by_what_documents_hide(base, settings, kernel):
    assert attention_of(configs.load(base, settings), "gpu") == kernel


def test_whole_sequences_have_any_kernel():
    config = make_config(LLAMA | {"head_dim": 128}, {"context": 2, "context_method": "ulysses"})
    kernel = {"attention": "cudnn", "compute_dtype": "bfloat16"}
    model = dataclasses.replace(config.model, **kernel)
    data = dataclasses.replace(config.data, seq_len=256)
    config = dataclasses.replace(config, model=model, data=data)
    assert attention_of(config, "gpu") == "cudnn"
    layout = dataclasses.replace(config.layout, context_method="ring")
    with pytest.raises(ValueError, match=r"or layout.context_method = 'ulysses'"):
        attention_of(dataclasses.replace(config, layout=layout), "gpu")


@pytest.mark.proof(
    but=("causal_across_documents-layout2-False", "causal_across_documents-layout1-False")
)
@pytest.mark.parametrize(
    ("objective", "layout", "masks"),
    [
        ("causal", {}, True),
        ("causal_across_documents", {}, False),
        ("causal_across_documents", {"remat": "full"}, False),
        ("causal_across_documents", {"context": 2, "context_method": "ulysses"}, False),
    ],
)
def test_a_step_on_rows_of_one_document_makes_no_mask(objective, layout, masks, monkeypatch):
    """For absent GPUs, whose kernel is cuDNN's; sequences of 48 are as long as nothing else."""
    if not topology.compiler_installed("gpu"):
        pytest.skip("no compiler for GPUs: uv sync --inexact --extra aot")
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91500)
    model = {"compute_dtype": "bfloat16", "attention": "cudnn", "head_dim": 8}
    config = make_config(LLAMA, layout)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model),
        data=dataclasses.replace(config.data, seq_len=48, objective=objective),
    )
    devices = topology.open_topology("h200:1x2").devices[: config.layout.num_devices]
    engine = make_engine(config, make_mesh(config.layout, devices))
    traced = str(engine.step.trace(engine.abstract_state, engine.abstract_batch).jaxpr)
    assert "dot_product_attention_fwd" in traced
    assert bool(re.search(r"[\[,]48,48\]", traced)) is masks


@pytest.mark.proof
@pytest.mark.parametrize(("width", "spread"), [(34, False), (36, True)])
def test_what_is_outside_the_layers_is_spread_over_a_pipeline_where_it_divides(width, spread):
    """By both axes: 34 divides by the pipeline's two ranks, by the two of fsdp, and not by four."""
    config = make_config(LLAMA | {"d_model": width}, {"pipeline": 2, "fsdp": 2, "microbatches": 2})
    params = open_engine(config).abstract_state.params
    matrices = [
        leaf
        for part in ("embed", "head")
        for leaf in jax.tree.leaves(params[part])
        if leaf.ndim == 2
    ]
    assert len(matrices) == 2
    for leaf in matrices:
        assert leaf.size // math.prod(leaf.sharding.shard_shape(leaf.shape)) == (4 if spread else 2)
    held = step_memory(config).parameters
    assert held == sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(params)
    )


@pytest.mark.proof
@pytest.mark.parametrize(
    "sizes", [{"data": 2, "tensor": 4}, {"data": 2, "context": 2, "tensor": 2}], ids=str
)
def test_layers_of_one_model_attend_in_their_own_ways(sizes):
    """A causal window with a bias, then both ways with a cap, then across from 16 places to 24, in
    one program; the table's gradient is counted once over the ranks of context and tensor."""
    q, k, v, segments, _, table = arguments(16, 4, 4, batch=4, buckets=6)
    _, far_k, far_v, _, far_segments, _ = arguments(16, 4, 4, batch=4, key_time=24)
    arrays = {"q": q, "k": k, "v": v, "far_k": far_k, "far_v": far_v, "table": table}
    cotangent = jnp.sin(jnp.arange(q.size)).reshape(q.shape)

    def loss(attend, arrays, segments, far_segments, cotangent):
        near, far = (arrays["k"], arrays["v"]), (arrays["far_k"], arrays["far_v"])
        bias = arrays["table"]
        x = attend(arrays["q"], *near, segments, None, bias, sliding_window=7, scale=1.0)
        x = attend(x, *near, segments, causal=False, soft_cap=0.7)
        x = attend(x, *far, segments, far_segments, causal=False)
        return jnp.sum(x * cotangent)

    def reordered(x):
        order = balanced_order(x.shape[1], layout.context)
        return x[:, order] if x.ndim > 2 or x.dtype == jnp.int32 else x

    layout = make_config(LLAMA, sizes).layout
    mesh = make_mesh(layout, jax.devices())
    specs = dict.fromkeys(arrays, BATCH_ROWS) | {"table": REPLICATED}
    attend = make_kernels(layout, "blockwise", "cpu").attend

    def local(*given):
        grads = jax.grad(functools.partial(loss, attend))(*given)
        return {**grads, "table": jax.lax.psum(grads["table"], "data")}

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, *[BATCH_ROWS] * 3),
        out_specs=specs,
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )
    given = (arrays, segments, far_segments, cotangent)
    options = {"xla_backend_optimization_level": 0}
    got = jax.jit(run, compiler_options=options)(*jax.tree.map(reordered, given))
    wanted = jax.jit(jax.grad(functools.partial(loss, plain_kernels().attend)))(*given)
    for name, one in jax.tree.map(reordered, wanted).items():
        np.testing.assert_allclose(got[name], one, atol=1e-12, err_msg=name)
