"""FLOPs of a recorded model: by hand, and as counted in its traced layers and their gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from docs import my_model
from jaxscale.config import load
from jaxscale.config.model import ModelConfig, ModelSettings
from jaxscale.config.remat_policy import parse_remat
from jaxscale.models.decoder import plain_kernels
from jaxscale.models.protocol import Model, Stack, layer_function
from jaxscale.ops.attention.attention import attention
from jaxscale.ops.experts.dispatch import Dispatch
from jaxscale.ops.split_vjp import split_vjp
from jaxscale.sharding.model_trace import ModelWork
from jaxscale.training.remat import rematerialised, rematerialised_attention
from jaxscale.training.tracing.abstract_model import (
    example_of,
    find_model,
    gathered_params,
    layer_arguments,
)
from jaxscale.training.tracing.plain_matmuls import plain_matmuls
from jaxscale.training.tracing.trace_work import trace_work
from tests.models import two_stacks

SMALL = ModelConfig(
    num_layers=1, d_model=2, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=3, vocab_size=5
)
SIZES = {"num_layers": 2, "d_model": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
SIZES |= {"d_ff": 24, "vocab_size": 128}
LATENT = {"num_kv_heads": 4, "kv_rank": 24, "query_rank": 40, "rope_head_dim": 4}
ROUTED = {"num_experts": 8, "experts_per_token": 2, "capacity_factor": 0.0}
DEEPSEEK = {"router_groups": 1, "router_groups_kept": 1, "dense_layers": 1, "num_experts": 8}
DEEPSEEK |= {"shared_d_ff": 12, "expert_d_ff": 10, "prediction_depth": 1}
MODELS: dict[str, ModelSettings] = {
    "llama": ModelConfig(**SIZES),
    "gpt": ModelConfig(**SIZES | {"num_kv_heads": 4}, family="gpt"),
    "gemma3": ModelConfig(**SIZES, family="gemma3"),
    "gpt_neox": ModelConfig(**SIZES, family="gpt_neox", rope_share=0.5),
    "bert": ModelConfig(**SIZES, family="bert"),
    "adapters": ModelConfig(**SIZES, lora_rank=6),
    "mixtral": ModelConfig(**SIZES, **ROUTED, family="mixtral"),
    "adapted experts": ModelConfig(
        **SIZES, **ROUTED, family="mixtral", lora_rank=6, lora_targets="q,up,gate,down"
    ),
    "deepseek": ModelConfig(**SIZES | LATENT | DEEPSEEK, family="deepseek_v3"),
    "mt5": ModelConfig(**SIZES | {"num_kv_heads": 4}, family="mt5", num_encoder_layers=3),
    "a custom decoder": my_model.Settings(**SIZES, family="docs.my_model:MyModel"),
    "a custom model": two_stacks.TwoStacksSettings(
        **two_stacks.SETTINGS, family="tests.models.two_stacks:TwoStacks"
    ),
}
LENGTHS = (16, 8)


def with_all_keys(work: ModelWork) -> ModelWork:
    """Attention as plain kernels compute it, whose scores are masked afterwards."""
    stacks = [
        dataclasses.replace(
            stack,
            attention=tuple(
                dataclasses.replace(one, keys=one.source_len or stack.seq_len)
                for one in stack.attention
            ),
        )
        for stack in work.stacks
    ]
    return dataclasses.replace(work, stacks=tuple(stacks))


def flops(function, *arguments) -> float:
    """Of a traced function."""
    found, _ = plain_matmuls(jax.make_jaxpr(function)(*arguments).jaxpr)
    return sum(2.0 * one.rows * one.inputs * one.outputs for one in found)


@functools.cache
def traced(settings: ModelSettings, remat: str) -> tuple[float, float]:
    """FLOPs of all layers, forward, and of both passes under a policy."""
    policy, one_way, both_ways = parse_remat(remat), 0.0, 0.0
    # One block, which the backward pass of this attention computes in whole.
    attend = functools.partial(attention, implementation="blockwise")
    dispatch = Dispatch(matmul="ragged_dot")
    kernels = dataclasses.replace(plain_kernels(), attend=attend, dispatch=dispatch)
    model = find_model(settings)(settings, rematerialised_attention(kernels, policy))

    def both(function, weights, x, shared, context):
        forward, backward = split_vjp(function)
        (y, loss), _, residuals = forward(weights, x, shared, context)
        return backward(weights, shared, context, residuals, (y, loss))

    batch = example_of(model, *LENGTHS)
    for stack, _, arguments in layer_arguments(model, gathered_params(model.settings), batch):
        for kind in range(stack.period):
            layer = layer_function(stack, kind)
            share = len(range(kind, stack.num_layers, stack.period))
            one_way += share * flops(layer, *arguments)
            saving = functools.partial(both, rematerialised(layer, policy))
            both_ways += share * flops(saving, *arguments)
    return one_way, both_ways


@pytest.mark.proof(but=["a custom decoder-full"])
@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("llama", "full"),
        ("llama", "save_all_but_attention"),
        ("gpt", "save:query,attention,mlp_up"),
        ("gemma3", "full"),  # a norm needs the result of the last matmul
        ("gpt_neox", "full"),  # attention ends in the stream, too
        ("bert", "save:query,attention"),
        ("adapters", "save_matmuls"),  # but not what their first matrices make
        ("mixtral", "full"),
        ("adapted experts", "full"),
        ("adapted experts", "save:mlp_up"),
        ("mixtral", "save:mlp_up"),
        ("deepseek", "save:query,mlp_up"),
        ("deepseek", "full"),  # the norm of a module needs the result of experts
        ("a custom decoder", "full"),  # the gradient of a gate needs the result of the last matmul
        ("a custom decoder", "save:attention_out,mlp_gate"),
        ("a custom model", "full"),
    ],
)
def test_layers_cost_and_repeat_what_is_traced(name, remat):
    work = with_all_keys(trace_work(MODELS[name], *LENGTHS))
    forward, none = traced(MODELS[name], "none")
    assert work.layer_flops == pytest.approx(forward, rel=1e-9)
    repeated = work.recomputed_flops(remat) - work.recomputed_flops("none")
    assert repeated == pytest.approx(traced(MODELS[name], remat)[1] - none, rel=1e-9)
    assert (work.source_len > 0) == (name == "a custom model")


def test_a_model_small_enough_to_count_by_hand():
    work = trace_work(SMALL, 4, 4)
    projections = 2 * (2 * 8) + 2 * (2 * 4)  # query and output; key and value
    mlp = 3 * 2 * 3
    keys = (1 + 2 + 3 + 4) / 4  # that a query sees on average in a sequence of 4
    forward = 2 * (projections + mlp) + 2 * 2 * 8 * keys
    head = 2 * 2 * 5
    assert work.training_flops / 4 == 3 * (forward + head)
    # All but a layer's last matmul is done again, and by name what is not saved.
    down, kernel = 2 * 2 * 3, 2 * 2 * 8 * keys
    repeated = {
        "none": 0,
        "full": forward - down,
        "save_all_but_attention": kernel,
        "save_matmuls": 0,
        "save:query,attention,mlp_up": forward - down - 2 * 2 * 8 - kernel - 2 * 2 * 3,
    }
    for remat, flops in repeated.items():
        assert work.hardware_flops(remat) / 4 == 3 * (forward + head) + flops
    assert work.hardware_flops("full", 0.5) / 4 == 3 * (forward + head) + forward / 2


def test_adapters_leave_out_the_gradients_of_other_weights():
    plain, adapted = (
        trace_work(dataclasses.replace(SMALL, lora_rank=rank), 4, 4) for rank in (0, 3)
    )
    # The two matrices of seven adapters; attention has no weights.
    sizes = 3 * (2 * (2 + 8) + 2 * (2 + 4) + 3 * (2 + 3))
    attention = plain.stacks[0].attention[0].flops
    assert adapted.sequence_flops == plain.sequence_flops + 4 * 2 * sizes
    wanted = 2 * adapted.sequence_flops + 4 * (attention + 2 * sizes)
    assert adapted.training_flops == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("kind", ["lora_rank", "side_width", "prompt_tokens"])
def test_adapters_cost_two_forward_passes_and_a_side_network_one(kind):
    plain = trace_work(SMALL, 4, 4)
    adapted = trace_work(dataclasses.replace(SMALL, **{kind: 3}), 4, 4)
    assert adapted.adapted
    attention = 4 * sum(one.flops for one in plain.stacks[0].attention)
    if kind == "side_width":
        side = 4 * 2 * 2 * (2 * 3)  # two matrices, of one layer
        assert adapted.sequence_flops == plain.sequence_flops + side
        assert adapted.training_flops == plain.sequence_flops + plain.head_flops + 3 * side
        again = {"none": 0, "full": side / 2, "save_matmuls": side / 2}
        for remat, flops in again.items():
            assert adapted.hardware_flops(remat) == adapted.training_flops + flops
    if kind == "prompt_tokens":  # no weight has a gradient but the prompt, which is looked up
        assert adapted.training_flops == 2 * plain.sequence_flops + attention


def test_a_sliding_window_costs_the_keys_inside_it():
    model = MODELS["llama"]
    wide, narrow, whole = (
        trace_work(dataclasses.replace(model, sliding_window=window), 10, 10)
        for window in (64, 3, 0)
    )
    assert wide.training_flops == whole.training_flops
    seen = np.mean([min(i + 1, 3) for i in range(10)])
    per_key = 3 * 2 * 4 * 4 * 8  # of two layers
    difference = whole.training_flops - narrow.training_flops
    assert difference == pytest.approx(10 * per_key * (5.5 - seen))


def test_of_eight_layers_one_sees_everything():
    gemma = ModelConfig(family="gemma3", num_layers=8, sliding_window=5)
    seen = [min(i + 1, 5) for i in range(20)]
    keys = (7 * sum(seen) / 20 + 10.5) / 8
    (stack,) = trace_work(gemma, 20, 20).stacks
    attention = sum(one.flops for one in stack.attention)
    assert attention == pytest.approx(4 * gemma.num_heads * gemma.head_dim * keys)


def test_a_model_that_is_not_causal_attends_to_all_keys_and_its_head_has_two_matrices():
    esm = ModelConfig(family="esm")
    work = trace_work(esm, 20, 20)
    assert [one.flops for one in work.stacks[0].attention] == [
        4 * esm.num_heads * esm.head_dim * 20
    ]
    assert work.head_flops == 20 * 2 * esm.d_model * (esm.d_model + esm.vocab_size)


def test_experts_count_that_a_token_goes_through():
    plain, routed = (trace_work(MODELS[name], 16, 16) for name in ("llama", "mixtral"))
    mlp = 3 * 2 * 16 * 24
    assert routed.layer_flops - plain.layer_flops == 2 * 16 * (mlp + 2 * 16 * 8)


def test_both_sequences_of_an_encoder_decoder():
    source, target = LENGTHS
    work = trace_work(MODELS["mt5"], *LENGTHS)
    matrix, mlp = 2 * 16 * 4 * 8, 3 * 2 * 16 * 24  # FLOPs a token
    scores = 4 * 4 * 8  # of a query and a key
    encoder = source * (4 * matrix + mlp + scores * source)
    own = scores * (target + 1) / 2
    decoder = target * (6 * matrix + mlp + own + scores * source) + source * 2 * matrix
    assert work.layer_flops == 3 * encoder + 2 * decoder
    assert work.head_flops == target * 2 * 16 * 128
    assert (work.source_len, work.layers) == (source, 2)
    assert work.head_cost(5) == pytest.approx(work.head_flops / (work.layer_flops / 5))
    assert trace_work(MODELS["mt5"], 8, 8).source_len == 8, "as long as the decoder's"


class Pooled(Model):
    """One layer over a stream without tokens, and a custom head."""

    def __init__(self, settings, kernels):
        self.settings, self.kernels = settings, kernels
        self.stacks = (Stack("layers", 3, self.enter, self.block, {"x": ("batch", "embed")}),)

    stacks = ()
    axes = {  # noqa: RUF012
        "embed": {"table": ("vocab", "embed")},
        "layers": {"weight": ("layers", "embed", "own")},
        "head": {"weight": ("embed", "classes")},
    }

    def init(self, key, rows=None):
        shapes = {"embed": {"table": (128, 4)}, "layers": {"weight": (3, 4, 4)}}
        shapes["head"] = {"weight": (4, 7)}
        return jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))

    def enter(self, embed, stream, batch):
        return {"x": embed["table"][batch.tokens].mean(axis=1)}

    def block(self, weights, stream, batch, layer):
        weight = weights["weight"]
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ weight), None), stream["x"], length=5)
        x = jax.lax.cond(layer.index > 0, lambda x: x @ weight @ weight, lambda x: x @ weight, x)
        return {"x": x}, {}

    def loss(self, head, stream, batch):
        loss = jnp.sum(stream["x"] @ head["weight"])
        return {"loss": loss, "nll": loss}


def test_loops_and_branches_of_a_custom_model():
    """A scan counts as often as it runs, a branch with the most FLOPs."""
    work = trace_work(ModelSettings(), 16, 16, Pooled)
    assert work.layer_flops == 3 * (5 + 2) * 2 * 4 * 4
    assert work.head_flops == 2 * 4 * 7
    assert work.layers == 3


def test_published_counts():
    """6 FLOPs for each parameter but those of the embedding, and attention."""
    config = load("llama3_8b")
    work = trace_work(config.model, config.data.seq_len, config.data.output_len)
    (stack,) = work.stacks
    attention = 3 * 32 * sum(one.flops for one in stack.attention)
    norms = (2 * 32 + 1) * 4096
    weights = 8_030_261_248 - 128256 * 4096 - norms
    assert work.training_flops / work.seq_len == pytest.approx(6 * weights + attention, rel=1e-12)
