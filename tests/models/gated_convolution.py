"""A custom model of another kind of layer: a gated causal convolution between two matmuls."""

from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp

from jaxscale.batch import Batch
from jaxscale.config.model import ModelSettings
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import STREAM, Layer, Model, Params, Rows, Stack, Stream, Sums


@dataclass(frozen=True)
class ConvolutionSettings(ModelSettings):
    width: int = 64
    hidden: int = 96
    layers: int = 4
    taps: int = 3


@dataclass(frozen=True)
class GatedConvolution(Model):
    """Each feature is a weighted sum of its last values, times a gate."""

    settings: ConvolutionSettings
    kernels: Kernels
    borrows = MappingProxyType({"tied": ("embed", "tokens")})
    rules = MappingProxyType({"taps": ()})

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return (Stack("layers", self.settings.layers, self.enter, self.mix),)

    @property
    def axes(self) -> Params:
        layers = dict.fromkeys(("up", "gate"), ("layers", "embed", "mlp"))
        layers |= {"taps": ("layers", "taps", "mlp"), "down": ("layers", "mlp", "embed")}
        return {"embed": {"tokens": ("vocab", "embed")}, "layers": layers, "head": {}}

    def init(self, key: jax.Array, rows: Rows | None = None) -> Params:
        one = self.settings
        sizes = {"embed": one.width, "mlp": one.hidden, "taps": one.taps, "layers": one.layers}
        sizes["vocab"] = -(-one.vocab_size // 128) * 128
        keys = iter(jax.random.split(key, 8))

        def draw(axes: tuple[str, ...]) -> jax.Array:
            shape = tuple(sizes[axis] for axis in axes)
            return 0.1 * jax.random.normal(next(keys), shape, one.param_dtype)

        params = {
            part: {name: draw(axes) for name, axes in tree.items()}
            for part, tree in self.axes.items()
        }
        if rows is not None:
            index = rows["layers"].reshape(-1)
            params["layers"] = {name: x[index] for name, x in params["layers"].items()}
        return params

    def enter(self, embed: Params, stream: Stream, batch: Batch) -> Stream:
        x = self.kernels.lookup(embed["tokens"], batch.tokens, "vocab", self.settings.compute_dtype)
        return {"x": self.kernels.shard(x, STREAM)}

    def mix(self, weights: Params, stream: Stream, batch: Batch, layer: Layer) -> tuple:
        x = stream["x"]
        up, gate = self.kernels.columns(x, (weights["up"], weights["gate"]))
        place = batch.positions[..., None]
        mixed = sum(
            jnp.where(place >= n, jnp.roll(up, n, axis=1), 0) * weights["taps"][n]
            for n in range(self.settings.taps)
        )
        x += self.kernels.rows(mixed * jax.nn.sigmoid(gate), weights["down"])
        return {"x": self.kernels.shard(x, STREAM)}, {}

    def loss(self, head: Params, stream: Stream, batch: Batch) -> Sums:
        x = self.kernels.shard(stream["x"], ("batch", "seq", "embed"))
        loss, nll = self.kernels.cross_entropy(
            x,
            head["tied"],
            batch.targets,
            batch.weights,
            vocab_size=self.settings.vocab_size,
            transposed=True,
        )
        return {"loss": loss, "nll": nll}


def make(settings: ConvolutionSettings, kernels: Kernels) -> GatedConvolution:
    return GatedConvolution(settings, kernels)
