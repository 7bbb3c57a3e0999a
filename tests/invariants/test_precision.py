"""What bfloat16 costs: every parameter's gradient over long batches, against float64."""

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.batch import Batch
from jaxscale.config import from_dict
from jaxscale.config.model import ModelSettings
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import Layer, Model, Stack
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training import engine as engines
from jaxscale.training.step import mean_and_norm
from tests.invariants.layouts import compile_step, open_engine

SEQ_LEN, SEQUENCES, DOCUMENT, VOCABULARY, LAYERS = 256, 128, 64, 1000, 2
MODEL = {
    "num_layers": LAYERS,
    "d_model": 32,
    "num_heads": 2,
    "head_dim": 16,
    "d_ff": 64,
    "vocab_size": VOCABULARY,
    "qk_norm": True,
    "max_seq_len": SEQ_LEN,
}
MODELS = {
    "llama": MODEL | {"num_kv_heads": 1},
    "gpt": MODEL | {"family": "gpt", "num_kv_heads": 2, "tied_embeddings": True},
}
# A micro-batch has 16,384 tokens or more in each.
LAYOUTS = [
    pytest.param("gpt", {"microbatches": 2}, marks=pytest.mark.slow),
    ("gpt", {"fsdp": 2, "tensor": 2, "zero_stage": 3}),
    ("llama", {"context": 2, "microbatches": 2}),
    ("llama", {"pipeline": 2, "microbatches": 2, "schedule": "1f1b"}),
    ("llama", {"fsdp": 2, "zero_stage": 2, "microbatches": 2, "accumulation": "layered"}),
]
ROUNDINGS = 2 * 16 * LAYERS + 4


@functools.cache
def batch() -> Batch:
    """Tokens as frequent as words are (Zipf's law): one in eight is the commonest. Packed documents
    use low positions hundreds of times."""
    rng = np.random.default_rng(0)
    frequency = 1 / np.arange(1, VOCABULARY + 1)
    shape = SEQUENCES, SEQ_LEN + 1
    tokens = rng.choice(VOCABULARY, shape, p=frequency / frequency.sum()).astype(np.int32)
    place = np.broadcast_to(np.arange(SEQ_LEN, dtype=np.int32), (SEQUENCES, SEQ_LEN))
    weights = (rng.random((SEQUENCES, SEQ_LEN)) < 0.99).astype(np.float32)
    return Batch(tokens[:, :-1], tokens[:, 1:], 1 + place // DOCUMENT, place % DOCUMENT, weights)


def make_engine(family: str, dtype: str, layout: dict[str, Any]) -> Any:
    """A first moment that forgets at once is the gradient; it is not clipped."""
    return open_engine(
        from_dict(
            {
                "model": MODELS[family] | {"compute_dtype": dtype},
                "data": {"global_batch_size": SEQUENCES, "seq_len": SEQ_LEN},
                "optimizer": {
                    "b1": 0.0,
                    "clip_norm": 0.0,
                    "accumulation_dtype": "float32",
                    "moment_dtype": "float64",
                },
                "layout": {"data": 1, **layout},
            }
        )
    )


@functools.cache
def initial_state(family: str) -> Any:
    """With parameters that bfloat16 has: their rounding is not an error of a gradient."""
    state = make_engine(family, "float32", {}).init(jax.random.key(0))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), state.params)
    return jax.tree.map(np.asarray, state._replace(params=params))


def first_step(engine: Any, program: Any, family: str) -> tuple[Any, Any]:
    """Gradients and metrics."""
    place = lambda x, leaf: jax.device_put(x, leaf.sharding)  # noqa: E731
    state = jax.tree.map(place, initial_state(family), engine.abstract_state)
    state, metrics = program(state, engine.shard(batch()))
    return jax.tree.map(np.asarray, (optax.tree.get(state.opt_state, "mu"), metrics))


@functools.cache
def exact(family: str) -> tuple[Any, Any]:
    engine = make_engine(family, "float64", {})
    return first_step(engine, compile_step(engine), family)


