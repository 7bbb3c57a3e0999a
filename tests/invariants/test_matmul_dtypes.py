"""Matmuls of 8 bits give the same losses, gradients and evaluations in every kind of layout, to
float64's own errors.

`int8` has scales along what is contracted, which ranks find together: nothing depends on the
layout. `float8` has a power of two for whatever a rank multiplies at a time, its rows of a
micro-batch, its columns, its experts' rows: that depends on the layout, but what it rounds does
not, unless an element of e4m3 is 2^14 times smaller than the largest of its array (of e5m2, which
gradients have: 2^29). So where all operands of e4m3 are larger than that, layouts are alike too.
They are here: with positive parameters no sum comes near zero.
"""

import collections
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.data.tokens.tokenizer import load_tokenizer
from jaxscale.decoding import sampling
from jaxscale.training.engine import Engine
from jaxscale.training.step import TrainState
from tests.invariants.layouts import (
    LEAST_GRADIENT,
    VOCABULARY,
    batches,
    compile_step,
    make_config,
    open_engine,
    relative_error,
)
from tests.invariants.models import canonical, on_ranks
from tests.ops.programs import equations

DENSE = {
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 48,
    "vocab_size": VOCABULARY,
}
MODELS = {
    "dense": DENSE,
    "experts": DENSE
    | {"family": "mixtral", "num_layers": 1, "num_experts": 4, "experts_per_token": 2},
}
SIZES = {"heads": 4, "kv_heads": 4, "mlp": 4, "experts": 2}
"""How much larger positive weights become along an axis, so that ranks have different scales."""

CONTEXT = {"context": 2, "fsdp": 2}
EXPERT_COLUMNS = {"expert": 2, "tensor": 2}
QUANTISED_ONCE = {"unroll_layers": True, "zero_stage": 2, "microbatches": 2}
CASES = [
    (
        "float8",
        "dense",
        {**CONTEXT, "context_method": "ulysses", "tensor": 2, "zero_stage": 2, "microbatches": 2},
    ),
    ("float8", "dense", {"pipeline": 2, "microbatches": 4, "schedule": "zb_h1"}),
    ("float8", "dense", QUANTISED_ONCE),
    ("float8", "experts", {"fsdp": 2, "expert": 2}),
    pytest.param(
        *("int8", "dense", {"pipeline": 2, "tensor": 2, "microbatches": 4, "schedule": "zb_h1"}),
        marks=pytest.mark.slow,  # float8 is in such a pipeline above
    ),
    ("int8", "experts", EXPERT_COLUMNS),
]


def open_with(dtype: str, model: str, layout: dict[str, Any]) -> Engine:
    return open_engine(make_config(MODELS[model] | {"matmul_dtype": dtype}, layout))


@functools.cache
def one_device(dtype: str, model: str) -> Engine:
    return open_with(dtype, model, {})


@functools.cache
def first_state(model: str, *, positive: bool) -> TrainState:
    """Of one device, as NumPy arrays."""
    engine, rng = one_device("", model), np.random.default_rng(0)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> np.ndarray:
        if "scale" in str(path[-1]):
            return np.ones(leaf.shape)
        if not positive:
            return rng.normal(0, 0.2, leaf.shape)
        if "router" in str(path[-1]):  # no matmul of 8 bits; tokens are to differ in their experts
            drawn = rng.normal(0, 0.2, leaf.shape)
            return drawn - drawn.mean(axes.index("embed"), keepdims=True)
        drawn = rng.uniform(1 / 16, 1 / 8, leaf.shape)
        for dim, name in enumerate(axes):
            sizes = np.geomspace(1, SIZES.get(name, 1), leaf.shape[dim])
            drawn *= np.expand_dims(sizes, [i for i in range(leaf.ndim) if i != dim])
        return drawn

    state = engine.abstract_state
    params = jax.tree_util.tree_map_with_path(draw, state.params, engine.model.axes)
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
    return state._replace(params=params)


