"""A step is what a textbook says: the gradient of the mean loss, clipped, for the optimizer.

The tests of layouts compare the engine with itself on one device; here it is compared with a few
lines of plain JAX and optax.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.batch import Batch, ShardedBatch
from jaxscale.config.optimizer import OptimizerConfig, ParamGroup
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.protocol import head_params
from jaxscale.training.engine import Engine
from jaxscale.training.gradients import split_batch
from jaxscale.training.step import TrainState, make_step
from tests.invariants.layouts import batches, compile_step, make_config, open_engine

MODEL = {
    "num_layers": 2,
    "d_model": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 24,
    "vocab_size": 257,
    "z_loss": 1e-2,
}
LAYOUT = {"data": 2, "microbatches": 2, "zero_stage": 0}


@dataclasses.dataclass(frozen=True)
class Plain:
    """Of one batch: the mean nll in nats per token, and the gradient of the mean loss."""

    nll: float
    gradient: dict
    norm: float


def first_state(engine: Engine) -> TrainState:
    """Before any step, with parameters that are not small; made without compiling anything."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        return jax.device_put(0.3 * rng.normal(size=leaf.shape), leaf.sharding)

    abstract = engine.abstract_state
    zeros = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), abstract)
    return zeros._replace(params=jax.tree.map(draw, abstract.params))


def plain_steps(model: Decoder, params, some: list[Batch]) -> list[Plain]:
    """Cross entropy and z-loss from whole logits, and their mean over the tokens that count."""
    config = model.settings

    def mean_loss(params, batch):
        weights = batch.weights.astype(jnp.float64) / batch.weights.sum()
        x = model.embed(params["embed"], batch)
        for layer in range(config.num_layers):
            x = model.block(jax.tree.map(lambda a, i=layer: a[i], params["layers"]), x, batch)
        logits = model.logits(head_params(model, params), x)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        nll = log_z - jnp.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
        return jnp.sum(weights * (nll + config.z_loss * log_z**2)), jnp.sum(weights * nll)

    compiled = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))
    found = [compiled(params, batch) for batch in some]
    return [Plain(float(nll), grad, float(optax.tree.norm(grad))) for (_, nll), grad in found]


@pytest.fixture(scope="session")
def steps():
    """(what the engine did, what it should have done) for a batch whose gradient is to be clipped
    and for one whose is not, also with weights below 1 in all: all targets of the first are one
    token; with parameters, the optimizer's settings, and the compiled step."""
    random = batches()[0]
    same = random._replace(targets=np.zeros_like(random.targets))
    light = random._replace(weights=random.weights / 4096)
    config = make_config(MODEL, LAYOUT)
    model = Decoder(config.model, plain_kernels())
    params = jax.tree.map(np.asarray, first_state(open_engine(config)).params)
    expected = plain_steps(model, params, [same, random])
    between = float(np.sqrt(expected[0].norm * expected[1].norm))
    optimizer = dataclasses.replace(config.optimizer, clip_norm=between)
    engine = open_engine(dataclasses.replace(config, optimizer=optimizer))
    step = compile_step(engine)
    found = [step(first_state(engine), engine.shard(batch)) for batch in (same, random, light)]
    assert expected[1].norm < 0.9 * between < between < 0.9 * expected[0].norm
    return params, engine.config.optimizer, list(zip(found, [*expected, expected[1]])), step


@pytest.mark.proof
def test_the_loss_is_the_mean_over_the_tokens_that_count(steps):
    weights = batches()[0].weights
    for ((_, metrics), expected), parts in zip(steps[2], (1, 1, 4096)):
        assert float(metrics.loss) == pytest.approx(expected.nll, rel=1e-12)
        assert float(metrics.loss_tokens) == weights.sum() / parts < weights.size / parts
        # Padding is not read, either; what is read without loss is in a run's own records.
        assert int(metrics.tokens) == np.sum(batches()[0].segments > 0)


@pytest.mark.proof
def test_the_norm_is_that_of_the_mean_before_clipping(steps):
    for (_, metrics), expected in steps[2]:
        assert float(metrics.grad_norm) == pytest.approx(expected.norm, rel=1e-12)


@pytest.mark.proof
def test_the_optimizer_gets_the_mean_clipped_where_it_is_too_large(steps):
    """Adam's first moment is (1 - b1) of its first gradient, and its update follows from both."""
    params, settings, cases, _ = steps
    clip = optax.clip_by_global_norm(settings.clip_norm)
    for (state, _), expected in cases:
        gradient, _ = clip.update(expected.gradient, clip.init(params))
        check_moment(settings, optax.tree.get(state.opt_state, "mu"), gradient)
        assert int(state.step) == 1


def check_moment(settings: OptimizerConfig, moment, gradient) -> None:
    jax.tree.map(
        lambda got, wanted: np.testing.assert_allclose(
            got, (1 - settings.b1) * wanted, rtol=1e-9, atol=1e-16
        ),
        moment,
        gradient,
    )


