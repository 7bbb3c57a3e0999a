"""What a layer keeps, and what it repeats, by remat policy."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.compiled import flops, hlo
from jaxscale.config import Config, DataConfig
from jaxscale.config.layout import BLOCK_TENSORS, Layout, parse_remat
from jaxscale.config.model import ModelConfig
from jaxscale.models.decoder import Decoder
from jaxscale.models.encoder_decoder import EncoderDecoder
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import layer_function, split_stream
from jaxscale.ops.attention.attention import attention
from jaxscale.ops.experts.dispatch import capacity_of
from jaxscale.ops.split_vjp import split_vjp
from jaxscale.pipeline.backward_split import split
from jaxscale.planner.memory.experts import (
    expert_capacity,
    rows_of_token,
    stash_row_bytes,
)
from jaxscale.planner.memory.layer_loop import LayerLoop, layer_saved_bytes
from jaxscale.planner.memory.saved_activations import (
    saved_bytes,
    saved_source_values,
    saved_values,
    source_stash_bytes,
    stash_bytes,
)
from jaxscale.training.remat import rematerialised, rematerialised_attention
from jaxscale.training.tracing.trace_work import trace_work
from jaxscale.training.tracing.traces import model_trace
from tests.training.tracing.test_trace_work import with_all_keys

ROWS, TIME = 2, 64
SIZES = {"d_model": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 10, "d_ff": 28}
LLAMA = ModelConfig(**SIZES)
GPT = ModelConfig(**SIZES, family="gpt")
PAIRED = ModelConfig(**SIZES, family="mt5", num_layers=1, num_encoder_layers=1)
MODELS = {
    "llama": LLAMA,
    "qk_norm": dataclasses.replace(LLAMA, qk_norm=True, compute_dtype="float32"),
    "gpt": GPT,
    "gpt qk_norm": dataclasses.replace(GPT, qk_norm=True),
    "biases": ModelConfig(**SIZES, attention_bias="all", mlp_bias=True),
    "gemma3": ModelConfig(**SIZES, family="gemma3"),
    "olmo2": ModelConfig(**SIZES, family="olmo2"),
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
POLICIES = (
    "none",
    "full",
    "save_matmuls",
    "save_all_but_attention",
    "save:query,attention",
)
EACH = tuple(f"save:{name}" for name in BLOCK_TENSORS)
"""Every name alone: of models whose layers differ in what they name."""
LAYERS = [
    (name, remat)
    for name in MODELS
    for remat in POLICIES + EACH * (name in ("llama", "gpt", "gpt_neox", "bert"))
]


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


@pytest.mark.proof(but=("llama-none", "llama-full", "gpt-save_matmuls"))
@pytest.mark.parametrize(("name", "remat"), LAYERS)
def test_a_layer_keeps_these_values(name, remat):
    model = MODELS[name]
    (forward, _), arguments = passes(model, remat)
    _, _, kept = jax.eval_shape(forward, *arguments)
    # The frequencies of rotary positions are a constant of every layer.
    found = collections.Counter(
        (leaf.size // (ROWS * TIME), leaf.dtype.itemsize)
        for leaf in kept
        if leaf.size > model.head_dim
    )
    expected = collections.Counter(
        (one.elements, one.element_bytes) for one in saved_values(model, parse_remat(remat))
    )
    assert found == expected


MIXTRAL = {"family": "mixtral", "num_experts": 8, "experts_per_token": 2}
DEEPSEEK = {
    "family": "deepseek_v3",
    "num_layers": 3,
    "dense_layers": 1,
    "num_kv_heads": 4,
    "num_experts": 8,
    "experts_per_token": 2,
    "router_groups": 1,
    "router_groups_kept": 1,
    "kv_rank": 6,
    "query_rank": 7,
    "rope_head_dim": 4,
    "value_head_dim": 8,
    "expert_d_ff": 12,
    "shared_d_ff": 14,
}
WITH_EXPERTS = {
    "mixtral": MIXTRAL,
    "mixtral with a capacity": MIXTRAL | {"capacity_factor": 1.3},
    "mixtral without a balancing loss": MIXTRAL | {"balance_weight": 0.0},
    "qwen3_moe": {"family": "qwen3_moe", "num_experts": 8, "expert_d_ff": 12}
    | {"experts_per_token": 3},
    "gpt_oss": MIXTRAL | {"family": "gpt_oss", "sliding_window": 16},
    "deepseek_v3": DEEPSEEK,
    "values as wide as keys, queries of the stream": DEEPSEEK
    | {"value_head_dim": 0, "query_rank": 0},
    "a turn of two layers": {"family": "qwen3_moe", "num_experts": 8, "expert_d_ff": 12}
    | {"num_layers": 5, "dense_layers": 1, "expert_pattern": "DE"},
}


@pytest.mark.proof
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_layer_with_experts_keeps_these_bytes(name):
    model, tokens = ModelConfig(**SIZES | WITH_EXPERTS[name]), ROWS * TIME
    policies = ("none", "save:mlp_up,value")
    if name in ("mixtral", "deepseek_v3"):
        policies += ("full", "save_matmuls", "save_all_but_attention")
    elif "expert_pattern" in WITH_EXPERTS[name]:
        policies += ("full",)
    for remat in policies:
        (forward, _), arguments = passes(model, remat)
        _, _, kept = jax.eval_shape(forward, *arguments)
        # One value of each token is a norm's or a router's; the rest are constants of every layer.
        # The suite's integers have 64 bits.
        found = sum(
            leaf.size * (4 if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf.dtype.itemsize)
            for leaf in kept
            if leaf.size > tokens and leaf.shape != (model.d_model, model.num_experts)
        )
        data = DataConfig(global_batch_size=ROWS, seq_len=TIME)
        run = Config(model=model, data=data, layout=Layout(data=1, remat=remat))
        loop = LayerLoop.of(run, model_trace(model).stack_layers, model_trace(model).stacks[-1])
        assert found == layer_saved_bytes(run, loop), remat


@pytest.mark.proof
@pytest.mark.parametrize(
    "name",
    [name for name, of in WITH_EXPERTS.items() if not {"kv_rank", "expert_pattern"} & of.keys()],
)
def test_a_pipeline_of_layers_with_experts_keeps_these_bytes(name):
    model, tokens = ModelConfig(**SIZES | WITH_EXPERTS[name]), ROWS * TIME
    rows = tokens * rows_of_token(model, Layout(data=1), TIME)
    for remat in ("full", "save_all_but_attention")[: 1 + (name == "mixtral")]:
        layer = layer_function(decoder_of(model).stacks[-1])
        if remat != "full":
            layer = layer_under(decoder_of(model), remat)
        parts = split(layer, *passes(model, remat)[1])
        # As above; gradients of scales are of these types, too.
        found = [
            sum(
                leaf.size * (4 if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf.dtype.itemsize)
                for leaf in leaves
                if leaf.size > tokens
            )
            for leaves in (parts.residuals_b, parts.residuals_w, parts.saved)
        ]
        each, of_rows = stash_bytes(model, parse_remat(remat), experts=True), stash_row_bytes(model)
        assert found == [tokens * each[one] + rows * sum(of_rows[one]) for one in each], remat


def test_a_rank_has_room_for_all_rows_that_may_arrive():
    model = ModelConfig(**SIZES, **MIXTRAL)
    for ranks, rows in ((1, 2), (2, 4), (4, 8), (8, 8)):
        assert rows_of_token(model, Layout(data=1, expert=ranks), TIME) == rows
    for factor, seq_len in ((1.0, 64), (1.3, 100), (9.0, 64)):
        one = dataclasses.replace(model, capacity_factor=factor)
        assert expert_capacity(one, seq_len) == capacity_of(factor, seq_len, 2, 8)


SOURCE = TIME - 16


def layers_of_both(settings, policy, *, in_pipeline=False):
    """A layer of the encoder and one of the decoder, each with what it takes. With "full", the
    operations of a pipeline recompute it, not the layer itself."""
    dtype = jnp.dtype(settings.compute_dtype)
    attend = functools.partial(attention, implementation="blockwise")
    plain = in_pipeline and policy.kind == "full"
    kernels = Kernels(attend) if plain else rematerialised_attention(Kernels(attend), policy)
    model = EncoderDecoder(settings, kernels)
    params = jax.eval_shape(model.init, jax.random.key(0))
    ints, far = (jax.ShapeDtypeStruct((ROWS, time), np.int32) for time in (TIME, SOURCE))
    extras = dict.fromkeys(("encoder_tokens", "encoder_segments", "encoder_positions"), far)
    batch, stream = Batch(ints, ints, ints, ints, ints, extras), {}
    for stack in model.stacks:
        stream = jax.eval_shape(stack.enter, params["embed"], stream, batch)
        weights = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], dtype), params[stack.name]
        )
        layer, context = layer_function(stack), (batch, jax.ShapeDtypeStruct((), np.int32))
        layer = layer if plain else rematerialised(layer, policy)
        yield layer, (weights, *split_stream(stack, stream), context)


@pytest.mark.proof
@pytest.mark.parametrize("remat", POLICIES)
def test_layers_of_an_encoder_and_a_decoder_keep_these_values(remat):
    policy = parse_remat(remat)
    both = layers_of_both(PAIRED, policy)
    for (layer, arguments), length, cross in zip(both, (SOURCE, TIME), (False, True)):
        forward, _ = split_vjp(layer)
        _, _, kept = jax.eval_shape(forward, *arguments)
        values = [(one, length) for one in saved_values(PAIRED, policy, cross=cross)]
        values += [(one, SOURCE) for one in cross * saved_source_values(PAIRED, policy)]
        # The first distances of the buckets are a constant of every layer.
        found = collections.Counter(
            (leaf.size, leaf.dtype.itemsize) for leaf in kept if leaf.size > PAIRED.relative_buckets
        )
        assert found == collections.Counter(
            (ROWS * time * one.elements, one.element_bytes) for one, time in values
        )


@pytest.mark.proof
@pytest.mark.parametrize("family", ["mt5", "umt5"])
@pytest.mark.parametrize(
    "remat",
    [
        "full",
        "save_matmuls",
        "save_all_but_attention",
        "save:query,key,value,attention,attention_out",
        "save:query,attention_out",
        "save:key,attention_out,mlp_gate",
    ],
)
def test_a_pipeline_of_an_encoder_and_a_decoder_keeps_these_bytes(family, remat):
    settings = dataclasses.replace(PAIRED, family=family, relative_bias=None)
    policy = parse_remat(remat)
    both = layers_of_both(settings, policy, in_pipeline=True)
    for (layer, arguments), length, cross in zip(both, (SOURCE, TIME), (False, True)):
        parts = split(layer, *arguments)
        # Scales and tables of biases have gradients in these types, too.
        found = [
            sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.size > ROWS * TIME)
            for leaves in (parts.residuals_b, parts.residuals_w, parts.saved)
        ]
        each = stash_bytes(settings, policy, cross=cross)
        more = source_stash_bytes(settings, policy) if cross else dict.fromkeys(each, 0)
        assert found == [ROWS * (length * each[name] + SOURCE * more[name]) for name in each]


@pytest.mark.proof(but=("llama-save:query,attention", "llama-save_matmuls", "qk_norm-none"))
@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("llama", "full"),
        ("llama", "save_matmuls"),
        ("llama", "save_all_but_attention"),
        ("llama", "save:query,attention"),
        ("llama", "save:mlp_up,mlp_gate"),
        ("llama", "save:attention_out,mlp_up"),
        ("gpt", "save_matmuls"),
        ("gpt", "save:query,key,value,attention_out"),
        ("gpt qk_norm", "full"),
        ("qk_norm", "none"),
        ("biases", "save_matmuls"),
        ("gemma3", "none"),
        ("gemma3", "save:attention_out,mlp_up,mlp_gate"),
        ("olmo2", "save:query,attention"),
        ("gpt_neox", "full"),
        ("gpt_neox", "save:mlp_up"),
        ("gpt_neox", "save:query,key,value,attention_out"),
        ("bert", "none"),
        ("adapters", "full"),
        ("bert", "save:query,attention"),
    ],
)
def test_a_pipeline_keeps_these_bytes(name, remat):
    check_split(name, remat)


def check_split(name, remat):
    model = MODELS[name]
    decoder = decoder_of(model)
    layer = layer_function(decoder.stacks[0])
    if remat != "full":
        layer = layer_under(decoder, remat)
    parts = split(layer, *passes(model, remat)[1])
    shapes = {
        "residual_b": parts.residuals_b,
        "residual_w": parts.residuals_w,
        "cotangent": parts.saved,
    }
    found = {
        name: sum(
            leaf.size // (ROWS * TIME) * leaf.dtype.itemsize
            for leaf in leaves
            if leaf.size >= ROWS * TIME
        )
        for name, leaves in shapes.items()
    }
    assert stash_bytes(model, parse_remat(remat)) == found


def test_bytes_of_a_token():
    model = MODELS["llama"]  # 24 wide; 40 queries, 20 keys, 20 values; 28 hidden; in bfloat16
    assert saved_bytes(model, parse_remat("full")) == 2 * 24
    assert saved_bytes(model, parse_remat("save:query,attention")) == 2 * (24 + 40 + 40) + 4 * 4
    everything = 2 * (4 * 24 + 2 * 40 + 2 * 20 + 2 * 28) + 4 * 4
    assert saved_bytes(model, parse_remat("none")) == everything
    assert saved_bytes(model, parse_remat("save_all_but_attention")) == everything - 4 * 4
    assert saved_bytes(model, parse_remat("save_matmuls")) == everything - 2 * 2 * 24


@functools.cache
def compiled_products(model: ModelConfig, remat: str) -> float:
    """FLOPs of the products of both passes, a token; attention is one block, so its loops, which
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
def test_a_policy_repeats_the_products_that_it_does_not_keep(name, remat):
    model = dataclasses.replace((MODELS | {"latent": LATENT})[name], compute_dtype="float32")
    repeated = compiled_products(model, remat) - compiled_products(model, "none")
    work = with_all_keys(trace_work(model, TIME, TIME))
    expected = work.recomputed_flops(remat) - work.recomputed_flops("none")
    assert repeated == pytest.approx(expected / (TIME * model.num_layers), rel=1e-6)