class Steps(NamedTuple):
    """Of two steps."""

    metrics: np.ndarray  # the loss and the gradient's norm of each
    gradients: Any  # of the first, up to a factor
    params: Any


def two_steps(engine: Engine, state: TrainState) -> Steps:
    step, (first, second) = compile_step(engine), map(engine.shard, batches()[:2])
    state, found = step(on_ranks(engine, state), first)
    gradients = optax.tree.get(canonical(engine, state).opt_state, "mu")
    state, more = step(state, second)
    metrics = np.array([[each.loss, each.grad_norm] for each in jax.device_get((found, more))])
    return Steps(metrics, gradients, canonical(engine, state).params)


@functools.cache
def on_one_device(dtype: str, model: str) -> Steps:
    return two_steps(one_device(dtype, model), first_state(model, positive=dtype == "float8"))


@pytest.mark.proof
@pytest.mark.parametrize(("dtype", "model", "layout"), CASES, ids=str)
def test_matmuls_of_8_bits_are_one_device_in_every_layout(dtype, model, layout):
    state = first_state(model, positive=dtype == "float8")
    got, expected = two_steps(open_with(dtype, model, layout), state), on_one_device(dtype, model)
    np.testing.assert_allclose(got.metrics, expected.metrics, rtol=1e-10)
    assert relative_error(got.gradients, expected.gradients, LEAST_GRADIENT) < 1e-10
    assert relative_error(got.params, expected.params) < 1e-10


@pytest.mark.proof
def test_unrolled_layers_quantise_a_weight_once_a_step():
    """And find its scale once; with the same layers unrolled otherwise, in each micro-batch."""
    shapes = [(32, 4, 8), (32, 2, 8), (32, 2, 8), (4, 8, 32), (32, 48), (32, 48), (48, 32)]

    def times(layout: dict[str, Any]) -> dict[str, int]:
        engine, found = open_with("float8", "dense", layout), collections.Counter()
        step = jax.make_jaxpr(engine.step)(engine.abstract_state, engine.abstract_batch)
        for one, runs in equations(step.jaxpr):
            narrow = one.params.get("new_dtype") == jnp.float8_e4m3fn
            if one.primitive.name == "reduce_max" or narrow:
                found[one.primitive.name] += runs * (one.invars[0].aval.shape in shapes)
        return dict(found)

    weights = DENSE["num_layers"] * len(shapes)
    assert times(QUANTISED_ONCE) == dict.fromkeys(("reduce_max", "convert_element_type"), weights)
    each = times(QUANTISED_ONCE | {"zero_stage": 3})
    assert each == {"reduce_max": 2 * weights, "convert_element_type": 4 * weights}


def sample(engine: Engine, state: TrainState) -> list[str]:
    params, prompts = on_ranks(engine, state).params, ["fox", "a dog", "", "the"]
    return sampling.sample(
        engine, params, load_tokenizer("bytes"), prompts, num_tokens=12, temperature=0
    )


@functools.cache
def sample_of_one_device() -> list[str]:
    """Without matmuls of 8 bits."""
    return sample(one_device("", "experts"), first_state("experts", positive=False))


@pytest.mark.proof
@pytest.mark.parametrize(
    "layout", [CONTEXT, pytest.param(EXPERT_COLUMNS, marks=pytest.mark.slow)], ids=str
)
def test_evaluations_have_8_bits_and_samples_have_not(layout):
    """An evaluation finds the loss of a step. Samples are those of the model without
    `matmul_dtype`: its parameters are of either sign here, and which token is the likeliest changes
    with every rounding."""
    engine, batch = open_with("float8", "experts", layout), batches()[0]
    params = on_ranks(engine, first_state("experts", positive=True)).params
    sums = engine.evaluate(params, engine.shard(batch), np.ones(VOCABULARY, np.float32))
    loss = float(sums.nll) / float(sums.tokens)
    assert loss == pytest.approx(on_one_device("float8", "experts").metrics[0, 0], rel=1e-10)
    assert sample(engine, first_state("experts", positive=False)) == sample_of_one_device()
