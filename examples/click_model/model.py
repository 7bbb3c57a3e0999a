"""A click model of Persia's shape (arXiv 2111.05897): a table of hashed categories, which has
almost all numbers of the model, and a tower of dense layers, 4096-2048-1024-512-256 scaled down
by 64.

A row of a batch has one impression at each position; its label is the target there.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from examples.click_model.criteo import COUNTS, FIELDS
from jaxscale import Batch, ModelSettings
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import (
    STREAM,
    EmbeddingTable,
    Layer,
    Model,
    Params,
    Rows,
    Stack,
    Stream,
    Sums,
)


@dataclass(frozen=True)
class ClickSettings(ModelSettings):
    table_rows: int = 2**16
    width: int = 8  # of a row
    tower: tuple[int, ...] = (64, 32, 16, 8, 4)
    impressions: int = 32  # of a row of a batch: data.seq_len


@dataclass(frozen=True)
class ClickModel(Model):
    settings: ClickSettings
    kernels: Kernels
    num_classes = 2

    @property
    def tables(self) -> Mapping[str, EmbeddingTable]:
        settings = self.settings
        return {
            "categories": EmbeddingTable(settings.table_rows, settings.width, ("ids",), scale=0.1)
        }

    def extras(self, seq_len: int) -> Mapping[str, tuple[int, Any]]:
        return {"ids": (seq_len * FIELDS, jnp.int32), "counts": (seq_len * COUNTS, jnp.float32)}

    @property
    def rules(self) -> Mapping[str, tuple[str, ...]]:
        names = ("inputs", "classes", "wide", *map("unit{}".format, range(1, self._depth)))
        return dict.fromkeys(names, ())

    @property
    def _depth(self) -> int:
        return len(self.settings.tower)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return (Stack("layers", 1, self.enter, self.block),)

    @property
    def axes(self) -> Params:
        names = ("embed", *map("unit{}".format, range(1, self._depth)), "classes")
        pairs = itertools.pairwise(names)
        return {
            "embed": {"first": ("inputs", "embed")},
            "layers": {"residual": ("layers", "embed", "wide")},
            "head": {f"dense{i}": pair for i, pair in enumerate(pairs)},
        }

    def init(self, key: jax.Array, rows: Rows | None = None) -> Params:
        tower, keys = self.settings.tower, iter(jax.random.split(key, 16))

        def draw(inputs: int, outputs: int) -> jax.Array:
            scale = (2 / inputs) ** 0.5
            return scale * jax.random.normal(next(keys), (inputs, outputs), jnp.float32)

        sizes = (*tower, 2)
        return {
            "embed": {"first": draw(FIELDS * self.settings.width + COUNTS, tower[0])},
            "layers": {"residual": 0.1 * draw(tower[0], tower[0])[None]},
            "head": {f"dense{i}": draw(*pair) for i, pair in enumerate(itertools.pairwise(sizes))},
        }

    def enter(self, embed: Params, stream: Stream, batch: Batch) -> Stream:
        rows, time = batch.extras["counts"].shape[0], batch.extras["counts"].shape[1] // COUNTS
        categories = batch.vectors["ids"].reshape(rows, time, -1)
        counts = batch.extras["counts"].reshape(rows, time, -1)
        x = jnp.concatenate([categories, counts], axis=-1) @ embed["first"]
        return {"x": self.kernels.shard(jax.nn.relu(x), STREAM)}

    def block(self, weights: Params, stream: Stream, batch: Batch, layer: Layer) -> tuple:
        x = stream["x"]
        return {"x": self.kernels.shard(x + jax.nn.relu(x @ weights["residual"]), STREAM)}, {}

    def logits(self, head: Params, x: jax.Array) -> jax.Array:
        for name in sorted(head):
            x = (jax.nn.relu(x) if name != "dense0" else x) @ head[name]
        return x

    def loss(self, head: Params, stream: Stream, batch: Batch) -> Sums:
        log_p = jax.nn.log_softmax(self.logits(head, stream["x"]))
        chosen = jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0]
        nll = -jnp.sum(chosen * batch.weights)
        return {"loss": nll, "nll": nll}
