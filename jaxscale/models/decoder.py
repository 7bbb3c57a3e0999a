"""A transformer with one stack: embedding, blocks, head. A decoder, or a masked model that reads
to both sides.

Letters: B batch, T query time, S key time, D embed, F mlp hidden, N query heads, K kv heads,
H head_dim, V vocab (padded), L layers.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.batch import Batch
from jaxscale.config import ModelConfig
from jaxscale.layout import BLOCK_TENSORS
from jaxscale.models.block import ACTIVATIONS, Block, Cache, Norm
from jaxscale.models.experts import ExpertBlock, expert_metrics, expert_sums
from jaxscale.models.forward import scan_periods
from jaxscale.models.kernels import Kernels, plain_lookup
from jaxscale.models.latent_attention import empty_latent_cache
from jaxscale.models.protocol import STREAM, Layer, Params, Rows, Stack, Stream, Sums
from jaxscale.models.weights import Weights, axes_of, module_of, params_of, stack_axes, stack_params
from jaxscale.ops.attention import attention
from jaxscale.ops.loss import logits
from jaxscale.ops.tensor_parallel import add_bias

EMBEDDING_LAYER = 2**24 - 1
"""The number of the embedding among the layers whose activations are dropped."""

ROUTER_SITE = 2
"""Of jitter, beside the two of dropout in a layer."""

CACHE_AXES = ("layers", "batch", "slots", "kv_heads", "head_dim")
"""Of keys and values in a cache; "slots" has a rule in `training.sampling` only."""


def plain_kernels() -> Kernels:
    """Kernels for a notebook: the reference attention, no mesh."""
    return Kernels(functools.partial(attention, implementation="reference"))


TRAINING_MASKS = 0.15 * 0.8
"""The share of tokens that ESM-2's training masked."""


class Embedding(nnx.Module):
    """Tokens, and learned positions and token types where there are any, to the residual stream."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        weights = Weights(config, key)
        self.tokens = weights.normal("vocab", "embed")
        learned = config.positions == "learned"
        self.positions = weights.normal("positions", "embed") if learned else None
        types = config.token_types
        self.token_types = weights.normal("token_types", "embed") if types else None
        self.norm = Norm(config, weights) if config.embedding_norm else None
        self.scale = math.sqrt(config.d_model) if config.scaled_embedding else None
        self.compute_dtype, self.dropped = config.compute_dtype, config.dropped_token
        self.causal = config.causal

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        lookup: Callable,
        segments_BT: jax.Array | None = None,
        types_BT: jax.Array | None = None,
    ) -> jax.Array:
        """The stream [batch, time, d_model].

        Args:
          segments_BT: texts, for `dropped_token`; None where the model is causal.
          types_BT: token types; None is type 0 everywhere.
        """
        x_BTD = lookup(self.tokens[...], tokens_BT, "vocab", self.compute_dtype)
        if self.dropped >= 0:
            # A causal model must not know how many tokens after it are masked.
            texts_BT = None if self.causal else segments_BT
            x_BTD *= dropped_scale(tokens_BT == self.dropped, texts_BT).astype(x_BTD.dtype)
        if self.scale is not None:
            # The factor is rounded to the compute type, as in Gemma's own code.
            x_BTD *= jnp.asarray(self.scale, x_BTD.dtype)
        if self.token_types is not None and types_BT is not None:
            table = self.token_types[...]
            x_BTD += lookup(table, types_BT, "token_types", self.compute_dtype)
        elif self.token_types is not None:
            x_BTD += self.token_types[...][0].astype(x_BTD.dtype)
        if self.positions is not None:
            table = self.positions[...]
            x_BTD += lookup(table, positions_BT, "positions", self.compute_dtype)
        return x_BTD if self.norm is None else self.norm(x_BTD)


def empty_cache(config: ModelConfig, batch: int, slots: int) -> Cache:
    """Keys and values of no token yet, for every layer of a decoder."""
    shape = (config.num_layers, batch, slots, config.num_kv_heads, config.head_dim)
    return jnp.zeros(shape, config.compute_dtype), jnp.zeros(shape, config.compute_dtype)


def dropped_scale(dropped_BT: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
    """Factors of the embeddings, [batch, time, 1]: 0 of the dropped tokens, and of the others of a
    text such that together they weigh as much as with the share dropped in training
    (`token_dropout` of ESM-2, Lin et al. 2023). Without segments none counts as dropped."""
    kept_BT = 1.0 - TRAINING_MASKS
    if segments_BT is not None:
        # Compared, not scattered: tokens of a text may lie on several ranks, in any order.
        same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
        length_BT = jnp.sum(same_BTS, axis=-1)
        left_BT = jnp.sum(same_BTS & ~dropped_BT[:, None, :], axis=-1)
        kept_BT *= length_BT / jnp.maximum(left_BT, 1)
    return jnp.where(dropped_BT, 0.0, kept_BT)[..., None]


class Head(nnx.Module):
    """The final norm and the projection to the vocabulary; a tied head uses the embedding. A head
    may transform the stream first, and have a bias, as BERT's."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        weights = Weights(config, key)
        self.norm = Norm(config, weights) if config.final_norm else None
        self.output = None if config.tied_embeddings else weights.normal("embed", "vocab")
        self.activation = config.activation
        if config.head_transform:
            self.transform = weights.normal("embed", "transform")
            self.transform_bias = weights.zeros("embed")
            self.transform_norm = Norm(config, weights)
            self.output_bias = weights.zeros("vocab")
        else:
            self.transform = self.output_bias = None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """What the output matrix takes."""
        x_BTD = x_BTD if self.norm is None else self.norm(x_BTD)
        if self.transform is None:
            return x_BTD
        y_BTD = add_bias(x_BTD @ self.transform[...].astype(x_BTD.dtype), self.transform_bias[...])
        return self.transform_norm(ACTIVATIONS[self.activation](y_BTD))


