"""A decoder-only transformer: embedding, a stack of blocks, head.

Letters: B batch, T query time, S key time, D embed, F mlp hidden, N query heads, K kv heads,
H head_dim, V vocab (padded), L layers.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.batch import Batch
from jaxscale.config import ModelConfig
from jaxscale.layout import BLOCK_TENSORS
from jaxscale.models.block import Block, Cache, Norm
from jaxscale.models.forward import scan_periods
from jaxscale.models.kernels import Kernels, plain_lookup
from jaxscale.models.protocol import STREAM, Layer, Params, Rows, Stack, Stream, Sums
from jaxscale.models.weights import Weights, axes_of, module_of, params_of, stack_axes, stack_params
from jaxscale.ops.attention import attention
from jaxscale.ops.loss import logits

CACHE_AXES = ("layers", "batch", "seq", "kv_heads", "head_dim")


def plain_kernels() -> Kernels:
    """Kernels for a notebook: the reference attention, no mesh."""
    return Kernels(functools.partial(attention, implementation="reference"))


class Embedding(nnx.Module):
    """Tokens, and learned positions where there are any, to the residual stream."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        weights = Weights(config, key)
        self.tokens = weights.normal("vocab", "embed")
        learned = config.positions == "learned"
        self.positions = weights.normal("positions", "embed") if learned else None
        self.scale = math.sqrt(config.d_model) if config.scaled_embedding else None
        self.compute_dtype = config.compute_dtype

    def __call__(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, lookup: Callable
    ) -> jax.Array:
        x_BTD = lookup(self.tokens[...], tokens_BT, "vocab", self.compute_dtype)
        if self.scale is not None:
            # The factor is rounded to the compute type, as in Gemma's own code.
            x_BTD *= jnp.asarray(self.scale, x_BTD.dtype)
        if self.positions is None:
            return x_BTD
        return x_BTD + lookup(self.positions[...], positions_BT, "positions", self.compute_dtype)


