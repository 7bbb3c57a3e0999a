"""Shared layers part, and models grow, with what they have learnt.

Pseudo-to-Real (M6-10T, arXiv 2110.03888) and CPM-2's upcycling (arXiv 2106.10715).
"""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import config as configs
from jaxscale import evaluate, grow
from jaxscale.checkpoints.tiers import Checkpoints
from jaxscale.config import from_dict, load
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.forward import forward
from jaxscale.models.protocol import head_params
from jaxscale.models.shared_layers import unshared_params
from jaxscale.run import trainer, training_loop
from jaxscale.run.growth.changes import described, larger_config
from jaxscale.run.growth.grow_state import grow_state, unshared_config
from jaxscale.run.pretrained import Pretrained, from_pretrained
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine
from tests.invariants.models import make_batches

SMALL = (
    *("model.num_layers=4", "model.d_model=16", "model.d_ff=32", "model.num_heads=2"),
    *("model.num_kv_heads=2", "model.head_dim=8", "data.seq_len=32", "data.global_batch_size=8"),
    *("model.compute_dtype=float64", "model.param_dtype=float64", "run.eval_every=0"),
    *("optimizer.accumulation_dtype=float64", "optimizer.moment_dtype=float64"),
    *("optimizer.second_moment_dtype=float64", "optimizer.schedule=constant"),
)
PARTING = ("model.share_layers=4", "model.unshare_at=3", "run.steps=6")
SIZES = {"num_layers": 4, "d_model": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
FLOAT64 = {"compute_dtype": "float64", "param_dtype": "float64", "vocab_size": 64, "d_ff": 32}


def trained(workdir, *settings):
    """The losses of a run by step, and its last state."""
    ready = trainer.open_trainer(load("configs/tiny.py", [*SMALL, *settings]), workdir)
    assert ready
    state, _ = training_loop.fit(ready, trackers=())
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return losses, jax.tree.map(np.asarray, state)


def same(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def near(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, wanted)


@pytest.fixture(scope="module")
def parted(tmp_path_factory):
    """A run whose four layers part after step 3."""
    workdir = tmp_path_factory.mktemp("parted")
    saves = ("run.checkpoint_every=2", "run.keep_last=9", "layout.data=8")
    return workdir, *trained(workdir, *PARTING, *saves)


@pytest.mark.proof
def test_layers_part_within_a_run(parted, tmp_path):
    """The config in the folder is that of the newest checkpoint, and the first step after the
    parting has the loss of the shared layers."""
    workdir, losses, state = parted
    steps = Checkpoints(workdir / "checkpoints").steps()
    assert steps == [2, 3, 4, 6]
    written = configs.from_dict(configs.read_sections(workdir / "config.json"))
    assert (written.model.share_layers, written.model.unshare_at) == (1, 3)
    up = state.params["layers"]["mlp"]["up"]
    assert len(up) == 4
    assert not np.array_equal(up[0], up[1])
    shared, _ = trained(tmp_path / "shared", *PARTING[:1], "run.steps=4", "layout.data=8")
    assert {step: shared[step] for step in (1, 2, 3, 4)} == {n: losses[n] for n in (1, 2, 3, 4)}


@pytest.mark.proof
@pytest.mark.parametrize(
    "layout",
    [
        {"fsdp": 4, "tensor": 2},
        pytest.param({"context": 2, "fsdp": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_parting_run_has_the_same_losses_in_any_layout(parted, tmp_path, layout):
    _, losses, state = parted
    axes = [f"layout.{axis}={size}" for axis, size in {"data": 1, **layout}.items()]
    found, last = trained(tmp_path, *PARTING, *axes)
    near(found, losses)
    near(last.params, state.params)


@pytest.mark.proof
@pytest.mark.parametrize(
    "step", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_parting_run_resumes_to_the_bit_on_either_side(parted, tmp_path, step):
    workdir, losses, state = parted
    copied = tmp_path / "run"
    shutil.copytree(workdir, copied)
    for later in Checkpoints(copied / "checkpoints").steps():
        if later > step:
            shutil.rmtree(copied / "checkpoints" / str(later))
    found, last = trained(copied, *PARTING, "layout.data=8")
    assert found == losses
    same(last, state)


def _models(group=2, **settings):
    shared = from_dict({"model": {**SIZES, **FLOAT64, "share_layers": group, **settings}}).model
    return Decoder(shared, plain_kernels()), Decoder(shared.unshared(), plain_kernels())


def test_the_gradient_of_shared_weights_is_the_sum_of_the_layers():
    """And the losses are equal to the bit."""
    small, large = _models()
    batch = next(make_batches({}))
    params = small.init(jax.random.key(0))

    def loss(model, params):
        stream = forward(model, params, batch)
        return model.loss(head_params(model, params), stream, batch)["loss"]

    value, grads = jax.jit(jax.value_and_grad(lambda p: loss(small, p)))(params)
    whole = unshared_params(small, params)
    of_layers, each = jax.jit(jax.value_and_grad(lambda p: loss(large, p)))(whole)
    assert value == of_layers
    summed = jax.tree.map(lambda g: g.reshape(2, 2, *g.shape[1:]).sum(1), each["layers"])
    near(grads["layers"], summed)
    near(grads["head"], each["head"])
    # Generation reads a group's weights for each of its layers.
    tokens = batch.tokens[:, :4]
    at = jnp.broadcast_to(jnp.arange(4), tokens.shape)
    x, cache = small.decode(params, tokens, at, small.empty_cache(len(tokens), 4))
    wanted = large.decode(whole, tokens, at, large.empty_cache(len(tokens), 4))
    same((x, cache), wanted)


def test_the_first_update_after_parting_is_that_of_the_group_where_gradients_are_equal():
    """With rescaled moments, in the form without epsilon; moments copied as they are would take
    updates of another size."""
    group, rule = 4, optax.scale_by_adam(eps=0.0)
    rng = np.random.default_rng(0)
    shared = jnp.asarray(rng.normal(size=(1, 8)))
    state = rule.init(shared)
    for _ in range(5):
        _, state = rule.update(jnp.asarray(rng.normal(size=(1, 8))), state)
    grad = jnp.asarray(rng.normal(size=(1, 8)))
    wanted, _ = rule.update(grad, state)
    alone = state._replace(
        mu=jnp.repeat(state.mu, group, 0) / group, nu=jnp.repeat(state.nu, group, 0) / group**2
    )
    found, _ = rule.update(jnp.repeat(grad, group, 0) / group, alone)
    np.testing.assert_allclose(found, np.repeat(wanted, group, 0), rtol=1e-12)


@pytest.mark.proof
def test_a_parted_state_is_born_sharded_with_rescaled_moments():
    """And a pipeline's stages share as one device's layers do."""
    config = from_dict(
        {
            "model": {**SIZES, **FLOAT64, "share_layers": 2, "unshare_at": 1},
            "data": {"global_batch_size": 8, "seq_len": 16},
            "optimizer": {"moment_dtype": "float64", "second_moment_dtype": "float64"},
            "layout": {"data": 1, "fsdp": 2, "tensor": 2, "pipeline": 2, "microbatches": 2},
        }
    )
    mesh = make_mesh(config.layout)
    before, after = make_engine(config, mesh), make_engine(unshared_config(config), mesh)
    keys = iter(jax.random.split(jax.random.key(1), 100))
    draw = lambda like: jax.device_put(  # noqa: E731
        jax.random.normal(next(keys), like.shape).astype(like.dtype), like.sharding
    )
    state = jax.tree.map(draw, before.abstract_state)
    small = jax.tree.map(np.asarray, before.placement.to_canonical(state))
    grown = grow_state(before, after, state)
    found, wanted = (
        [(x.shape, x.sharding) for x in jax.tree.leaves(one)]
        for one in (grown, after.abstract_state)
    )
    assert found == wanted
    large = jax.tree.map(np.asarray, after.placement.to_canonical(grown))

    def twice(scale):
        return lambda x: np.repeat(x, 2, axis=0) * scale

    same(large.params["layers"], jax.tree.map(twice(1), small.params["layers"]))
    same(large.params["embed"], small.params["embed"])
    was, now = (one.opt_state[0] for one in (small, large))
    same(now.mu["layers"], jax.tree.map(twice(1 / 2), was.mu["layers"]))
    same(now.nu["layers"], jax.tree.map(twice(1 / 4), was.nu["layers"]))
    same((now.mu["head"], now.count), (was.mu["head"], was.count))


@pytest.mark.proof
def test_a_run_grows_in_layers_experts_and_tokens_with_its_function(parted, tmp_path, capsys):
    workdir, *_ = parted
    capsys.readouterr()

    def loss(folder):
        of = ["--workdir", str(folder), "--max_batches", "1"]
        assert evaluate.main([*of, "--json", str(tmp_path / "e.json")]) == 0
        return json.loads((tmp_path / "e.json").read_text())["eval_loss"]

    def grown(name, *to, source=workdir):
        output = tmp_path / name
        grow.main(["--workdir", str(source), "--output", str(output), "--to", *to])
        return output

    deeper = grown("deeper", "model.num_layers=7")
    experts = ("model.family=mixtral", "model.num_experts=4", "model.experts_per_token=2")
    wider = grown("wider", *experts, source=deeper)
    wanted = loss(workdir)
    assert loss(deeper) == pytest.approx(wanted, rel=1e-12)
    assert loss(wider) == pytest.approx(wanted, rel=1e-12)
    assert "the same function, up to rounding" in capsys.readouterr().out
    router = Checkpoints(wider / "checkpoints")
    assert router.steps() == [6]
    # It goes on from its step, with the optimizer's state.
    config = load(str(wider / "config.json"), ["run.steps=7"])
    ready = trainer.open_trainer(config, wider)
    assert ready
    state, _ = training_loop.fit(ready, trackers=())
    assert int(state.step) == 7
    up = np.asarray(state.params["layers"]["mlp"]["up"])
    assert up.shape == (7, 4, 16, 32)
    router = np.asarray(state.params["layers"]["mlp"]["router"])
    lengths = np.linalg.norm(router[0], axis=0)
    np.testing.assert_allclose(lengths, 0.01, rtol=0.2)  # after one step

    more = grown("more", "model.vocab_size=300", source=deeper)
    assert Checkpoints(more / "checkpoints").steps() == [0]
    ids = np.arange(8)[None]
    few, many = (from_pretrained(one, compute_dtype="float64")(ids) for one in (deeper, more))
    np.testing.assert_allclose(many[..., :257], few, rtol=1e-6)
    assert "a new run from step 0" in capsys.readouterr().out


@pytest.mark.proof
def test_experts_keep_the_function_only_with_gates_that_sum_to_one():
    """CPM-2's copies, under gates that are normalised, and under plain softmax gates."""
    settings = {"family": "qwen3", **SIZES, **FLOAT64, "num_layers": 2}
    config = from_dict({"model": settings, "layout": {"data": 1}})
    mesh = make_mesh(config.layout, jax.devices()[:1])
    dense, ids = make_engine(config, mesh), np.arange(12)[None]
    params = dense.init(jax.random.key(0)).params
    wanted = Pretrained(config.model, params, Decoder(config.model, plain_kernels()))(ids)
    for normalized in (True, False):
        to = ("family=qwen3_moe", "num_experts=4", f"router_normalized={normalized}")
        larger = larger_config(config, [f"model.{one}" for one in (*to, "experts_per_token=2")])
        engine = make_engine(larger, mesh)
        rng = np.random.default_rng(0)
        router = jnp.asarray(rng.normal(size=(2, 16, 4)))
        new = {"layers/mlp/router": router}
        grown = grow_state(dense, engine, dense.init(jax.random.key(0)), new).params
        found = Pretrained(larger.model, grown, Decoder(larger.model, plain_kernels()))(ids)
        assert np.allclose(found, wanted, rtol=0, atol=1e-6) == normalized
        (line,) = described(config.model, larger.model)
        assert ("not the same function" in line) != normalized


BASE = {"model": {**SIZES, "vocab_size": 257, "d_ff": 32}}


@pytest.mark.parametrize(
    ("settings", "to", "why"),
    [
        ({}, ["model.d_model=32"], "--to 'model.d_model=32' is not allowed"),
        ({}, ["optimizer.name=lion"], "is not allowed; it can be model.KEY=VALUE"),
        ({}, ["model.num_layers=2"], "below the run's 4; a model only grows"),
        ({}, ["model.num_layers=4"], "--to changes nothing"),
        ({"share_layers": 4}, ["model.share_layers=3"], "does not divide"),
        ({"lora_rank": 2}, ["model.num_layers=8"], "--to is for a model without adapters"),
        (
            {"family": "gemma3", "layer_pattern": "LG", "sliding_window": 4},
            ["model.num_layers=8"],
            "is not available with model.layer_pattern = 'LG'",
        ),
        (
            {"family": "mixtral", "num_experts": 4},
            ["model.num_experts=8"],
            "only a dense model gets experts",
        ),
        ({}, ["model.family=qwen3_moe", "model.num_experts=8"], "another model, not a larger one"),
    ],
)
def test_what_does_not_grow_is_refused(settings, to, why):
    config = from_dict({"model": BASE["model"] | settings})
    with pytest.raises(ValueError, match=re.escape(why)):
        larger_config(config, to)


def test_the_clip_limit_of_parted_layers():
    config = from_dict({"model": {**BASE["model"], "share_layers": 4, "unshare_clip": True}})
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, clip_norm=2.0)
    )
    assert unshared_config(config).optimizer.clip_norm == 1.0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"share_layers": 3}, "model.share_layers = 3 does not divide model.num_layers = 4"),
        ({"share_layers": 0}, "model.share_layers = 0 is too small"),
        ({"share_layers": 2, "lora_rank": 2}, "model.share_layers = 2 with adapters is not"),
        (
            {"share_layers": 1, "unshare_at": -1},
            "model.unshare_at = -1 is too small",
        ),
        (
            {"family": "gemma3", "share_layers": 1, "layer_pattern": "LG", "sliding_window": 4}
            | {"num_layers": 3, "share_layers": 3},
            "model.share_layers = 3 is not a multiple of the 2 layers of model.layer_pattern",
        ),
    ],
)
def test_groups_that_are_not_whole_are_refused(settings, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        from_dict({"model": {**SIZES, "vocab_size": 257, "d_ff": 32, **settings}})
