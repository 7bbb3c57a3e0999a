"""Encoder-decoder models: T5 1.1, mT5, UMT5 (arXiv 1910.10683, 2010.11934, 2304.09151).

The layers are in `encoder_decoder_block.py`.

Letters: as in `block.py`; T decoder time, S encoder time.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.config.remat_policy import BLOCK_TENSORS
from jaxscale.models.adapters.lora import borrowed_rows, frozen_names, rows_in_head
from jaxscale.models.block import Cache
from jaxscale.models.decoder import CACHE_AXES, empty_cache
from jaxscale.models.encoder_decoder_block import (
    TABLE,
    CrossCache,
    DecoderBlock,
    EncoderBlock,
    SharedEmbedding,
)
from jaxscale.models.forward import apply_stack, scan_periods
from jaxscale.models.head import Head
from jaxscale.models.kernels import Kernels, plain_lookup
from jaxscale.models.protocol import STREAM, Layer, Model, Params, Rows, Stack, Stream, Sums
from jaxscale.models.shared_layers import first_layers, share_layers
from jaxscale.models.weights import (
    axes_of,
    module_of,
    params_of,
    stack_axes,
    stack_params,
)
from jaxscale.ops.attention.attention import attention
from jaxscale.ops.loss import logits


@dataclass(frozen=True)
class EncoderDecoder(Model):
    """An encoder-decoder as pure functions over its parameters: a `models.protocol.Model`.

    The stack "encoder" has the stream {"encoded": [batch, source, d_model]}. The stack "decoder",
    over {"x": [batch, seq, d_model]}, reads the encoder's output.

    `Batch` has the decoder's tokens, and the encoder's as extra arrays. A text has the same
    segment number in both.
    """

    settings: ModelConfig
    kernels: Kernels
    can_decode = True  # after `encode`

    @property
    def stacks(self) -> tuple[Stack, Stack]:
        """The encoder's and the decoder's stack."""
        encoder, decoder = self._stacks
        group = self.settings.share_layers
        return share_layers(encoder, group), share_layers(decoder, group)

    @property
    def _stacks(self) -> tuple[Stack, Stack]:
        """The stacks without shared weights."""
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
        """A tied head uses the embedding's table."""
        tied = {"tied": ("embed", "tokens")} if self.settings.tied_embeddings else {}
        return {**tied, **borrowed_rows(self.settings)}

    @property
    def slices_head(self) -> bool:
        """True for the loss here."""
        return type(self).loss is EncoderDecoder.loss

    @property
    def frozen(self) -> tuple[str, ...]:
        """With LoRA, all parameters except adapters."""
        return frozen_names(self.axes) if self.settings.lora_rank else ()

    def extras(self, seq_len: int) -> Mapping[str, tuple[int, Any]]:
        """The encoder's tokens."""
        names = ("encoder_tokens", "encoder_segments", "encoder_positions")
        return dict.fromkeys(names, (seq_len, jnp.int32))

    def init(self, key: jax.Array, rows: Rows | None = None) -> Params:
        """Initial parameters, which depend on the key only; `rows` None stacks layers in order."""
        embed_key, head_key, *keys = jax.random.split(key, 4)
        params = {"embed": params_of(SharedEmbedding(self.settings, embed_key))}
        for stack, make, key in zip(self.stacks, (EncoderBlock, DecoderBlock), keys):
            layer_keys = jax.random.split(key, stack.num_layers * stack.repeats)
            make = functools.partial(make, self.settings)
            params[stack.name] = stack_params(make, layer_keys, first_layers(stack, rows))
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
        """Embeds the decoder's tokens; passes the encoder's output on."""
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
        """Sums over weighted tokens: loss and negative log-likelihood in nats."""
        with jax.named_scope("head"):
            x_BTD, matrix, how = self._final(head, stream["x"])
            how["z_loss"] = self.settings.z_loss
            loss, nll = self.kernels.cross_entropy(
                x_BTD, matrix, batch.targets, batch.weights, **how
            )
            return {"loss": loss, "nll": nll}

    def logits(self, head: Params, x_BTD: jax.Array) -> jax.Array:
        """Float32 [batch, seq, vocab_size]."""
        x_BTD, matrix, how = self._final(head, x_BTD)
        return logits(x_BTD, matrix, **how)

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
        """Runs the encoder on one text per row and returns the decoder's cache of `slots` tokens.

        The cross attention's keys and values are computed once, here.

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
        lengths_B: jax.Array | None = None,
    ) -> tuple[jax.Array, CrossCache]:
        """`Decoder.decode`, with a cache made by `encode`; `lengths_B` is unused."""
        del lengths_B
        embed = params["embed"]
        x_BTD = self._embedded(embed, tokens_BT, plain_lookup)
        bias_bN = self._table(embed, "decoder_bias").get("bias")

        stack = self.stacks[1]

        def one(carry, layer, kind):
            weights, cross, number = layer
            block = self._decoder_block(weights)
            for i in range(stack.repeats):
                x_BTD, own = shard(carry[0], ("batch",)), carry[1]
                read, index = cache._replace(own=own, cross=cross), stack.repeats * number + i
                carry = block.decode(x_BTD, positions_BT, read, index, bias_bN)
            return carry

        layers = params["decoder"], cache.cross, jnp.arange(stack.num_layers)
        x_BTD, own = scan_periods(one, (x_BTD, cache.own), layers, 1)
        return x_BTD, cache._replace(own=own)

    def _decoder_block(self, weights: Params) -> Any:
        return module_of(DecoderBlock, self.settings, weights)

    def _encoded(self, embed: Params, stream: Stream) -> jax.Array:
        """The encoder's output after its final norm."""
        norm = module_of(SharedEmbedding, self.settings, embed).encoder_norm
        return self.kernels.shard(norm(stream["encoded"]), STREAM)

    def _final(self, head: Params, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """As `Decoder._final`."""
        own = {name: value for name, value in head.items() if name not in self.borrows}
        module = module_of(Head, self.settings, own)
        size, tied = self.settings.vocab_size, self.settings.tied_embeddings
        matrix = head["tied"] if tied else module.output[...]
        how = {"vocab_size": size, "transposed": tied, **rows_in_head(self.settings, head)}
        x_BTD = module.norm(x_BTD)
        if self.settings.scaled_head:
            x_BTD *= jnp.asarray(self.settings.d_model**-0.5, x_BTD.dtype)
        return x_BTD, matrix, how

    def _lookup(self, embed: Params, tokens: jax.Array) -> jax.Array:
        return self.kernels.shard(self._embedded(embed, tokens, self.kernels.lookup), STREAM)

    def _embedded(self, embed: Params, tokens_BT: jax.Array, lookup: Callable) -> jax.Array:
        module, dtype = (
            module_of(SharedEmbedding, self.settings, embed),
            self.settings.compute_dtype,
        )
        x_BTD = lookup(module.tokens[...], tokens_BT, "vocab", jnp.dtype(dtype))
        if module.tokens_lora is not None:
            x_BTD += module.tokens_lora(tokens_BT, lookup, dtype)
        return x_BTD

    def _table(self, embed: Params, name: str) -> Stream:
        """The shared table of position biases, in float32 or wider."""
        if name not in embed:
            return {}
        wide = jnp.promote_types(embed[name].dtype, jnp.float32)
        return {"bias": embed[name].astype(wide)}