class Head(nnx.Module):
    """The final norm and the projection to the vocabulary; a tied head uses the embedding."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        weights = Weights(config, key)
        self.norm = Norm(config, weights)
        self.output = None if config.tied_embeddings else weights.normal("embed", "vocab")


@dataclass(frozen=True)
class Decoder:
    """A decoder as pure functions over its parameters: a `models.protocol.Model` of one stack,
    "layers", over the stream {"x": [batch, seq, d_model]}.
    """

    settings: ModelConfig
    kernels: Kernels
    block_type: ClassVar[Any] = Block  # a module, made by (settings, key)
    head_type: ClassVar[Any] = Head  # likewise

    @property
    def stacks(self) -> tuple[Stack]:
        """The only one."""

        def enter(embed: Params, stream: Stream, batch: Batch) -> Stream:
            del stream
            return {"x": self.embed(embed, batch)}

        def block(weights: Params, stream: Stream, batch: Batch, layer: Layer) -> tuple:
            return {"x": self.block(weights, stream["x"], batch, layer.kind)}, {}

        num_layers, period = self.settings.num_layers, self.settings.period
        return (Stack("layers", num_layers, enter, block, period=period, tensors=BLOCK_TENSORS),)

    @property
    def borrows(self) -> Mapping[str, tuple[str, ...]]:
        """A tied head uses the embedding."""
        return {"tied": ("embed", "tokens")} if self.settings.tied_embeddings else {}

    @property
    def metrics(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def num_classes(self) -> int:
        """That the head chooses from."""
        return self.settings.vocab_size

    @property
    def rules(self) -> Mapping[str, tuple[str, ...]]:
        """None."""
        return {}

    def extras(self, seq_len: int) -> Mapping[str, tuple[int, Any]]:
        """None."""
        return {}

    def init(self, key: jax.Array, rows: Rows | None = None) -> Params:
        """Fresh parameters; they depend on the key alone. None stacks all layers in order."""
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        keys = jax.random.split(layers_key, self.settings.num_layers)
        make = functools.partial(type(self).block_type, self.settings)
        row = None if rows is None else rows["layers"]
        return {
            "embed": params_of(Embedding(self.settings, embed_key)),
            "layers": stack_params(make, keys, row),
            "head": params_of(type(self).head_type(self.settings, head_key)),
        }

    @property
    def axes(self) -> Params:
        """The tree of parameters with the tuple of logical axes in place of each array."""
        return {
            "embed": axes_of(Embedding, self.settings),
            "layers": stack_axes(type(self).block_type, self.settings),
            "head": axes_of(type(self).head_type, self.settings),
        }

    def embed(self, embed: Params, batch: Batch) -> jax.Array:
        """Tokens to [batch, seq, d_model] in the compute type, whatever the type of `embed`."""
        with jax.named_scope("embed"):
            x_BTD = self._module(Embedding, embed)(
                batch.tokens, batch.positions, self.kernels.lookup
            )
            return self.kernels.shard(x_BTD, STREAM)

    def block(self, layer: Params, x_BTD: jax.Array, batch: Batch, kind: int = 0) -> jax.Array:
        """One layer; `kind` is its index modulo `config.period`."""
        return self._module(type(self).block_type, layer)(x_BTD, batch, self.kernels, kind)

    def loss(self, head: Params, stream: Stream, batch: Batch) -> Sums:
        """The sum over weighted tokens of loss, and of the negative log-likelihood in nats."""
        with jax.named_scope("head"):
            x_BTD, matrix = self._final(head, stream["x"])
            x_BTD = self.kernels.shard(x_BTD, ("batch", "seq", "embed"))
            loss, nll = self.kernels.cross_entropy(
                x_BTD,
                matrix,
                batch.targets,
                batch.weights,
                vocab_size=self.num_classes,
                soft_cap=self.settings.logit_soft_cap,
                z_loss=self.settings.z_loss,
                transposed=self.settings.tied_embeddings,
            )
            return {"loss": loss, "nll": nll}

    def logits(self, head: Params, x_BTD: jax.Array) -> jax.Array:
        """Float32 [batch, seq, vocab_size]."""
        x_BTD, matrix = self._final(head, x_BTD)
        return logits(
            x_BTD,
            matrix,
            vocab_size=self.num_classes,
            soft_cap=self.settings.logit_soft_cap,
            transposed=self.settings.tied_embeddings,
        )

    @property
    def can_decode(self) -> bool:
        """Whether tokens can be drawn one after the other."""
        return self.settings.causal and hasattr(type(self).block_type, "decode")

    def empty_cache(self, batch: int, slots: int) -> Cache:
        """A cache for `batch` sequences of at most `slots` tokens, in the compute type."""
        config = self.settings
        shape = (config.num_layers, batch, slots, config.num_kv_heads, config.head_dim)
        return jnp.zeros(shape, config.compute_dtype), jnp.zeros(shape, config.compute_dtype)

    def decode(
        self,
        params: Params,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        cache: Cache,
        shard: Callable[[jax.Array, tuple[str, ...]], jax.Array] = lambda x, axes: x,
    ) -> tuple[jax.Array, Cache]:
        """The stream after every layer, and the cache with these tokens in it.

        Args:
          params: of the whole model.
          tokens_BT: the next tokens of each sequence.
          positions_BT: their positions, which are also their slots in the cache.
          shard: constrains the stream that enters each layer. Otherwise the partitioner would
            shard d_model over fsdp, as the weights, and replicate keys and values to write them.
        """
        x_BTD = self._module(Embedding, params["embed"])(tokens_BT, positions_BT, plain_lookup)

        def one(carry, layer, kind):
            weights, index = layer
            block = self._module(type(self).block_type, weights)
            x_BTD = shard(carry[0], ("batch",))
            return block.decode(x_BTD, positions_BT, carry[1], index, kind)

        # The cache is carried, not scanned over: carried, it is updated in place.
        layers = (params["layers"], jnp.arange(self.settings.num_layers))
        return scan_periods(one, (x_BTD, cache), layers, self.settings.period)

    def _final(self, head: Params, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = {name: value for name, value in head.items() if name != "tied"}
        module = self._module(type(self).head_type, own)
        matrix = head["tied"] if self.settings.tied_embeddings else module.output[...]
        return module.norm(x_BTD), matrix

    def _module(self, kind: type[nnx.Module], params: Params) -> Any:
        return module_of(kind, self.settings, params)
