"""The work of a traced model, and that of one given by its sizes."""

import dataclasses

import pytest

from jaxscale.config import Config, DataConfig, load
from jaxscale.config.model import ModelConfig
from jaxscale.model_families.shipped import PLANNED
from jaxscale.planner.model.named_models import NAMED
from jaxscale.planner.search.trainable_model import TrainableModel
from jaxscale.training.tracing.traces import model_trace

POLICIES = (
    "none",
    "full",
    "save_all_but_attention",
    "save:query,key,value,attention,attention_out",
)
SHARED = ("attention_out", "mlp_up", "mlp_gate", "mlp_down")


def work_of(name, *overrides):
    return TrainableModel(load(name, list(overrides))).work


def plain(stack):
    """Without names, which two shapes of a model may give in other words, and in one order."""
    parts = [(one.inputs, one.features, one.tokens * one.share, one.over) for one in stack.matmuls]
    return sorted(parts), [dataclasses.astuple(one) for one in stack.experts], stack.seq_len


def flops_of_weights(model):
    """Of all layers, for a token: two for each weight of a matrix that it meets."""
    trace = model_trace(model)
    matrices = tuple(
        one
        for one in trace.parameters
        if one.in_layers and "embed" in one.axes and len({*one.axes} - {"experts"}) > 1
    )
    met = dataclasses.replace(trace, parameters=matrices)
    return 2 * met.num_active_params(model.experts_per_token)


@pytest.mark.parametrize("name", ["llama3_8b", "mixtral_8x7b"])
def test_a_traced_model_does_the_work_of_its_published_sizes(name):
    work = work_of(name)
    named = {"llama3_8b": "llama3-8b", "mixtral_8x7b": "mixtral-8x7b"}[name]
    shape = dataclasses.replace(NAMED[named], seq_len=work.seq_len)
    (traced,), (given,) = work.stacks, shape.work.stacks
    assert plain(traced) == plain(given)
    for field in ("branches", "sent", "rotated", "opened", "hidden"):
        assert getattr(traced, field) == pytest.approx(getattr(given, field)), field
    assert traced.flops == pytest.approx(given.flops, rel=1e-3)  # a query sees itself, too
    for field in ("block_params", "routed_params", "embedding_params", "head_params"):
        assert getattr(work, field) == pytest.approx(getattr(shape.work, field), rel=1e-3), field


@pytest.mark.parametrize("family", PLANNED, ids=lambda family: family.name)
def test_operations_are_two_for_each_weight_and_those_of_attention(family):
    sizes = {"num_layers": 8, "d_model": 256, "sliding_window": 64, "d_ff": 512, "vocab_size": 384}
    if "sliding_window" not in family.settings:
        del sizes["sliding_window"]
    model = ModelConfig(family=family.name, **sizes, max_seq_len=128)
    objective = "causal" if model.causal else "masked"
    config = Config(model=model, data=DataConfig(objective=objective))
    work, seq_len = TrainableModel(config).work, config.data.seq_len
    attention = sum(call.flops for one in work.stacks for call in one.attention)
    assert work.layer_flops / seq_len == flops_of_weights(model) + 8 * attention
    assert attention > 0


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "mt5-xxl", "nemotron-3-super"])
def test_no_policy_repeats_more_than_a_forward_pass(name):
    work = NAMED[name].work
    none, full, attention, names = map(work.recomputed_flops, POLICIES)
    assert none == 0 < min(attention, names)
    assert max(attention, names, attention + names) < full < work.sequence_flops


def test_experts_repeat_what_a_token_meets():
    """Two of three matrices of the two experts of a token, and the router."""
    work = NAMED["mixtral-8x7b"].work
    each = 2 * 2 * 4096 * 14336 * 2 + 2 * 4096 * 8
    repeated = work.recomputed_flops(POLICIES[3]) / work.seq_len
    assert repeated == pytest.approx(32 * each)


@pytest.mark.parametrize(("pattern", "share"), [("DDE", 1 / 3), ("DEE", 2 / 3)])
def test_layers_that_alternate_share_their_experts(pattern, share):
    work = work_of("qwen3_30b_a3b", "model.num_layers=12", f"model.expert_pattern={pattern}")
    (stack,) = work.stacks
    assert (stack.num_layers, [one.share for one in stack.experts]) == (12, [share])
    assert stack.branches == pytest.approx(2)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "overrides", "experts"),
    [
        ("m6_t_10b", [], (128, 2, 1024, 4096, False)),
        ("mixtral_8x7b", ["model.capacity_factor=1.25"], (8, 2, 4096, 14336, True)),
        ("qwen3_30b_a3b", ["model.num_layers=12", "model.expert_pattern=DEE"], None),
        ("moe_tiny", ["model.experts_per_token=1"], None),
        ("moe_tiny", ["model.compute_dtype=bfloat16"], None),
    ],
)
def test_experts_count_whatever_their_router_drops(name, overrides, experts):
    config = load(name, overrides)
    work, length = TrainableModel(config).work, config.data.seq_len
    (one,) = work.stacks[-1].experts
    if experts:
        assert (one.count, one.choices, one.width, one.hidden, one.gated) == experts
    attention = sum(one.num_layers * call.flops for one in work.stacks for call in one.attention)
    assert work.layer_flops / length == pytest.approx(flops_of_weights(config.model) + attention)
    assert work.num_experts == config.model.num_experts


def test_windows_are_seen_by_layer():
    config = load("tiny", ["model.family=gemma3", "model.num_layers=12", "data.seq_len=4096"])
    (stack,) = TrainableModel(config).work.stacks
    seen = {one.keys: one.share for one in stack.attention}
    assert max(seen) == 4097 / 2
    assert sum(seen.values()) == pytest.approx(1)
    assert len(seen) == 2


def test_an_encoder_is_a_stack_of_its_own_length():
    work = work_of("mt5_base", "data.target_len=256")
    encoder, decoder = work.stacks
    assert (encoder.seq_len, decoder.seq_len, work.layers) == (1024, 256, 12)
    assert (encoder.branches, decoder.branches) == (2, 3)
    assert [one.keys for one in decoder.attention] == [257 / 2, 1024]
    read = [one for one in decoder.matmuls if one.names == ("key", "value")]
    assert [one.tokens for one in read] == [4]


def test_the_matmuls_of_adapters_are_counted():
    work = work_of("llama3_8b", "model.lora_rank=16")
    first = [one for one in work.stacks[0].matmuls if one.features == 16]
    assert {one.inputs: one.share for one in first} == {4096: 6, 14336: 1}
    assert {one.over for one in first} == {"tokens"}
