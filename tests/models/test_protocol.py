"""What a custom model must keep to is checked where it is traced; the rest has defaults."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.batch import Batch
from jaxscale.config import from_dict
from jaxscale.config.model import ModelConfig, ModelSettings
from jaxscale.models.protocol import Stack, head_gradients, layer_function
from jaxscale.models.weights import axes_of
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine
from tests.models.mixer import Mixer, MixerSettings

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
        (lambda: nnx.BatchStat(jnp.ones(2), axes=("mlp",)), "Gates.gates is an nnx.BatchStat; u"),
        (lambda: nnx.Dropout(0.1, rngs=nnx.Rngs(0)), r"Gates.gates.rngs.*\w is an nnx.Rng"),
        (lambda: jnp.ones(2), r"Gates.gates is an array; make a parameter nnx.Param\(array, axes="),
    ],
)
def test_parameters_name_their_dimensions(make, said):
    with pytest.raises(ValueError, match=said):
        axes_of(lambda config, key: Gates(make()), ModelConfig())


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        (SUM, "loss returns a .*; return a dict of sums by name"),
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
        (jnp.ones((1, 4, 2), jnp.float32), r"shape \(1, 4, 2\) and type float32"),
        (jnp.ones((1, 4, 8), jnp.bfloat16), r"shape \(1, 4, 8\) and type bfloat16"),
    ],
)
def test_a_block_returns_a_stream_of_the_same_kind(returned, said):
    x = jnp.ones((1, 4, 8), jnp.float32)
    stack = Stack("layers", 1, lambda *_: {"x": x}, lambda *_: ({"x": returned}, {}))
    with pytest.raises(ValueError, match=f"returns 'x' of {said}.* given .*4, 8. and .*float32"):
        layer_function(stack)({}, {"x": x}, {}, (None, 0))


@dataclass(frozen=True)
class NoisySettings(MixerSettings):
    table_rows: int = 8
    share: float = 0.5
    position_setting = "table_rows"


@dataclass(frozen=True)
class Noisy(Mixer):
    """Drops a share of the stream; its setting is not called dropout."""

    settings: NoisySettings
    draws_noise = True

    def mix(self, weights, stream, batch, layer):
        (carried, sums), share = super().mix(weights, stream, batch, layer), self.settings.share
        return {"x": self.kernels.dropout(carried["x"], batch.noise, layer.index, 0, share)}, sums


def custom(settings: ModelSettings, seq_len: int = 8):
    sections = {
        "data": {"global_batch_size": 2, "seq_len": seq_len},
        "optimizer": {"learning_rate": 0.0},
    }
    config = from_dict({**sections, "layout": {"data": 1}})
    return dataclasses.replace(config, model=settings)


def open_custom(config, model):
    return make_engine(config, make_mesh(config.layout, jax.devices()[:1]), model=model)


def custom_batch(first: int = 0) -> Batch:
    row = np.arange(first, first + 8, dtype=np.int32)
    tokens = np.stack([row, row])
    return Batch(tokens, tokens, np.ones_like(tokens), tokens, np.ones(tokens.shape, np.float32))


def test_learned_positions_are_kept_to_whatever_their_setting_is_called():
    with pytest.raises(
        ValueError, match=r"seq_len = 16 is more than model\.table_rows = 8, the number of l"
    ):
        custom(NoisySettings(), seq_len=16)
    engine = open_custom(custom(NoisySettings()), Noisy)
    with pytest.raises(ValueError, match=r"from 1 to 8; .* and below model\.table_rows = 8"):
        engine.shard(custom_batch(first=1))


def test_a_model_that_says_so_has_noise():
    """The parameters stay, and the loss changes from step to step."""
    engine = open_custom(custom(NoisySettings()), Noisy)
    batch, state, losses = engine.shard(custom_batch()), engine.init(jax.random.key(0)), []
    for _ in range(2):
        state, metrics = engine.step(state, batch)
        losses.append(float(metrics.loss))
    assert np.isfinite(losses).all()
    assert losses[0] != losses[1]


def test_a_model_that_does_not_say_so_is_told(monkeypatch):
    monkeypatch.setattr(Noisy, "draws_noise", False)
    engine = open_custom(custom(NoisySettings()), Noisy)
    with pytest.raises(ValueError, match=r"batch.noise is \(\), .* set draws_noise = True"):
        engine.step.trace(engine.abstract_state, engine.abstract_batch)


def test_a_model_extends_the_base_and_its_settings_theirs():
    with pytest.raises(ValueError, match=r"Namespace; let its class extend .*protocol\.Model"):
        open_custom(custom(MixerSettings()), lambda settings, kernels: SimpleNamespace())
    with pytest.raises(ValueError, match=r"model is of type dict; its .*\.ModelSettings"):
        custom({"width": 8})  # type: ignore[arg-type]