@pytest.mark.compiles
@pytest.mark.proof
@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=str)
def test_gradients_are_as_exact_as_their_terms(family, layout):
    """A gradient is a sum over 32,768 tokens of terms that bfloat16 has rounded on their way.

    On that way, the longest, from the embedding through L layers and back, about 16 results of a
    layer are rounded forward and as many gradients backward, and 4 more in the head. A rounding
    moves each element by at most u = 2^-9 of its size, and so an array by at most u of its norm;
    norms and residual connections keep the sizes of what they pass on, and errors of independent
    roundings add up as their squares: a parameter's gradient is off by at most u sqrt(32 L + 4),
    1.6 % here, of its norm. (Typically by half of that, as a rounding's mean is 0.4 u.) A layout's
    sums of partial results over tensor or context are among the 16.

    The sum itself is to add nothing to that: in float32, 2^-24 for each of n terms at the very
    most, 0.2 %, is itself half lost among the squares. In bfloat16 it stops growing at 2^8 times
    the size of its terms, and a common token has thousands of them.
    """
    engine = make_engine(family, "bfloat16", layout)
    program = engine.step.lower(engine.abstract_state, engine.abstract_batch).compile()
    scatters = re.findall(r"= (\w+)\[[\d,]*\]\S* scatter\(.*/scatter-add", program.as_text())
    assert scatters
    assert set(scatters) == {"f32"}
    gradients, metrics = first_step(engine, program, family)
    expected, expected_metrics = exact(family)
    bound = 2**-9 * ROUNDINGS**0.5
    errors = jax.tree_util.tree_map_with_path(
        lambda path, got, wanted: (
            np.linalg.norm(got - wanted) / np.linalg.norm(wanted),
            jax.tree_util.keystr(path),
        ),
        gradients,
        expected,
    )
    errors = jax.tree.leaves(errors, is_leaf=lambda node: type(node) is tuple)
    assert max(errors)[0] < bound, max(errors)
    np.testing.assert_allclose(metrics.grad_norm, expected_metrics.grad_norm, rtol=bound)
    # Errors of single tokens' losses have either sign.
    np.testing.assert_allclose(metrics.loss, expected_metrics.loss, rtol=2**-16)
    assert metrics.loss_tokens == expected_metrics.loss_tokens == batch().weights.sum()


def test_what_is_accumulated_in_bfloat16_is_counted_and_measured_in_float32():
    """16,447 tokens are 16,384 in bfloat16, and its sums of squares have 8 bits."""
    rng = np.random.default_rng(0)
    sums = [jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in (5000, 70)]
    count, limit = jnp.float32(16447), 1e-3
    exact = [np.asarray(x, np.float64) / 16447 for x in sums]
    norm = np.sqrt(sum(np.sum(x**2) for x in exact))
    got, got_norm = jax.jit(mean_and_norm, static_argnums=2)(sums, count, limit)
    np.testing.assert_allclose(got_norm, norm, rtol=1e-6)
    for one, other in zip(got, exact):
        np.testing.assert_allclose(one, other * limit / norm, rtol=1e-6)


DEPTH, WIDTH = 600, 8


@dataclass(frozen=True)
class ManyReaders(Model):
    """Every layer adds the same array to the stream, by way of a matrix of its own."""

    settings: ModelSettings
    kernels: Kernels
    axes: ClassVar = {
        "embed": {"bias": ("embed",)},
        "layers": {"mix": ("layers", "embed", "mlp")},
        "head": {"scale": ("embed",)},
    }

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return (Stack("layers", DEPTH, self.enter, self.read, shared={"bias": ("embed",)}),)

    def init(self, key: jax.Array, rows: Any = None) -> dict:
        mix = jnp.where((np.arange(DEPTH) if rows is None else rows["layers"]) >= 0, 1.0, 0.0)
        mix = mix[:, None, None] * jnp.eye(WIDTH)
        return {
            "embed": {"bias": jnp.ones(WIDTH)},
            "layers": {"mix": mix},
            "head": {"scale": jnp.ones(WIDTH)},
        }

    def enter(self, embed: Any, stream: Any, batch: Batch) -> dict:
        bias = embed["bias"].astype(self.settings.compute_dtype)
        return {"x": jnp.zeros((*batch.tokens.shape, WIDTH), bias.dtype), "bias": bias}

    def read(self, weights: Any, stream: Any, batch: Batch, layer: Layer) -> tuple:
        return {"x": stream["x"] + stream["bias"] @ weights["mix"]}, {}

    def loss(self, head: Any, stream: Any, batch: Batch) -> dict:
        loss = jnp.sum(stream["x"].astype(jnp.float32) * head["scale"])
        return {"loss": loss, "nll": loss}


@pytest.mark.proof
@pytest.mark.parametrize("layout", [{}, {"pipeline": 2, "schedule": "1f1b"}], ids=str)
def test_what_many_layers_share_has_its_gradient_summed_in_float32(layout):
    """Of 600 equal terms, bfloat16 would add up 256."""
    config = from_dict(
        {
            "data": {"global_batch_size": 4, "seq_len": 2},
            "optimizer": {"b1": 0.0, "clip_norm": 0.0, "accumulation_dtype": "float32"},
            "layout": {"data": 1, "microbatches": 2, **layout},
        }
    )
    config = dataclasses.replace(config, model=ModelSettings())
    mesh = make_mesh(config.layout, jax.devices()[: config.layout.num_devices])
    engine = engines.make_engine(config, mesh, model=ManyReaders)
    ones = np.ones((4, 2), np.int32)
    there = engine.shard(Batch(ones, ones, ones, ones, ones.astype(np.float32)))
    state, _ = engine.step(engine.init(jax.random.key(0)), there)
    # A mean over the eight tokens, rounded once between the stages.
    (gradient,) = jax.tree.leaves(optax.tree.get(state.opt_state, "mu")["embed"])
    np.testing.assert_allclose(gradient, DEPTH, rtol=2**-8)
