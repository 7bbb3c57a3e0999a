"""What a layer saves, and what it repeats, by remat policy."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.compiled import flops, hlo
from jaxscale.config import Config, DataConfig, load
from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelConfig
from jaxscale.config.remat_policy import parse_remat
from jaxscale.models.decoder import Decoder
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import layer_function
from jaxscale.ops.attention.attention import attention
from jaxscale.ops.experts.dispatch import capacity_of
from jaxscale.ops.split_vjp import split_vjp
from jaxscale.planner.memory.experts import expert_capacity, rows_of_token
from jaxscale.planner.memory.layer_loop import LayerLoop
from jaxscale.planner.memory.saved_values import layer_saved_bytes, slot_bytes
from jaxscale.planner.memory.step import HELD, step_memory
from jaxscale.run.setup import layout_bytes
from jaxscale.run.setup.layout import open_engine
from jaxscale.training.remat import rematerialised, rematerialised_attention
from jaxscale.training.tracing.trace_work import trace_work
from jaxscale.training.tracing.traces import model_trace, saved_values
from tests.training.tracing.test_trace_work import with_all_keys

ROWS, TIME = 2, 64
SIZES = {"d_model": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 10, "d_ff": 28}
LLAMA = ModelConfig(**SIZES)
GPT = ModelConfig(**SIZES, family="gpt")
MODELS = {
    "llama": LLAMA,
    "gpt": GPT,
    "gemma3": ModelConfig(**SIZES, family="gemma3"),
    "gpt_neox": ModelConfig(**SIZES, family="gpt_neox", rope_share=0.4),
    "bert": ModelConfig(**SIZES, family="bert"),
    "adapters": dataclasses.replace(LLAMA, lora_rank=6),
}
LATENT = ModelConfig(
    **SIZES | {"num_kv_heads": SIZES["num_heads"]},
    family="deepseek_v3",
    kv_rank=24,
    query_rank=40,
    rope_head_dim=8,
    num_experts=0,
    dense_layers=0,
)
MIXTRAL = {"family": "mixtral", "num_experts": 8, "experts_per_token": 2}


def config_of(model: ModelConfig, remat: str = "none", **layout) -> Config:
    data = DataConfig(global_batch_size=ROWS, seq_len=TIME)
    return Config(model=model, data=data, layout=Layout(data=1, remat=remat, **layout))


def loop_of(config: Config, stack: int = -1) -> LayerLoop:
    trace = model_trace(config.model)
    return LayerLoop.of(config, config.layout, trace.stack_layers, trace.stacks[stack])


def token_bytes(model: ModelConfig, remat: str) -> float:
    return layer_saved_bytes(loop_of(config_of(model, remat))) / (ROWS * TIME)


def test_bytes_of_a_token():
    # 24 wide; 40 queries, 20 keys, 20 values; 28 hidden; in bfloat16, with the sums of 4 heads.
    assert token_bytes(LLAMA, "full") == 2 * 24
    # Attention in blocks of 64 tokens: its sums are of these.
    assert token_bytes(LLAMA, "save:query,attention") == 2 * (24 + 40 + 40) + 4 * 4
    everything = 2 * (4 * 24 + 2 * 40 + 2 * 20 + 2 * 28) + 4 * 4
    assert token_bytes(LLAMA, "none") == everything
    assert token_bytes(LLAMA, "save_all_but_attention") == everything - 4 * 4
    assert token_bytes(LLAMA, "save_matmuls") == everything - 2 * 2 * 24
    # The input of a side layer, in every policy, and hidden features: what GELU makes of them.
    for remat in ("full", "save_matmuls", "save_all_but_attention"):
        saved = token_bytes(dataclasses.replace(LLAMA, side_width=4), remat)
        assert 2 * 24 <= saved <= 2 * (24 + 5 * 4)
    # What the first matrices of adapters make, but that of the MLP's output.
    assert token_bytes(MODELS["adapters"], "none") == everything + 2 * 6 * 6


def test_ranks_of_tensor_share_what_they_do_not_gather():
    whole = config_of(GPT)
    rows = dataclasses.replace(whole, layout=Layout(data=1, tensor=4, tensor_rows=2))
    values = loop_of(whole).saved("none").values
    sizes = {
        spread: sum(one.num_bytes for one in values if one.spread == spread)
        for spread in ("stream", "gathered", "features")
    }
    # Two norms' results go into matmuls; the stream is there before each.
    assert sizes["gathered"] == sizes["stream"] == 2 * 24 * 2 * TIME
    # Two columns have what was gathered, and two rows the heads and the hidden features.
    total = sizes["stream"] + 2 * sizes["gathered"] + 2 * sizes["features"]
    assert layer_saved_bytes(loop_of(rows)) == ROWS * total // 4


def test_rows_of_experts_are_whole_on_ranks_of_tensor_but_for_hidden_features():
    model = ModelConfig(**SIZES, **MIXTRAL)
    stack = loop_of(config_of(model)).saved("none")
    assert stack.rows == 2
    of_rows = {(one.spread, one.heads * one.features, one.element_bytes) for one in stack.values
               if one.per == "row"}  # fmt: skip
    # The rows that arrived, the gate of each and whose it is; up and gate.
    assert of_rows == {("whole", 24, 2), ("whole", 1, 4), ("features", 28, 2)}
    limited = dataclasses.replace(model, capacity_factor=1.3)
    stack = loop_of(config_of(limited)).saved("none")
    assert stack.rows == 8 * math.ceil(1.3 * TIME * 2 / 8) / TIME


def test_a_rank_allocates_all_rows_that_may_arrive():
    model = ModelConfig(**SIZES, **MIXTRAL)
    for ranks, rows in ((1, 2), (2, 4), (4, 8), (8, 8)):
        assert rows_of_token(model, Layout(data=1, expert=ranks), TIME) == rows
    for factor, seq_len in ((1.0, 64), (1.3, 100), (9.0, 64)):
        one = dataclasses.replace(model, capacity_factor=factor)
        assert expert_capacity(one, seq_len) == capacity_of(factor, seq_len, 2, 8)


SMALL = {"num_heads": 4, "d_model": 64, "head_dim": 16, "d_ff": 96, "vocab_size": 512}
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_d_ff": 48}
LATENT_SETTINGS = {"kv_rank": 16, "query_rank": 24, "rope_head_dim": 8, "value_head_dim": 16}
PIPELINES = {
    "adapters": ("tiny", {"lora_rank": 4}),
    "an encoder": ("mt5_small", {}),
    "latent attention": (
        "deepseek_v3",
        SMALL | EXPERTS | LATENT_SETTINGS | {"num_kv_heads": 4, "head_dim": 24}
        | {"shared_d_ff": 56, "dense_layers": 2, "num_layers": 6}
        | {"router_groups": 1, "router_groups_kept": 1},
    ),
    "a period of two": (
        "qwen3_30b_a3b",
        SMALL | EXPERTS
        | {"num_layers": 9, "num_kv_heads": 2, "dense_layers": 1, "expert_pattern": "DE"},
    ),
}  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("remat", ["none", "save:query,attention"])
def test_a_pipeline_has_these_buffers(name, remat):
    base, model = PIPELINES[name]
    changes = [f"model.{key}={value}" for key, value in model.items()]
    changes += [f"layout.{axis}=1" for axis in ("data", "fsdp", "expert")]
    changes += ["layout.pipeline=2", "layout.schedule=1f1b", "layout.microbatches=4"]
    changes += [f"layout.remat={remat}", "layout.zero_stage=1", "layout.data=4"]
    changes += ["data.global_batch_size=16", "data.seq_len=64"]
    config, engine = open_engine(load(base, changes))
    buffers = layout_bytes.buffer_bytes(engine)
    # A scalar or two of each layer are its own, whatever the micro-batch.
    assert step_memory(config).stash == pytest.approx(sum(buffers[n] for n in HELD), rel=0.005)


def test_biases_of_each_layer_add_nothing_to_a_pipelines_buffers():
    """The gradient of their table is made by B, which has the scores."""
    paired = ModelConfig(**SIZES, family="mt5", num_layers=1, num_encoder_layers=1)
    shared, own = (
        saved_values(model, TIME, TIME, "none", piped=True)
        for model in (paired, dataclasses.replace(paired, family="umt5", relative_bias=None))
    )
    assert shared == own
    encoder, decoder = (
        [sum(one.num_bytes for one in stack.values if one.held == held) for held in HELD]
        for stack in own.stacks
    )
    # In bfloat16: two norms, queries, keys and values with the sums of four heads; two norms'
    # results, the kernel's and hidden features; their gradients. Of cross attention as many of
    # stream, queries and sums again, and keys and values.
    queries, keys, hidden = 40, 20, 2 * 28
    size = 2 * TIME
    assert encoder == [
        size * (2 * 24 + queries + 2 * keys) + 16 * TIME,
        size * (2 * 24 + queries + hidden),
        size * (2 * 24 + queries + 2 * keys + hidden),
    ]
    assert decoder == [
        encoder[0] + size * (24 + queries + 2 * keys) + 16 * TIME,
        encoder[1] + size * (24 + queries),
        encoder[2] + size * (24 + queries + 2 * keys),
    ]


def test_a_tpu_pads_heads_to_whole_tiles():
    model = dataclasses.replace(LLAMA, num_heads=12, num_kv_heads=4, head_dim=80)
    config = config_of(model, pipeline=2, microbatches=2, schedule="1f1b")
    loop = loop_of(config)
    plain, tiled = (
        sum(slot_bytes(loop, held, tiled=tiled) for held in HELD) for tiled in (False, True)
    )
    # Queries, the kernel's output and its gradient; keys, values and theirs.
    more = 3 * (16 * 128 - 12 * 80) + 4 * (8 * 128 - 4 * 80)
    assert tiled - plain == 2 * loop.tokens * more


def decoder_of(model: ModelConfig) -> Decoder:
    attend = functools.partial(attention, implementation="blockwise")
    return Decoder(model, Kernels(attend))


def layer_under(decoder: Decoder, remat: str):
    """Of the last stack."""
    policy = parse_remat(remat)
    kernels = rematerialised_attention(decoder.kernels, policy)
    decoder = dataclasses.replace(decoder, kernels=kernels)
    return rematerialised(layer_function(decoder.stacks[-1]), policy)


@functools.cache
def passes(model: ModelConfig, remat: str):
    """The two passes of a layer, and what the forward pass takes."""
    decoder = decoder_of(model)
    dtype = jnp.dtype(model.compute_dtype)
    layers = jax.eval_shape(decoder.init, jax.random.key(0))[decoder.stacks[-1].name]
    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], dtype), layers)
    x = jax.ShapeDtypeStruct((ROWS, TIME, model.d_model), dtype)
    ints = jax.ShapeDtypeStruct((ROWS, TIME), np.int32)
    floats = jax.ShapeDtypeStruct((ROWS, TIME), np.float32)
    context = Batch(ints, ints, ints, ints, floats), jax.ShapeDtypeStruct((), np.int32)
    return split_vjp(layer_under(decoder, remat)), (weights, {"x": x}, {}, context)


@functools.cache
def compiled_matmuls(model: ModelConfig, remat: str) -> float:
    """FLOPs of the matmuls of both passes, a token; attention is one block, so its loops, which
    run as often as the data say, run once."""
    (forward, backward), (weights, x, _, context) = passes(model, remat)

    def both(weights, x, context):
        y, _, kept = forward(weights, x, {}, context)
        # As in a step, where other layers lie between the two.
        y, kept = jax.lax.optimization_barrier((y, kept))
        return y, backward(weights, {}, context, kept, y)

    compiled = jax.jit(both).lower(weights, x, context).compile()
    program = hlo.parse_hlo(compiled.as_text() or "")
    costs = flops.computation_costs(program, flops.instruction_flops, unknown_trips=1)
    return costs[program.entry] / (ROWS * TIME)


@pytest.mark.compiles
@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("llama", "full"),
        ("llama", "save_matmuls"),
        ("llama", "save_all_but_attention"),
        ("gpt", "save:query,attention,mlp_up"),
        ("gemma3", "full"),  # a norm needs the result of the last matmul
        ("gpt_neox", "full"),  # attention ends in the stream, too
        ("bert", "save:query,attention"),
        ("adapters", "save_matmuls"),  # but not what their first matrices make
        ("latent", "save_matmuls"),  # but not what queries, keys and values are made of
    ],
)
def test_a_policy_repeats_the_matmuls_that_it_does_not_keep(name, remat):
    model = dataclasses.replace((MODELS | {"latent": LATENT})[name], compute_dtype="float32")
    repeated = compiled_matmuls(model, remat) - compiled_matmuls(model, "none")
    work = with_all_keys(trace_work(model, TIME, TIME))
    expected = work.recomputed_flops(remat) - work.recomputed_flops("none")
    assert repeated == pytest.approx(expected / (TIME * model.num_layers), rel=1e-6)
