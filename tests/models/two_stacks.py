"""A model that uses all of the protocol: two stacks of different layers, an array that layers
share, a period, sums of layers, a borrowed and an unusual parameter, tokens of another length."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.batch import Batch
from jaxscale.config.model import ModelSettings
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import STREAM, Layer, Model, Params, Rows, Stack, Stream, Sums
from jaxscale.models.weights import exact_normal

WIDTH, HIDDEN, HEADS, HEAD_DIM, SOURCE_LEN = 32, 48, 4, 8, 16
SETTINGS = {"vocab_size": 64, "head_dim": HEAD_DIM}


@dataclass(frozen=True)
class TwoStacksSettings(ModelSettings):
    readers: int = 2
    writers: int = 4
    coefficient: float = 0.1


@dataclass(frozen=True)
class TwoStacks(Model):
    """Readers process the source tokens; writers, of alternating types, read their output."""

    settings: TwoStacksSettings
    kernels: Kernels

    @property
    def stacks(self) -> tuple[Stack, ...]:
        source = ("batch", "residual_seq", "embed")
        table = ("distances", "heads")
        return (
            Stack(
                "readers", self.settings.readers, self.enter_readers, self.read, {"source": source}
            ),
            Stack(
                "writers",
                self.settings.writers,
                self.enter_writers,
                self.write,
                {"x": STREAM},
                shared={"source": source, "table": table},
                sums={"loss": (), "size": (2,)},
                period=2,
            ),
        )

    @property
    def axes(self) -> Params:
        reader = {"scale": ("layers", "embed"), "up": ("layers", "embed", "mlp")}
        reader["down"] = ("layers", "mlp", "embed")
        heads = dict.fromkeys(("q", "k", "v"), ("layers", "embed", "heads", "head_dim"))
        writer = {**heads, "out": ("layers", "heads", "head_dim", "embed"), "gate": ("layers",)}
        writer["turn"] = ("layers", "embed", "own")
        return {
            "embed": {"tokens": ("vocab", "embed"), "table": table_axes(), "norm": ("embed",)},
            "readers": reader,
            "writers": writer,
            "head": {"scale": ("embed",)},
        }

    @property
    def borrows(self) -> Mapping[str, tuple[str, ...]]:
        return {"tied": ("embed", "tokens")}

    @property
    def frozen(self) -> tuple[str, ...]:
        return ("readers/scale",)

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("confident",)

    @property
    def rules(self) -> Mapping[str, tuple[str, ...]]:
        return {"own": ("tensor",), "distances": ()}

    def extras(self, seq_len: int) -> Mapping[str, tuple[int, Any]]:
        return {"source": (SOURCE_LEN, jnp.int32)}

    def init(self, key: jax.Array, rows: Rows | None = None) -> Params:
        sizes = {"embed": WIDTH, "mlp": HIDDEN, "heads": HEADS, "head_dim": HEAD_DIM, "own": 8}
        sizes |= {"vocab": 128, "distances": 3, "readers": self.settings.readers}
        keys = iter(jax.random.split(key, 32))

        def draw(name: str, axes: tuple[str, ...]) -> jax.Array:
            depth = {"layers": getattr(self.settings, name, 0)}
            shape = tuple({**sizes, **depth}[axis] for axis in axes)
            return exact_normal(next(keys), shape, 0.3).astype(self.settings.param_dtype)

        params = {
            part: {leaf: draw(part, axes) for leaf, axes in tree.items()}
            for part, tree in self.axes.items()
        }
        for name, layers in (rows or {}).items():
            params[name] = {
                leaf: jnp.where(layers.reshape(-1, *(1,) * (x.ndim - 1)) >= 0, x[layers], 0)
                for leaf, x in params[name].items()
            }
        return params

    def enter_readers(self, embed: Params, stream: Stream, batch: Batch) -> Stream:
        tokens = batch.extras["source"]
        x = self.kernels.lookup(embed["tokens"], tokens, "vocab", self.settings.compute_dtype)
        return {"source": self.kernels.shard(x, STREAM)}

    def enter_writers(self, embed: Params, stream: Stream, batch: Batch) -> Stream:
        x = self.kernels.lookup(embed["tokens"], batch.tokens, "vocab", self.settings.compute_dtype)
        source = stream["source"] * embed["norm"].astype(x.dtype)
        return {"x": self.kernels.shard(x, STREAM), "source": source, "table": embed["table"]}

    def read(self, weights: Params, stream: Stream, batch: Batch, layer: Layer) -> tuple:
        x = stream["source"]
        (up,) = self.kernels.columns(x * weights["scale"], (weights["up"],))
        x += self.kernels.rows(jnp.tanh(up), weights["down"])
        return {"source": self.kernels.shard(x, STREAM)}, {}

    def write(self, weights: Params, stream: Stream, batch: Batch, layer: Layer) -> tuple:
        x, source = stream["x"], stream["source"]
        q, k, v = self.kernels.columns(x, (weights["q"], weights["k"], weights["v"]))
        attended = self.kernels.attend(
            q, k, v, batch.segments, sliding_window=3 * layer.kind, causal=True, scale=0.3
        )
        change = self.kernels.rows(attended, weights["out"])
        read = jnp.mean(source, axis=1, keepdims=True) * jnp.sum(stream["table"][layer.kind])
        turned = jnp.tanh(x @ weights["turn"]) @ weights["turn"].T
        depth = 1 / (1 + jnp.asarray(layer.index, x.dtype))
        x += weights["gate"] * change + depth * (read + 0.1 * turned)
        x = self.kernels.shard(x, STREAM)
        size = jnp.sum(jnp.square(x), axis=-1) * batch.weights
        loss = self.settings.coefficient * jnp.sum(size)
        return {"x": x}, {"loss": loss, "size": jnp.stack([jnp.sum(size), jnp.sum(batch.weights)])}

    def loss(self, head: Params, stream: Stream, batch: Batch) -> Sums:
        x = self.kernels.shard(stream["x"] * head["scale"], ("batch", "seq", "embed"))
        loss, nll = self.kernels.cross_entropy(
            x,
            head["tied"],
            batch.targets,
            batch.weights * (1 + batch.positions % 2),
            vocab_size=self.settings.vocab_size,
            transposed=True,
        )
        confident = jnp.sum(jnp.abs(x).max(-1) * batch.weights)
        return {"loss": loss, "nll": nll, "confident": confident}


def table_axes() -> tuple[str, ...]:
    return ("distances", "heads")


def make(settings: TwoStacksSettings, kernels: Kernels) -> TwoStacks:
    return TwoStacks(dataclasses.replace(settings), kernels)