@pytest.mark.compiles
@pytest.mark.proof
def test_frozen_parameters_have_no_gradients_and_the_others_the_same(steps):
    """Those of a layer's MLP are three matmuls of a micro-batch, which XLA leaves out."""
    params, settings, (_, (_, expected), _), plain = steps
    config = make_config(MODEL, LAYOUT)
    groups = tuple(ParamGroup(name, frozen=True) for name in ("layers/mlp/*", "embed/*"))
    optimizer = dataclasses.replace(settings, groups=groups)
    engine = open_engine(dataclasses.replace(config, optimizer=optimizer))
    step = compile_step(engine)
    rows = config.data.global_batch_size // 4  # of a device and micro-batch
    matmul = 2 * rows * config.data.seq_len * MODEL["d_model"] * MODEL["d_ff"]
    flops = [one.cost_analysis()["flops"] for one in (plain, step)]
    assert flops[0] - flops[1] > 3 * matmul

    state, metrics = step(first_state(engine), engine.shard(batches()[0]))
    moment = optax.tree.get(state.opt_state, "mu")["layers"]
    for name in ("attention", "attention_norm", "mlp_norm"):
        check_moment(settings, moment[name], expected.gradient["layers"][name])
    assert float(metrics.loss) == pytest.approx(expected.nll, rel=1e-12)
    assert float(metrics.grad_norm) < expected.norm
    for part, name in (("embed", "tokens"), ("layers", "mlp")):
        jax.tree.map(np.testing.assert_array_equal, state.params[part][name], params[part][name])


@pytest.mark.proof
def test_sums_over_microbatches_are_wider_than_bfloat16():
    """The nll of eight micro-batches is the sum of those of one at a time, the others weighing
    nothing: to float32's rounding, not to the 8 bits in which the layers compute."""
    engine = open_engine(make_config(MODEL, {"fsdp": 2, "microbatches": 8}, "bfloat16"))
    params, batch = first_state(engine).params, batches()[0]

    def nll(weights):
        there = engine.shard(batch._replace(weights=weights))
        return engine.evaluate(params, there, np.ones(257, np.float32)).nll

    together = nll(batch.weights)
    row = np.arange(len(batch.weights))[:, None]
    parts = [float(nll(batch.weights * (row % 8 == i))) for i in range(8)]
    assert together.dtype == jnp.float32
    assert float(together) == pytest.approx(sum(parts), rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_microbatch_has_the_same_rows_on_any_number_of_ranks(ranks):
    of_ranks = np.arange(24).reshape(ranks, -1)
    parts = [split_batch(rows, 3, 2) for rows in of_ranks]
    rows = np.sort(np.concatenate(parts, axis=-1), axis=-1)
    np.testing.assert_array_equal(rows.reshape(6, 4), np.arange(24).reshape(4, 6).T)


def plain_step(config, adjust, platform="cpu"):
    """A step of two parameters, the gradients of which are their sines, and its state and batch."""
    params = {"held": jnp.zeros(3), "free": jnp.zeros(3)}
    axes = dict.fromkeys(params, ("embed",))
    model: Any = SimpleNamespace(
        axes=axes, stacks=(), adjust=adjust, report=None, draws_noise=False
    )
    here = jax.tree.map(lambda x: x.sharding, params)
    sums, optimizer = {"nll": jnp.zeros(())}, optax.sgd(0.0, momentum=0.5)
    step = make_step(
        config,
        model,
        {},
        lambda params, batch: (sums, jax.tree.map(jnp.sin, params), ()),
        optimizer,
        dict.fromkeys(params, False),
        TrainState(None, here, None),
        platform,
    )
    batch = ShardedBatch(*(jnp.ones((1, 2)),) * 5)
    return step, TrainState(jnp.zeros((), int), params, optimizer.init(params)), batch


@pytest.mark.proof
def test_what_a_group_freezes_is_not_adjusted_either():
    """A model adjusts what it wants frozen itself, such as biases of routers, after the update."""
    config = dataclasses.replace(
        make_config(MODEL, {}), optimizer=OptimizerConfig(groups=(ParamGroup("held", frozen=True),))
    )
    step, state, batch = plain_step(config, lambda params, sums: jax.tree.map(jnp.cos, params))
    after, _ = step(state, batch)
    np.testing.assert_array_equal(after.params["held"], 0)
    np.testing.assert_array_equal(after.params["free"], 1)


def test_a_gpu_fetches_an_offloaded_state_when_the_gradients_are_there():
    """Else XLA does so during the backward pass, as an H200 did: 2 GB of 10 were saved."""
    config = make_config(MODEL, {"offload": "optimizer"})
    step, state, batch = plain_step(config, lambda params, sums: params, "gpu")
    host = state.params["free"].sharding.with_memory_kind("pinned_host")
    state = state._replace(opt_state=jax.device_put(state.opt_state, host))
    program = jax.make_jaxpr(step)(state, batch).jaxpr
    made_by = {out: one for one in program.eqns for out in one.outvars}
    fetched = [one for one in program.eqns if one.primitive.name == "device_put"]
    moments = [moment for one in fetched for moment in one.invars]
    assert len(moments) == len(jax.tree.leaves(state.opt_state)) == 2
    for moment in moments:
        barrier = made_by[moment]
        assert barrier.primitive.name == "optimization_barrier"
        given = [one in program.invars for one in barrier.invars]
        assert given == [True, True, False, False]  # the state, and both gradients