class Part(NamedTuple):
    """Consecutive layers with one type of block."""

    name: str  # of their stack
    block: Any  # a module, made by (settings, key)
    first: int  # layers before
    num_layers: int


@dataclass(frozen=True)
class Decoder:
    """A decoder as pure functions over its parameters: a `models.protocol.Model` over the stream
    {"x": [batch, seq, d_model]}, of one stack, "layers", or where only the later layers have
    experts of two, "dense_layers" and "expert_layers".
    """

    settings: ModelConfig
    kernels: Kernels
    block_type: ClassVar[Any] = Block  # a module, made by (settings, key)
    head_type: ClassVar[Any] = Head  # likewise

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """One of all layers, or one without experts and one with them."""
        return tuple(self._stack(part) for part in self.parts)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stacks' names, types of block, and layers."""
        config, own = self.settings, type(self).block_type
        if not config.num_experts:
            return (Part("layers", own, 0, config.num_layers),)
        if not config.dense_layers:
            return (Part("layers", ExpertBlock, 0, config.num_layers),)
        dense, experts = config.dense_layers, config.num_expert_layers
        return (
            Part("dense_layers", own, 0, dense),
            Part("expert_layers", ExpertBlock, dense, experts),
        )

    def _stack(self, part: Part) -> Stack:
        def enter(embed: Params, stream: Stream, batch: Batch) -> Stream:
            return {"x": stream["x"] if part.first else self.embed(embed, batch)}

        def block(weights: Params, stream: Stream, batch: Batch, layer: Layer) -> tuple:
            index = part.first + layer.index if part.first else layer.index
            x, sums = self._layer(part, weights, stream["x"], batch, layer.kind, index)
            return {"x": x}, sums

        sums = expert_sums(self.settings) if part.block is ExpertBlock else {}
        return Stack(
            part.name,
            part.num_layers,
            enter,
            block,
            sums=sums,
            period=self.settings.period,
            tensors=BLOCK_TENSORS,
        )

    @property
    def borrows(self) -> Mapping[str, tuple[str, ...]]:
        """A tied head uses the embedding."""
        return {"tied": ("embed", "tokens")} if self.settings.tied_embeddings else {}

    @property
    def metrics(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def frozen(self) -> tuple[str, ...]:
        """The biases of routers, which `adjust` changes."""
        return tuple(f"{name}/mlp/router_bias" for name in self._biased)

    @property
    def _biased(self) -> tuple[str, ...]:
        """Stacks whose routers have a bias for balancing."""
        if not self.settings.router_bias:
            return ()
        return tuple(part.name for part in self.parts if part.block is ExpertBlock)

    def adjust(self, params: Params, sums: Sums) -> Params:
        """Balancing without an auxiliary loss (arXiv 2408.15664): the bias of an expert that more
        tokens chose than the mean falls by `balance_rate`, and that of one with fewer rises.

        Args:
          sums: of the whole step, in the order of the layers' rows.
        """
        for name in self._biased:
            load_LE = sums[f"{name}/load"]
            uneven_LE = jnp.sign(jnp.mean(load_LE, axis=-1, keepdims=True) - load_LE)
            bias_LE = params[name]["mlp"]["router_bias"]
            bias_LE += (self.settings.balance_rate * uneven_LE).astype(bias_LE.dtype)
            mlp = {**params[name]["mlp"], "router_bias": bias_LE}
            params = {**params, name: {**params[name], "mlp": mlp}}
        return params

    @property
    def report(self) -> Callable[[Sums], Sums] | None:
        """How evenly tokens are spread over the experts of each layer."""
        return expert_metrics if self.settings.num_experts else None

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
        embed = params_of(Embedding(self.settings, embed_key))
        layers = {
            part.name: stack_params(
                functools.partial(part.block, self.settings),
                keys[part.first : part.first + part.num_layers],
                None if rows is None else rows[part.name],
            )
            for part in self.parts
        }
        return {
            "embed": embed,
            **layers,
            "head": params_of(type(self).head_type(self.settings, head_key)),
        }

    @property
    def axes(self) -> Params:
        """The tree of parameters with the tuple of logical axes in place of each array."""
        return {
            "embed": axes_of(Embedding, self.settings),
            **{part.name: stack_axes(part.block, self.settings) for part in self.parts},
            "head": axes_of(type(self).head_type, self.settings),
        }

    def embed(self, embed: Params, batch: Batch) -> jax.Array:
        """Tokens to [batch, seq, d_model] in the compute type, whatever the type of `embed`."""
        with jax.named_scope("embed"):
            x_BTD = self._module(Embedding, embed)(
                batch.tokens,
                batch.positions,
                self.kernels.lookup,
                batch.segments,
                dict(batch.extras).get("token_types"),
            )
            if self._drops(batch):
                x_BTD = self._dropout(batch, EMBEDDING_LAYER)(x_BTD, 0)
            return self.kernels.shard(x_BTD, STREAM)

    def block(
        self,
        layer: Params,
        x_BTD: jax.Array,
        batch: Batch,
        kind: int = 0,
        index: jax.Array | int = 0,
    ) -> jax.Array:
        """A layer of the first stack; `kind` is its index modulo `config.period`, and dropout
        depends on `index`."""
        return self._layer(self.parts[0], layer, x_BTD, batch, kind, index)[0]

    def _layer(
        self,
        part: Part,
        layer: Params,
        x_BTD: jax.Array,
        batch: Batch,
        kind: int,
        index: jax.Array | int,
    ) -> tuple[jax.Array, Sums]:
        block = self._module(part.block, layer)
        noise: dict[str, Any] = {}
        if self._drops(batch):
            noise["drop"] = self._dropout(batch, index)
        if part.block is ExpertBlock:
            width = self.settings.router_jitter
            if width and not isinstance(batch.noise, tuple):
                noise["jitter"] = lambda x: self.kernels.jitter(
                    x, batch.noise, index, ROUTER_SITE, width
                )
            return block.layer(x_BTD, batch, self.kernels, kind, **noise)
        return block(x_BTD, batch, self.kernels, kind, **noise), {}

    def _drops(self, batch: Batch) -> bool:
        """Whether activations are dropped: in a step, not in an evaluation."""
        return self.settings.dropout > 0 and not isinstance(batch.noise, tuple)

    def _dropout(
        self, batch: Batch, layer: jax.Array | int
    ) -> Callable[[jax.Array, int], jax.Array]:
        rate = self.settings.dropout
        return lambda x, site: self.kernels.dropout(x, batch.noise, layer, site, rate)

    def loss(self, head: Params, stream: Stream, batch: Batch) -> Sums:
        """The sum over weighted tokens of loss, and of the negative log-likelihood in nats."""
        with jax.named_scope("head"):
            x_BTD, matrix, bias_V = self._final(head, stream["x"])
            x_BTD = self.kernels.shard(x_BTD, ("batch", "seq", "embed"))
            loss, nll = self.kernels.cross_entropy(
                x_BTD,
                matrix,
                batch.targets,
                batch.weights,
                vocab_size=self.num_classes,
                bias_V=bias_V,
                soft_cap=self.settings.logit_soft_cap,
                z_loss=self.settings.z_loss,
                transposed=self.settings.tied_embeddings,
            )
            return {"loss": loss, "nll": nll}

    def logits(self, head: Params, x_BTD: jax.Array) -> jax.Array:
        """Float32 [batch, seq, vocab_size]."""
        x_BTD, matrix, bias_V = self._final(head, x_BTD)
        return logits(
            x_BTD,
            matrix,
            vocab_size=self.num_classes,
            bias_V=bias_V,
            soft_cap=self.settings.logit_soft_cap,
            transposed=self.settings.tied_embeddings,
        )

    @property
    def can_decode(self) -> bool:
        """Whether tokens can be drawn one after the other; experts that choose among all tokens of
        a sequence see later ones."""
        if self.settings.router == "expert_choice":
            return False
        return self.settings.causal and hasattr(type(self).block_type, "decode")

    @property
    def cache_axes(self) -> Any:
        """The logical axes of a cache's arrays."""
        return CACHE_AXES

    def empty_cache(self, batch: int, slots: int) -> Any:
        """A cache for `batch` sequences of at most `slots` tokens, in the compute type."""
        make = empty_latent_cache if self.settings.kv_rank else empty_cache
        return make(self.settings, batch, slots)

    def decode(
        self,
        params: Params,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        cache: Any,
        shard: Callable[[jax.Array, tuple[str, ...]], jax.Array] = lambda x, axes: x,
    ) -> tuple[jax.Array, Any]:
        """The stream after every layer, and the cache with these tokens in it.

        Args:
          params: of the whole model.
          tokens_BT: the next tokens of each sequence.
          positions_BT: their positions, which are also their slots in the cache.
          shard: constrains the stream that enters each layer. Otherwise the partitioner would
            shard d_model over fsdp, as the weights, and replicate keys and values to write them.
        """
        x_BTD = self._module(Embedding, params["embed"])(tokens_BT, positions_BT, plain_lookup)

        def one(part, carry, layer, kind):
            weights, index = layer
            block = self._module(part.block, weights)
            x_BTD = shard(carry[0], ("batch",))
            own = (self.kernels,) if part.block is ExpertBlock else ()
            return block.decode(x_BTD, positions_BT, carry[1], index, kind, *own)

        # The cache is carried, not scanned over: carried, it is updated in place.
        carry = x_BTD, cache
        for part in self.parts:
            layers = params[part.name], jnp.arange(part.first, part.first + part.num_layers)
            function = functools.partial(one, part)
            carry = scan_periods(function, carry, layers, self.settings.period)
        return carry

    def _final(
        self, head: Params, x_BTD: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        own = {name: value for name, value in head.items() if name != "tied"}
        module = self._module(type(self).head_type, own)
        matrix = head["tied"] if self.settings.tied_embeddings else module.output[...]
        bias = getattr(module, "output_bias", None)
        bias = None if bias is None else bias[...]
        return module(x_BTD), matrix, bias

    def _module(self, kind: type[nnx.Module], params: Params) -> Any:
        return module_of(kind, self.settings, params)
