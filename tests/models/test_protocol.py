"""What a model of one's own must keep to is checked where it is traced, in words."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxscale.config.model import ModelConfig
from jaxscale.models.protocol import Stack, head_gradients, layer_function
from jaxscale.models.weights import axes_of

SUM = jnp.float32(0)


class Gates(nnx.Module):
    def __init__(self, gates: Any):
        self.gates = gates


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nnx.Param(jnp.ones(2)), r"gates of shape \(2,\) has axes = None; name each dim"),
        (lambda: nnx.Param(jnp.ones(2), axes="mlp"), "has axes = 'mlp'"),
        (lambda: nnx.Param(jnp.ones(2), axes=("mlp", "embed")), r"has axes = \('mlp', 'embed'\)"),
        (lambda: nnx.Param(jnp.ones(2, int), axes=("mlp",)), "gates is int.*, which has no grad"),
        (lambda: nnx.BatchStat(jnp.ones(2), axes=("mlp",)), "Gates.gates is an nnx.BatchStat; a"),
        (lambda: nnx.Dropout(0.1, rngs=nnx.Rngs(0)), r"Gates.gates.rngs.*\w is an nnx.Rng"),
        (lambda: jnp.ones(2), r"Gates.gates is an array; parameters are nnx.Param\(array, axes="),
    ],
)
def test_parameters_name_their_dimensions(make, said):
    with pytest.raises(ValueError, match=said):
        axes_of(lambda config, key: Gates(make()), ModelConfig())


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        (SUM, "loss returns a .*; it returns sums by name"),
        ({"loss": SUM, "late": SUM}, r"the sums \['late', 'loss'\]; .* \['late', 'loss', 'nll'\]"),
        ({"loss": SUM, "nll": SUM}, r"the sums \['loss', 'nll'\]; .* \['late', 'loss', 'nll'\]"),
        ({"loss": jnp.zeros(3), "nll": SUM, "late": SUM}, r"'loss' of shape \(3,\)"),
        ({"loss": SUM, "nll": jnp.bfloat16(0), "late": SUM}, "'nll' of .* type bfloat16"),
    ],
)
def test_a_loss_returns_the_sums_that_the_model_names(sums, said):
    model: Any = SimpleNamespace(metrics=("late",), loss=lambda head, stream, batch: sums)
    with pytest.raises(ValueError, match=said):
        head_gradients(model, {}, {}, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "shape None and type <class 'NoneType'>"),
        (jnp.ones((1, 4, 2), jnp.float32), r"returns shape \(1, 4, 2\) and type float32"),
        (jnp.ones((1, 4, 8), jnp.bfloat16), r"returns shape \(1, 4, 8\) and type bfloat16"),
    ],
)
def test_a_block_returns_a_stream_of_the_same_kind(returned, said):
    x = jnp.ones((1, 4, 8), jnp.float32)
    stack = Stack("layers", 1, lambda *_: {"x": x}, lambda *_: ({"x": returned}, {}))
    with pytest.raises(ValueError, match=f"given 'x' of shape .1, 4, 8. and type float32.*{said}"):
        layer_function(stack)({}, {"x": x}, {}, (None, 0))
