"""An encoder and a decoder that reads its output: T5 1.1, mT5, UMT5 (arXiv 1910.10683, 2010.11934,
2304.09151).

Attention knows distances by a bias for each head and bucket of them, from one table for all layers
of a stack (T5, mT5) or from one in each layer (UMT5); cross attention has none. Scores are not
scaled: the initial queries are smaller instead, by the square root of head_dim.

Letters: as in `block.py`; T a place of the decoder, S of the encoder, b a bucket of distances.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name as named

from jaxscale.batch import Batch
from jaxscale.config import ModelConfig
from jaxscale.layout import BLOCK_TENSORS
from jaxscale.models.block import MLP, Attention, Cache, Norm
from jaxscale.models.decoder import CACHE_AXES, Head, empty_cache
from jaxscale.models.forward import apply_stack, scan_periods
from jaxscale.models.kernels import Kernels, plain_lookup
from jaxscale.models.protocol import STREAM, Layer, Params, Rows, Stack, Stream, Sums
from jaxscale.models.weights import (
    Weights,
    axes_of,
    module_of,
    params_of,
    stack_axes,
    stack_params,
)
from jaxscale.ops.attention import attention, decode_attention
from jaxscale.ops.loss import logits
from jaxscale.ops.tensor_parallel import columns

TABLE = ("buckets", "heads")
"""Logical axes of a table of biases."""


class CrossCache(NamedTuple):
    """Keys and values for a decoder with an encoder; or the axes of each."""

    own: Any  # a `Cache` of the decoder's tokens
    cross: Any  # a `Cache` of the encoder's output: written once, and only read
    places: Any  # [batch, source]: 0 for a token of the encoder, -1 for padding


class RelativeAttention(Attention):
    """Self-attention with a bias for the distance between a query and a key."""

    def __init__(self, config: ModelConfig, weights: Weights):
        super().__init__(config, weights)
        # Of scores that are not scaled, as T5's: divided by what the scale would have been.
        size = config.head_dim**-0.5 / config.attention_scale
        self.q = weights.normal("embed", "heads", "head_dim", scale=size)
        self.bias = weights.normal(*TABLE) if config.relative_bias == "layer" else None

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x_BTD: jax.Array,
        segments_BT: jax.Array,
        bias_bN: jax.Array | None,
        kernels: Kernels,
        *,
        causal: bool,
    ) -> jax.Array:
        """`bias_bN` is the table that all layers share, if they do."""
        projected = self.project(
            x_BTD, segments_BT, 0, kernels.columns, kernels.rotary, kernels.key_heads
        )
        return self.attend(
            projected,
            (segments_BT, None, self.table(bias_bN)),
            kernels,
            causal=causal,
            scale=self.config.attention_scale,
            max_distance=self.config.relative_max_distance,
        )

    def table(self, shared_bN: jax.Array | None) -> jax.Array | None:
        """The layer's own table of biases, or the one that all layers share."""
        return shared_bN if self.bias is None else self.bias[...]


class CrossAttention(Attention):
    """Attention of the decoder to the encoder's output, within a segment."""

    def __init__(self, config: ModelConfig, weights: Weights):
        super().__init__(config, weights)
        size = config.head_dim**-0.5 / config.attention_scale
        self.q = weights.normal("embed", "heads", "head_dim", scale=size)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x_BTD: jax.Array,
        encoded_BSD: jax.Array,
        segments_BT: jax.Array,
        segments_BS: jax.Array,
        kernels: Kernels,
    ) -> jax.Array:
        (q_BTNH,) = kernels.columns(x_BTD, (self.q[...],))
        projected = q_BTNH, *self.keys(encoded_BSD, kernels)
        return self.attend(
            tuple(map(named, projected, ("query", "key", "value"))),
            (segments_BT, segments_BS),
            kernels,
            causal=False,
            scale=self.config.attention_scale,
        )

    def keys(self, encoded_BSD: jax.Array, kernels: Kernels) -> tuple[jax.Array, ...]:
        """Keys and values of the encoder's output."""
        weights = kernels.key_heads(self.k[...]), kernels.key_heads(self.v[...])
        return kernels.columns(encoded_BSD, weights)

    def read(self, x_BTD: jax.Array, keys: Cache, places_BS: jax.Array) -> jax.Array:
        """The same from keys and values that `keys` computed before, by one row's text each.

        Args:
          places_BS: as in `CrossCache`.
        """
        (q_BTNH,) = columns(x_BTD, (self.q[...],))
        # To queries at place 0 every key at place 0 is visible, and padding is not.
        places_BT = jnp.zeros(x_BTD.shape[:2], jnp.int32)
        scale = self.config.attention_scale
        return self.join(decode_attention(q_BTNH, *keys, places_BT, places_BS, scale=scale))


