"""The least custom model that trains on text: its settings extend `ModelSettings`, not those
of a decoder."""

from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp

from jaxscale.batch import Batch
from jaxscale.config.model import ModelSettings
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import STREAM, Layer, Model, Params, Rows, Stack, Stream, Sums


@dataclass(frozen=True)
class MixerSettings(ModelSettings):
    width: int = 16


@dataclass(frozen=True)
class Mixer(Model):
    """Two layers, in which a token reads the one before it."""

    settings: MixerSettings
    kernels: Kernels
    borrows = MappingProxyType({"tied": ("embed", "tokens")})

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return (Stack("layers", 2, self.enter, self.mix, {"x": STREAM}),)

    @property
    def axes(self) -> Params:
        layers = {"weight": ("layers", "embed", "mlp")}
        return {"embed": {"tokens": ("vocab", "embed")}, "layers": layers, "head": {}}

    def init(self, key: jax.Array, rows: Rows | None = None) -> Params:
        assert rows is None, "no pipeline"
        rows_of_vocabulary = -(-self.settings.vocab_size // 128) * 128
        shapes = {"embed": (rows_of_vocabulary, self.settings.width)}
        shapes["layers"] = (2, self.settings.width, self.settings.width)
        dtype = self.settings.param_dtype
        draw = {
            name: 0.1 * jax.random.normal(jax.random.fold_in(key, len(shape)), shape, dtype)
            for name, shape in shapes.items()
        }
        layers = {"weight": draw["layers"]}
        return {"embed": {"tokens": draw["embed"]}, "layers": layers, "head": {}}

    def enter(self, embed: Params, stream: Stream, batch: Batch) -> Stream:
        x = self.kernels.lookup(embed["tokens"], batch.tokens, "vocab", self.settings.compute_dtype)
        return {"x": self.kernels.shard(x, STREAM)}

    def mix(self, weights: Params, stream: Stream, batch: Batch, layer: Layer) -> tuple:
        x = stream["x"]
        (y,) = self.kernels.columns(x, (weights["weight"],))
        before = jnp.where(batch.positions[..., None] > 0, jnp.roll(jnp.tanh(y), 1, axis=1), 0)
        return {"x": self.kernels.shard(x + before, STREAM)}, {}

    def loss(self, head: Params, stream: Stream, batch: Batch) -> Sums:
        loss, nll = self.kernels.cross_entropy(
            stream["x"],
            head["tied"],
            batch.targets,
            batch.weights,
            vocab_size=self.settings.vocab_size,
            transposed=True,
        )
        return {"loss": loss, "nll": nll}


def make(settings: MixerSettings, kernels: Kernels) -> Mixer:
    return Mixer(settings, kernels)
