"""What the memory formulas say of a model, a layout and an optimizer."""

import dataclasses
import math

import jax
import pytest

from jaxscale.config import from_dict, load
from jaxscale.config.layout import Layout
from jaxscale.models.decoder import plain_kernels
from jaxscale.planner.memory import at_rest
from jaxscale.planner.memory.layer_loop import Shards
from jaxscale.planner.memory.step import step_memory
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine
from jaxscale.training.tracing.abstract_model import example_of, find_model
from jaxscale.training.tracing.traces import model_trace

MODEL = {
    "num_layers": 8,
    "d_model": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "d_ff": 192,
    "vocab_size": 256,
    "compute_dtype": "float32",
}


EXPERTS = MODEL | {
    "family": "deepseek_v3",
    "num_kv_heads": 4,
    "num_layers": 4,
    "dense_layers": 1,
    "num_experts": 4,
    "experts_per_token": 2,
    "router_groups": 1,
    "router_groups_kept": 1,
    "expert_d_ff": 256,
    "shared_d_ff": 128,
    "kv_rank": 32,
    "query_rank": 48,
    "rope_head_dim": 16,
    "value_head_dim": 32,
}
"""Of layers with every kind of parameter that experts and latent attention have."""


def config(layout: dict, *, model: dict = MODEL, **optimizer):
    return from_dict(
        {
            "model": model,
            "data": {"global_batch_size": 32, "seq_len": 64},
            "layout": {"data": 1, "fsdp": 4} | layout,
            "optimizer": optimizer,
        }
    )


def parameters(config) -> Shards:
    trace = model_trace(config.model)
    return Shards(trace.parameters, trace.borrowed, config.layout, 4)


FROZEN = ({"params": "layers/mlp/*", "frozen": True}, {"params": "embed/*", "frozen": True})


@pytest.mark.proof(but=("1-groups3-lion", "1-groups3-adafactor", "1-groups3-muon"))
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adafactor", "muon"])
@pytest.mark.parametrize(("stage", "groups"), [(0, ()), (1, ()), (3, ()), (1, FROZEN)])
def test_the_state_is_the_engines_to_the_byte(optimizer, stage, groups):
    one = config(
        {"zero_stage": stage, "fsdp": 2, "tensor": 2},
        name=optimizer,
        groups=groups,
        **({} if optimizer == "adafactor" else {"moment_dtype": "bfloat16"}),
    )
    check_state(one)


@pytest.mark.proof
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adafactor", "muon"])
def test_the_state_of_experts_is_the_engines_to_the_byte(optimizer):
    sizes = {"fsdp": 2, "expert": 2, "tensor": 2}
    check_state(config(sizes, model=EXPERTS, name=optimizer))
    check_state(config({**sizes, "zero_stage": 1}, model=EXPERTS, name=optimizer))


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_the_state_of_adapters_is_the_engines_to_the_byte(optimizer):
    """Both matrices of each, by one rule: of 128 rows Adafactor keeps means."""
    adapted = MODEL | {"lora_rank": 128}
    check_state(config({"fsdp": 2, "tensor": 2}, model=adapted, name=optimizer))


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ({"base_dtype": "nf4", "base_targets": "q,k,v,out,up,gate"}, {"fsdp": 2, "tensor": 4}),
        ({"base_dtype": "float8", "base_targets": "down"}, {"fsdp": 2, "tensor": 2}),
    ],
)
def test_the_state_of_a_quantised_base_is_the_engines_to_the_byte(model, sizes):
    """A format for whose blocks the matrix of an MLP is too small on four ranks, and one for which
    it is not."""
    adapted = MODEL | {"lora_rank": 4, **model}
    check_state(config({"microbatches": 2, **sizes}, model=adapted))
    with pytest.raises(ValueError, match=r"layout.fsdp = 4 ranks shard the .* of layers/"):
        check_state(config({"fsdp": 4}, model=adapted | {"base_dtype": "nf4", "base_targets": ""}))


def check_state(one):
    devices = jax.devices()[: one.layout.num_devices]
    engine = make_engine(one, make_mesh(one.layout, devices))

    def device_bytes(tree):
        return sum(
            leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
            for leaf in jax.tree.leaves(tree)
        )

    rows, state = model_trace(one.model).stack_layers, engine.abstract_state
    counts = at_rest.count_bytes(one.optimizer.name)
    assert at_rest.parameter_bytes(one.model, one.layout, rows) == device_bytes(state.params)
    moments = at_rest.moment_bytes(one.model, one.optimizer, one.layout, rows) + counts
    assert moments == device_bytes(state.opt_state)
    arrays = jax.tree.leaves((state.params, state.opt_state))
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
    assert at_rest.whole_state_bytes(one.model, one.optimizer) + counts == whole


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("deepseek_v3", {"prediction_depth": 1, "num_layers": 4, "dense_layers": 1}),
        ("mt5_small", {}),
        ("tiny", {}),
    ],
)
def test_the_batch_is_the_models_to_the_byte(name, settings):
    """With the targets of modules for further tokens, or the tokens of an encoder, once."""
    config = load(name, [f"model.{key}={value}" for key, value in settings.items()])
    model, data, layout = config.model, config.data, Layout(data=4)
    batch = example_of(find_model(model)(model, plain_kernels()), data.seq_len, data.output_len)
    # Nothing reads positions here, and the compiler drops them.
    unread = (data.seq_len + data.output_len) * (model.num_encoder_layers > 0)
    each = sum(leaf.size for leaf in jax.tree.leaves(batch)) - unread
    found = at_rest.batch_bytes(model, data, layout) - at_rest.COUNT_BYTES
    assert found == 4 * each * data.global_batch_size // 4


