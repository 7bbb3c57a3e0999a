"""Encoder and decoder layers of T5 1.1, mT5, UMT5: relative position bias and cross attention.

Self-attention has a learned bias per head and bucket of distances, from one table per stack (T5,
mT5) or per layer (UMT5). Cross attention has no bias. Scores are not scaled: the initial query
weights are smaller by the square root of head_dim instead.

Letters: as in `block.py`; T decoder time, S encoder time, b a bucket of distances.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name as named

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.models.adapters.lora import rows_of
from jaxscale.models.block import MLP, Cache, GroupedHeads, Norm
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import STREAM
from jaxscale.models.weights import (
    Weights,
)
from jaxscale.ops.attention.attention import decode_attention
from jaxscale.ops.tensor_parallel import columns

TABLE = ("buckets", "heads")
"""Logical axes of a table of biases."""


class CrossCache(NamedTuple):
    """Key/value caches of a decoder with cross attention; or the logical axes of each."""

    own: Any  # a `Cache` of the decoder's tokens
    cross: Any  # a `Cache` of the encoder's output, written once
    places: Any  # [batch, source]: 0 for a token of the encoder, -1 for padding


class RelativeAttention(GroupedHeads):
    """Self-attention with a relative position bias."""

    def __init__(self, config: ModelConfig, weights: Weights):
        super().__init__(config, weights)
        # T5 does not scale scores: the scale is in the initial query weights.
        size = config.head_dim**-0.5 / config.attention_scale
        self.q = weights.normal("embed", "heads", "head_dim", scale=size)
        self.bias = weights.normal(*TABLE) if config.relative_bias == "layer" else None

    def __call__(
        self,
        x_BTD: jax.Array,
        segments_BT: jax.Array,
        bias_bN: jax.Array | None,
        kernels: Kernels,
        *,
        causal: bool,
    ) -> jax.Array:
        """`bias_bN` is the table shared by all layers, or None."""
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
        """The layer's table of biases, or the shared one."""
        return shared_bN if self.bias is None else self.bias[...]


class CrossAttention(GroupedHeads):
    """Attention of the decoder to the encoder's output, within a segment."""

    def __init__(self, config: ModelConfig, weights: Weights):
        super().__init__(config, weights)
        size = config.head_dim**-0.5 / config.attention_scale
        self.q = weights.normal("embed", "heads", "head_dim", scale=size)

    def __call__(
        self,
        x_BTD: jax.Array,
        encoded_BSD: jax.Array,
        segments_BT: jax.Array,
        segments_BS: jax.Array,
        kernels: Kernels,
    ) -> jax.Array:
        (q_BTNH,) = self.project_qkv(x_BTD, "q", kernels.columns, kernels.key_heads)
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
        return self.project_qkv(encoded_BSD, "kv", kernels.columns, kernels.key_heads)

    def read(self, x_BTD: jax.Array, keys: Cache, places_BS: jax.Array) -> jax.Array:
        """Attention to cached keys and values, one text per row.

        Args:
          places_BS: as in `CrossCache`.
        """
        (q_BTNH,) = self.project_qkv(x_BTD, "q", columns, lambda x: x)
        # With every query at position 0, keys at 0 are visible and padding at -1 is not.
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
        """The stream after the layer for new tokens, and the self-attention cache with their keys
        and values at layer `layer`.

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
    """Token table of encoder and decoder, the encoder's final norm, shared position biases."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        weights = Weights(config, key)
        self.tokens = weights.normal("vocab", "embed")
        self.tokens_lora = rows_of(config, weights)
        self.encoder_norm = Norm(config, weights)
        shared = config.relative_bias == "shared"
        self.encoder_bias = weights.normal(*TABLE) if shared else None
        self.decoder_bias = weights.normal(*TABLE) if shared else None
