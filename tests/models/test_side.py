"""Side network: the model is frozen and nothing is back-propagated through it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.compiled import hlo
from jaxscale.compiled.flops import computation_costs, instruction_flops
from jaxscale.config import from_dict
from jaxscale.config.model import ModelConfig
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.forward import forward
from jaxscale.models.protocol import Layer, head_params
from jaxscale.ops.array_stack import at
from jaxscale.sharding.mesh import make_mesh
from jaxscale.sharding.resolve import leaf_name
from jaxscale.training.engine import make_engine
from tests.invariants.models import make_batches

pytestmark = pytest.mark.compiles

LAYERS, WIDTH, D_MODEL, D_FF, VOCABULARY, BATCH, SEQ_LEN = 3, 4, 64, 192, 128, 8, 16
SIZES = {"num_layers": LAYERS, "d_model": D_MODEL, "num_heads": 4, "num_kv_heads": 2}
SIZES |= {"head_dim": 16, "d_ff": D_FF, "vocab_size": VOCABULARY, "attention": "reference"}
FLOAT32 = {"compute_dtype": "float32", "param_dtype": "float32"}


@functools.cache
def engine_of(remat: str = "none", **model):
    config = from_dict(
        {
            "model": {**SIZES, **FLOAT32, **model},
            "data": {"global_batch_size": BATCH, "seq_len": SEQ_LEN},
            "layout": {"data": 1, "remat": remat},
        }
    )
    return make_engine(config, make_mesh(config.layout, jax.devices()[:1]))


@functools.cache
def compiled(remat: str = "none", **model):
    engine = engine_of(remat, **model)
    return engine.step.lower(engine.abstract_state, engine.abstract_batch).compile()


def flops(program) -> float:
    """Of the matmuls, with loops."""
    parsed = hlo.parse_hlo(program.as_text())
    return computation_costs(parsed, instruction_flops)[parsed.entry]


def matmul(*sizes: int) -> float:
    return 2.0 * BATCH * SEQ_LEN * math.prod(sizes)


HEAD = matmul(D_MODEL, VOCABULARY)
SIDE = LAYERS * 2 * matmul(D_MODEL, WIDTH)
LAYER = matmul(D_MODEL, 2 * D_MODEL + 2 * 32) + matmul(D_MODEL, 3 * D_FF)
ATTENTION = 2 * matmul(D_MODEL, SEQ_LEN)
FORWARD = LAYERS * (LAYER + ATTENTION) + HEAD


@pytest.mark.proof
def test_a_step_trains_the_side_network_alone_at_the_cost_of_a_forward_pass():
    """The head's input gradient is the only one of the frozen model."""
    with jax.enable_x64(False):  # XLA writes the trip counts of 32-bit counters
        engine, step = engine_of(side_width=WIDTH), compiled(side_width=WIDTH)
        assert flops(step) == pytest.approx(FORWARD + HEAD + 3 * SIDE, rel=0.05)
        state = engine.init(jax.random.key(0))
        before = jax.device_get(state.params)
        names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(before)]
        adapters = ["layers/side/down", "layers/side/up"]
        assert set(engine.model.frozen) == {*names} - {*adapters}
        moments = jax.tree.leaves(engine.abstract_state.opt_state)
        sizes = sorted(leaf.size for leaf in moments if leaf.size > 1)
        assert sizes == 4 * [LAYERS * D_MODEL * WIDTH]  # two moments of two matrices
        losses = []
        for batch in make_batches({}, SEQ_LEN):
            state, metrics = step(state, engine.shard(batch))
            losses.append(float(metrics.loss))
            assert np.isfinite(metrics.grad_norm)
            assert metrics.grad_norm > 0
        assert len(losses) > 1
        after = jax.device_get(state.params)
    changed = jax.tree.map(lambda x, y: bool((x != y).any()), before, after)
    paths = jax.tree_util.tree_leaves_with_path(changed)
    assert [leaf_name(path) for path, one in paths if one] == adapters


@pytest.mark.proof
def test_flops_and_temporaries_against_lora_and_all_weights():
    """As published: 1 forward pass against 2 and 3; remat does not repeat a frozen layer, and the
    layers' activations are not saved."""
    with jax.enable_x64(False):
        full, lora, side = compiled(), compiled(lora_rank=WIDTH), compiled(side_width=WIDTH)
        again = {remat: compiled(remat, side_width=WIDTH) for remat in ("full", "save_matmuls")}
    assert flops(full) == pytest.approx(3 * FORWARD, rel=0.05)
    # Both factors of adapters, and two matmuls of attention's backward pass, come on top.
    adapters = 3 * LAYERS * matmul(WIDTH, 6 * D_MODEL + 2 * 32 + 3 * (D_MODEL + D_FF) - 2 * D_MODEL)
    expected = 2 * FORWARD + LAYERS * ATTENTION + adapters
    assert flops(lora) == pytest.approx(expected, rel=0.05)
    for program in again.values():
        assert flops(program) == pytest.approx(flops(side), rel=0.01)

    def temporaries(program) -> int:
        return program.memory_analysis().temp_size_in_bytes

    stream = BATCH * SEQ_LEN * D_MODEL * 4
    assert temporaries(side) < temporaries(full) / 2
    assert temporaries(side) < temporaries(lora) / 2
    # A layer saves its side layer's input and 2 * WIDTH hidden features.
    saved = LAYERS * stream * (1 + 2 * WIDTH / D_MODEL)
    for program in (side, *again.values()):
        assert (
            temporaries(program)
            < saved + 12 * stream + BATCH * SEQ_LEN * (4 * D_FF + VOCABULARY) * 4
        )


@pytest.mark.proof
def test_the_model_is_at_first_the_one_that_it_was():
    """Exactly; and after the second matrices have changed, it is the recurrence of the paper. Of a
    dense layer and one of experts."""
    experts = {"family": "tests.models.experts:make", "num_experts": 4, "expert_pattern": "DE"}
    settings = {**SIZES, "num_layers": 2, "compute_dtype": "float64", "param_dtype": "float64"}
    plain = Decoder(ModelConfig(**settings, **experts), plain_kernels())
    adapted = Decoder(ModelConfig(**settings, **experts, side_width=WIDTH), plain_kernels())
    batch = next(make_batches({}, SEQ_LEN))
    params, more = (model.init(jax.random.key(0)) for model in (plain, adapted))
    (name,) = (stack.name for stack in plain.stacks)
    side = more[name].pop("side")
    jax.tree.map(np.testing.assert_array_equal, params, more)
    more[name]["side"] = side

    def logits(model, params):
        return model.logits(head_params(model, params), forward(model, params, batch)["x"])

    base = logits(plain, params)
    np.testing.assert_array_equal(logits(adapted, more), base)
    side["up"] = jax.random.normal(jax.random.key(1), side["up"].shape)
    stack = plain.stacks[0]
    x = stack.enter(params["embed"], {}, batch)["x"]
    y = jnp.zeros_like(x)
    for index in range(stack.num_layers):
        weights = at(params[name], index)
        x = stack.block(weights, {"x": x}, batch, Layer(index, 0))[0]["x"]
        y += jax.nn.gelu((x + y) @ side["down"][index]) @ side["up"][index]
    expected = plain.logits(head_params(plain, params), x + y)
    assert np.abs(expected - base).max() > 0.1
    np.testing.assert_allclose(logits(adapted, more), expected, rtol=1e-10, atol=1e-10)