def test_every_stage_needs_less_than_the_one_before():
    peaks = [
        step_memory(config({"zero_stage": stage, "microbatches": 4, "remat": "full"})).peak
        for stage in range(4)
    ]
    assert sorted(set(peaks), reverse=True) == peaks


def test_a_policy_that_keeps_less_stashes_less():
    policies = ("none", "save_all_but_attention", "save_matmuls", "save:query,key,value", "full")
    stashes = [step_memory(config({"remat": remat})).stash for remat in policies]
    assert sorted(set(stashes), reverse=True) == stashes


def test_layered_accumulation_stashes_every_microbatch():
    few, many = (
        step_memory(config({"microbatches": 4, "accumulation": accumulation, "zero_stage": 0}))
        for accumulation in ("sequential", "layered")
    )
    assert many.stash == 4 * few.stash


def test_ranks_of_tensor_and_context_share_what_layers_keep():
    alone = {"fsdp": 1, "zero_stage": 0}
    whole = step_memory(config(alone))
    for axis in ("tensor", "context"):
        assert 2 * step_memory(config({**alone, axis: 2})).stash == whole.stash


def test_what_waits_in_host_memory_leaves_the_device():
    here = step_memory(config({}))
    there = step_memory(config({"offload": "optimizer,activations"}), own_host=True)
    assert there.optimizer == at_rest.count_bytes("adamw")
    assert there.optimizer + there.host_optimizer == here.optimizer
    assert (there.stash, there.host_stash) == (0, here.stash)
    named = step_memory(config({"remat": "offload:query,mlp_up"}), own_host=True)
    assert named.stash == step_memory(config({"remat": "full"})).stash
    kept = step_memory(config({"remat": "save:query,mlp_up"})).stash
    assert named.stash + named.host_stash == kept
    on_cpu = step_memory(config({"offload": "optimizer,activations"}))
    assert (on_cpu.optimizer, on_cpu.stash) == (here.optimizer, here.stash)


def test_the_peak_is_the_arguments_and_the_largest_phase():
    one = step_memory(config({}))
    assert one.peak == one.parameters + one.optimizer + one.batch + max(one.phases.values())
    assert all(size >= 0 for size in dataclasses.asdict(one).values())


def test_the_middle_stages_keep_whole_weights_and_shards_at_rest():
    halves = {"model": MODEL | {"compute_dtype": "bfloat16"}}
    for stage, shards, kept in ((0, 1, False), (1, 4, True), (2, 4, True), (3, 4, False)):
        one = config({"zero_stage": stage, "microbatches": 2})
        one = dataclasses.replace(one, model=from_dict(halves).model)
        whole = step_memory(dataclasses.replace(one, layout=Layout(data=1))).parameters
        assert step_memory(one).parameters == whole // shards
        assert step_memory(one).kept_weights == kept * whole // 2
    assert step_memory(config({"fsdp": 1, "zero_stage": 1})).kept_weights == 0


def test_a_tpu_converts_the_weights_of_all_layers_before_its_loop():
    halves = {"model": MODEL | {"compute_dtype": "bfloat16"}}
    for stage, shards in ((0, 1), (1, 4), (3, 4)):
        one = dataclasses.replace(config({"zero_stage": stage}), model=from_dict(halves).model)
        layers = MODEL["num_layers"] * parameters(one).elements("layers")
        assert step_memory(one, "tpu").converted == 2 * layers // shards
        assert step_memory(one, "gpu").converted == 0


def test_shards_that_end_within_a_tile_leave_whole_gradients():
    tidy, ragged = (step_memory(config({"fsdp": fsdp}), "tpu") for fsdp in (16, 32))
    one = config({"fsdp": 16})
    # Those of the head are reduced before the loop.
    mlp = parameters(one).mlp_elements()
    results = parameters(one).elements("embed") + 2 * mlp
    assert ragged.walk_end - tidy.walk_end == 4 * results
    assert ragged.layer_weights - tidy.layer_weights == 4 * mlp
    assert step_memory(config({"fsdp": 32}), "gpu").walk_end == 0


def test_refusals():
    with pytest.raises(ValueError, match="chimera needs an even number of pipeline"):
        step_memory(config({"pipeline": 3, "schedule": "chimera", "microbatches": 3}))
    with pytest.raises(ValueError, match="back end 'abacus' has no memory model"):
        step_memory(config({}), "abacus")


def test_matrices_that_unrolled_layers_cast_once_are_held_through_the_step():
    """Below ZeRO stage 3, where no rank gathers them, and the parameters have another type."""
    model = MODEL | {"compute_dtype": "bfloat16"}
    of_layers = 8 * (128 * 64 * (2 * 4 + 2 * 2) + 3 * 128 * 192 + 2 * 128)

    def kept(model: dict = model, **layout) -> int:
        return step_memory(config({"unroll_layers": True, **layout}, model=model)).kept_weights

    assert kept(data=4, fsdp=1, zero_stage=2) == 2 * of_layers
    assert kept(zero_stage=0) == 2 * of_layers
    assert kept(data=4, fsdp=1) == kept(data=4, fsdp=1, zero_stage=2, unroll_layers=False) == 0
    assert kept(MODEL, zero_stage=0) == 0
    narrow = model | {"matmul_dtype": "float8", "param_dtype": "bfloat16"}
    assert kept(narrow, zero_stage=0) == 2 * of_layers  # quantised once, too
    assert kept(zero_stage=2) == kept(zero_stage=2, unroll_layers=False) > 2 * of_layers