class EncoderBlock(nnx.Module):
    """A layer of the encoder: attention in both directions, and MLP."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        weights = Weights(config, key, branches=2 * config.num_encoder_layers)
        self.attention_norm = Norm(config, weights)
        self.attention = RelativeAttention(config, weights)
        self.mlp_norm = Norm(config, weights)
        self.mlp = MLP(config, weights)

    def __call__(
        self, x_BSD: jax.Array, segments_BS: jax.Array, bias_bN: jax.Array | None, kernels: Kernels
    ) -> jax.Array:
        with jax.named_scope("attention"):
            y_BSD = self.attention_norm(x_BSD)
            x_BSD += self.attention(y_BSD, segments_BS, bias_bN, kernels, causal=False)
            x_BSD = kernels.shard(x_BSD, STREAM)
        with jax.named_scope("mlp"):
            x_BSD += self.mlp(self.mlp_norm(x_BSD), kernels.columns, kernels.rows)
            return kernels.shard(x_BSD, STREAM)


class DecoderBlock(nnx.Module):
    """A layer of the decoder: causal attention, attention to the encoder's output, and MLP."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        weights = Weights(config, key, branches=3 * config.num_layers)
        self.attention_norm = Norm(config, weights)
        self.attention = RelativeAttention(config, weights)
        self.cross_norm = Norm(config, weights)
        self.cross = CrossAttention(config, weights)
        self.mlp_norm = Norm(config, weights)
        self.mlp = MLP(config, weights)

    def __call__(
        self,
        x_BTD: jax.Array,
        encoded_BSD: jax.Array,
        batch: Batch,
        bias_bN: jax.Array | None,
        kernels: Kernels,
    ) -> jax.Array:
        with jax.named_scope("attention"):
            y_BTD = self.attention_norm(x_BTD)
            x_BTD += self.attention(y_BTD, batch.segments, bias_bN, kernels, causal=True)
            x_BTD = kernels.shard(x_BTD, STREAM)
        with jax.named_scope("cross"):
            segments = batch.segments, batch.extras["encoder_segments"]
            x_BTD += self.cross(self.cross_norm(x_BTD), encoded_BSD, *segments, kernels)
            x_BTD = kernels.shard(x_BTD, STREAM)
        with jax.named_scope("mlp"):
            x_BTD += self.mlp(self.mlp_norm(x_BTD), kernels.columns, kernels.rows)
            return kernels.shard(x_BTD, STREAM)

    def decode(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        cache: CrossCache,
        layer: jax.Array,
        bias_bN: jax.Array | None,
    ) -> tuple[jax.Array, Cache]:
        """The same for tokens that are added to the cache of layer `layer`, and that cache.

        Args:
          cache: `own` of all layers, `cross` of this one.
        """
        y_BTD, own = self.attention.decode(
            self.attention_norm(x_BTD),
            positions_BT,
            cache.own,
            layer,
            bias_bN=self.attention.table(bias_bN),
        )
        x_BTD += y_BTD
        x_BTD += self.cross.read(self.cross_norm(x_BTD), cache.cross, cache.places)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD)), own


class SharedEmbedding(nnx.Module):
    """Tokens to both streams, the encoder's final norm, and tables that layers share."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        weights = Weights(config, key)
        self.tokens = weights.normal("vocab", "embed")
        self.encoder_norm = Norm(config, weights)
        shared = config.relative_bias == "shared"
        self.encoder_bias = weights.normal(*TABLE) if shared else None
        self.decoder_bias = weights.normal(*TABLE) if shared else None


@dataclass(frozen=True)
class EncoderDecoder:
    """An encoder-decoder as pure functions over its parameters: a `models.protocol.Model` of the
    stacks "encoder", over {"encoded": [batch, source, d_model]}, and "decoder", over
    {"x": [batch, seq, d_model]}, which reads what the encoder made.

    `Batch` holds the decoder's tokens; those of the encoder are its extra arrays. Both number the
    same texts as the same segments.
    """

    settings: ModelConfig
    kernels: Kernels

    @property
    def stacks(self) -> tuple[Stack, Stack]:
        """Encoder and decoder."""
        table = {"bias": TABLE} if self.settings.relative_bias == "shared" else {}
        return (
            Stack(
                "encoder",
                self.settings.num_encoder_layers,
                self.enter_encoder,
                self.encoder_block,
                carried={"encoded": STREAM},
                shared=table,
                tensors=BLOCK_TENSORS,
            ),
            Stack(
                "decoder",
                self.settings.num_layers,
                self.enter_decoder,
                self.decoder_block,
                shared={"encoded": STREAM, **table},
                tensors=BLOCK_TENSORS,
            ),
        )

    @property
    def borrows(self) -> Mapping[str, tuple[str, ...]]:
        """A tied head uses the embedding."""
        return {"tied": ("embed", "tokens")} if self.settings.tied_embeddings else {}

    @property
    def rules(self) -> Mapping[str, tuple[str, ...]]:
        """None."""
        return {}

    @property
    def metrics(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def frozen(self) -> tuple[str, ...]:
        """None."""
        return ()

    def extras(self, seq_len: int) -> Mapping[str, tuple[int, Any]]:
        """The encoder's tokens."""
        names = ("encoder_tokens", "encoder_segments", "encoder_positions")
        return dict.fromkeys(names, (seq_len, jnp.int32))

    def init(self, key: jax.Array, rows: Rows | None = None) -> Params:
        """Fresh parameters; they depend on the key alone. None stacks all layers in order."""
        embed_key, head_key, *keys = jax.random.split(key, 4)
        params = {"embed": params_of(SharedEmbedding(self.settings, embed_key))}
        for stack, make, key in zip(self.stacks, (EncoderBlock, DecoderBlock), keys):
            layer_keys = jax.random.split(key, stack.num_layers)
            row = None if rows is None else rows[stack.name]
            make = functools.partial(make, self.settings)
            params[stack.name] = stack_params(make, layer_keys, row)
        return {**params, "head": params_of(Head(self.settings, head_key))}

    @property
    def axes(self) -> Params:
        """The tree of parameters with the tuple of logical axes in place of each array."""
        return {
            "embed": axes_of(SharedEmbedding, self.settings),
            "encoder": stack_axes(EncoderBlock, self.settings),
            "decoder": stack_axes(DecoderBlock, self.settings),
            "head": axes_of(Head, self.settings),
        }

    def enter_encoder(self, embed: Params, stream: Stream, batch: Batch) -> Stream:
        """Embeds the encoder's tokens."""
        del stream
        with jax.named_scope("embed"):
            tokens = batch.extras["encoder_tokens"]
            return {"encoded": self._lookup(embed, tokens), **self._table(embed, "encoder_bias")}

    def enter_decoder(self, embed: Params, stream: Stream, batch: Batch) -> Stream:
        """Embeds the decoder's tokens beside the encoder's output."""
        with jax.named_scope("embed"):
            return {
                "x": self._lookup(embed, batch.tokens),
                "encoded": self._encoded(embed, stream),
                **self._table(embed, "decoder_bias"),
            }

    def encoder_block(self, weights: Params, stream: Stream, batch: Batch, layer: Layer) -> tuple:
        """One layer of the encoder."""
        block = module_of(EncoderBlock, self.settings, weights)
        segments = batch.extras["encoder_segments"]
        x = block(stream["encoded"], segments, stream.get("bias"), self.kernels)
        return {"encoded": x}, {}

    def decoder_block(self, weights: Params, stream: Stream, batch: Batch, layer: Layer) -> tuple:
        """One layer of the decoder."""
        block = self._decoder_block(weights)
        x = block(stream["x"], stream["encoded"], batch, stream.get("bias"), self.kernels)
        return {"x": x}, {}

    def loss(self, head: Params, stream: Stream, batch: Batch) -> Sums:
        """The sum over weighted tokens of loss, and of the negative log-likelihood in nats."""
        with jax.named_scope("head"):
            x_BTD, matrix = self._final(head, stream["x"])
            loss, nll = self.kernels.cross_entropy(
                self.kernels.shard(x_BTD, ("batch", "seq", "embed")),
                matrix,
                batch.targets,
                batch.weights,
                vocab_size=self.settings.vocab_size,
                z_loss=self.settings.z_loss,
                transposed=self.settings.tied_embeddings,
            )
            return {"loss": loss, "nll": nll}

    def logits(self, head: Params, x_BTD: jax.Array) -> jax.Array:
        """Float32 [batch, seq, vocab_size]."""
        x_BTD, matrix = self._final(head, x_BTD)
        size, tied = self.settings.vocab_size, self.settings.tied_embeddings
        return logits(x_BTD, matrix, vocab_size=size, transposed=tied)

    @property
    def can_decode(self) -> bool:
        """Tokens can be drawn one after the other, once the encoder has read a text."""
        return True

    @property
    def cache_axes(self) -> Any:
        """The logical axes of a cache's arrays."""
        return CrossCache(CACHE_AXES, CACHE_AXES, ("batch", "slots"))

    def encode(
        self,
        params: Params,
        tokens_BS: jax.Array,
        segments_BS: jax.Array,
        slots: int,
        shard: Callable[[jax.Array, tuple[str, ...]], jax.Array] = lambda x, axes: x,
    ) -> CrossCache:
        """What a decoder of at most `slots` tokens reads of the encoder's text, in each row one.

        Attention is in blocks, and keys and values are made once for all tokens to come.

        Args:
          params: of the whole model.
          segments_BS: 1 for a token, 0 for padding.
          shard: as in `decode`.
        """
        kernels = Kernels(functools.partial(attention, implementation="blockwise"), shard=shard)
        plain = dataclasses.replace(self, kernels=kernels)
        given = {"encoder_tokens": tokens_BS, "encoder_segments": segments_BS}
        batch = Batch(tokens_BS, tokens_BS, segments_BS, segments_BS, segments_BS, given)
        embed, encoder = params["embed"], params["encoder"]
        stream = apply_stack(plain.stacks[0], embed, encoder, {}, batch)
        encoded_BSD = plain._encoded(embed, stream)

        def keys(weights: Params) -> Cache:
            return self._decoder_block(weights).cross.keys(encoded_BSD, kernels)

        cross = jax.lax.map(keys, params["decoder"])
        own = empty_cache(self.settings, len(tokens_BS), slots)
        return CrossCache(own, cross, jnp.where(segments_BS > 0, 0, -1))

    def decode(
        self,
        params: Params,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        cache: CrossCache,
        shard: Callable[[jax.Array, tuple[str, ...]], jax.Array] = lambda x, axes: x,
    ) -> tuple[jax.Array, CrossCache]:
        """`Decoder.decode`, with a cache that `encode` made."""
        embed, dtype = params["embed"], jnp.dtype(self.settings.compute_dtype)
        x_BTD = plain_lookup(embed["tokens"], tokens_BT, "vocab", dtype)
        bias_bN = self._table(embed, "decoder_bias").get("bias")

        def one(carry, layer, kind):
            weights, cross, index = layer
            x_BTD, own = shard(carry[0], ("batch",)), carry[1]
            block = self._decoder_block(weights)
            read = cache._replace(own=own, cross=cross)
            return block.decode(x_BTD, positions_BT, read, index, bias_bN)

        layers = (params["decoder"], cache.cross, jnp.arange(self.settings.num_layers))
        x_BTD, own = scan_periods(one, (x_BTD, cache.own), layers, 1)
        return x_BTD, cache._replace(own=own)

    def _decoder_block(self, weights: Params) -> Any:
        return module_of(DecoderBlock, self.settings, weights)

    def _encoded(self, embed: Params, stream: Stream) -> jax.Array:
        """The encoder's output, as the layers of the decoder read it."""
        norm = module_of(SharedEmbedding, self.settings, embed).encoder_norm
        return self.kernels.shard(norm(stream["encoded"]), STREAM)

    def _final(self, head: Params, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = {name: value for name, value in head.items() if name != "tied"}
        module = module_of(Head, self.settings, own)
        matrix = head["tied"] if self.settings.tied_embeddings else module.output[...]
        x_BTD = module.norm(x_BTD)
        if self.settings.scaled_head:
            x_BTD *= jnp.asarray(self.settings.d_model**-0.5, x_BTD.dtype)
        return x_BTD, matrix

    def _lookup(self, embed: Params, tokens: jax.Array) -> jax.Array:
        dtype = self.settings.compute_dtype
        x = self.kernels.lookup(embed["tokens"], tokens, "vocab", jnp.dtype(dtype))
        return self.kernels.shard(x, STREAM)

    def _table(self, embed: Params, name: str) -> Stream:
        """The shared table, in float32 or wider whatever type the embedding has."""
        if name not in embed:
            return {}
        wide = jnp.promote_types(embed[name].dtype, jnp.float32)
        return {"bias": embed[name].astype(wide)}
