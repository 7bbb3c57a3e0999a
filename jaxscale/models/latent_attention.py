"""Multi-head latent attention (MLA): keys and values are projected from a low-rank latent of each
token (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Letters: B batch, T query time, S key time, D embed, N heads, H head_dim, V features of a head's
values, R rotated features, h halves of them and r pairs (R = h * r), C kv_rank, Q query_rank or,
without query compression, D.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name as named

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.models.adapters.lora import LowRank, adapter_of, plus
from jaxscale.models.kernels import Kernels
from jaxscale.models.positions import rope_settings
from jaxscale.models.weights import Weights
from jaxscale.ops.attention.attention import decode_attention
from jaxscale.ops.norm import rms_norm
from jaxscale.ops.rope import rotary
from jaxscale.ops.tensor_parallel import columns, linear, rows

LatentCache = tuple[jax.Array]
"""Latents and rotated keys of every layer, [layers, batch, slots, 1, C + R]."""

NORM_EPS = 1e-6
"""The epsilon of the latents' norms; as in transformers it does not follow the model's."""


class MultiHeadLatentAttention(nnx.Module):
    """Multi-head latent attention with decoupled RoPE: all heads share the rotated key.

    The input dimension of the matrices that expand latents is named "embed", so that ZeRO shards
    it.
    """

    linear_weights: ClassVar = {  # as in `Stack`
        "q_down": 1,
        "q_plain": 1,
        "q_turned": 1,
        "kv_down": 1,
        "k_turned": 1,
        "k_plain": 1,
        "v": 1,
        "out": 2,
    }

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config = config
        if config.query_rank:
            self.q_down = weights.normal("embed", "query_rank")
            self.q_scale = weights.ones("query_rank")
        query, keys = config.query_rank, config.kv_rank
        self.q_plain = weights.normal("embed", "heads", "plain_dim", inputs=query)
        self.q_turned = weights.normal("embed", "heads", "halves", "pairs", inputs=query)
        self.kv_down = weights.normal("embed", "kv_rank")
        self.kv_scale = weights.ones("kv_rank")
        self.k_turned = weights.normal("embed", "halves", "pairs")
        self.k_plain = weights.normal("embed", "heads", "plain_dim", inputs=keys)
        self.v = weights.normal("embed", "heads", "value_dim", inputs=keys)
        self.out = weights.normal("heads", "value_dim", "embed", residual=True)

        def adapter(name: str, *axes: str, **dims: int) -> LowRank | None:
            return adapter_of(name, config, weights, *axes, **dims)

        turned, plain = ("halves", "pairs"), ("heads", "plain_dim")
        self.q_down_lora = adapter("q_down", "embed", "query_rank")
        self.q_plain_lora = adapter("q_plain", "embed", *plain, inputs=query)
        self.q_turned_lora = adapter("q_turned", "embed", "heads", *turned, inputs=query)
        self.kv_down_lora = adapter("kv_down", "embed", "kv_rank")
        self.k_turned_lora = adapter("k_turned", "embed", *turned)
        self.k_plain_lora = adapter("k_plain", "embed", *plain, inputs=keys)
        self.v_lora = adapter("v", "embed", "heads", "value_dim", inputs=keys)
        self.out_lora = adapter("out", "heads", "value_dim", "embed", contracted=2)

    def __call__(self, x_BTD: jax.Array, batch: Batch, kernels: Kernels, kind: int) -> jax.Array:
        config, rope = self.config, rope_settings(self.config, kind)
        from_BTQ, from_BTC, k_BTR = self._compressed(x_BTD, kernels.linear)
        parts = self._expanded(from_BTQ, kernels.columns)
        q_BTNH = self._queries(parts, batch.positions, rope, rotary)
        k_plain_BTN, v_BTNV = kernels.columns(from_BTC, (self.k_plain[...], self.v[...]))
        k_plain_BTN = plus(k_plain_BTN, self.k_plain_lora, from_BTC)
        v_BTNV = plus(v_BTNV, self.v_lora, from_BTC)
        k_BTR = kernels.shard(k_BTR, ("batch", "seq", "head_dim"))
        k_BT1R = rotary(k_BTR[:, :, None], batch.positions, **rope)
        shape = (*k_plain_BTN.shape[:3], config.rope_head_dim)
        k_BTNH = jnp.concatenate((k_plain_BTN, jnp.broadcast_to(k_BT1R, shape)), axis=-1)
        q_BTNH, k_BTNH, v_BTNV = map(named, (q_BTNH, k_BTNH, v_BTNV), ("query", "key", "value"))
        heads = ("batch", "seq", "heads", "head_dim")
        o_BTNV = kernels.attend(
            *(kernels.shard(x, heads) for x in (q_BTNH, k_BTNH, v_BTNV)),
            batch.segments,
            sliding_window=config.window(kind),
            causal=config.causal,
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
        )
        y_BTD = kernels.rows(o_BTNV, self.out[...])
        return named(plus(y_BTD, self.out_lora, o_BTNV), "attention_out")

    def _compressed(
        self, x_BTD: jax.Array, linear: Callable = linear
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The latents of queries and of keys and values, and the shared key before RoPE. Each rank
        of tensor compresses its part of the tokens."""
        from_BTQ = x_BTD
        if self.config.query_rank:
            from_BTQ = plus(linear(x_BTD, self.q_down[...]), self.q_down_lora, x_BTD)
            from_BTQ = rms_norm(from_BTQ, self.q_scale[...], eps=NORM_EPS)
        from_BTC = plus(linear(x_BTD, self.kv_down[...]), self.kv_down_lora, x_BTD)
        k_BThr = plus(linear(x_BTD, self.k_turned[...]), self.k_turned_lora, x_BTD)
        from_BTC = rms_norm(from_BTC, self.kv_scale[...], eps=NORM_EPS)
        return from_BTQ, from_BTC, k_BThr.reshape(*k_BThr.shape[:2], -1)

    def _expanded(self, from_BTQ: jax.Array, columns: Callable) -> tuple[jax.Array, ...]:
        """The queries' plain part, and their part for RoPE."""
        parts = columns(from_BTQ, (self.q_plain[...], self.q_turned[...]))
        adapters = self.q_plain_lora, self.q_turned_lora
        return tuple(plus(y, adapter, from_BTQ) for y, adapter in zip(parts, adapters))

    def _queries(
        self,
        parts: tuple[jax.Array, ...],
        positions_BT: jax.Array,
        rope: dict[str, Any],
        rotary: Callable,
    ) -> jax.Array:
        """The queries' plain part and their part with RoPE, concatenated."""
        plain_BTN, rotated_BTNhr = parts
        rotated_BTNR = rotated_BTNhr.reshape(*plain_BTN.shape[:3], -1)
        return jnp.concatenate((plain_BTN, rotary(rotated_BTNR, positions_BT, **rope)), axis=-1)

    def decode(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        cache: LatentCache,
        layer: jax.Array,
        kind: int = 0,
        rotary: Callable = rotary,
    ) -> tuple[jax.Array, LatentCache]:
        """Writes the tokens to the cache at their positions and attends to all cached tokens.

        Keys and values stay compressed. The key matrix of a head is applied to its query, the value
        matrix to its output, so all heads read one key of C + R features.
        """
        config, rope = self.config, rope_settings(self.config, kind)
        from_BTQ, from_BTC, k_BTR = self._compressed(x_BTD)
        plain_BTN, rotated_BTNhr = self._expanded(from_BTQ, columns)
        into_BTNC = jnp.einsum("btnp,cnp->btnc", plain_BTN, self.k_plain[...])
        if (lora := self.k_plain_lora) is not None:
            low = lora.scale * jnp.einsum("btnp,rnp->btnr", plain_BTN, lora.b[...])
            into_BTNC += jnp.einsum("btnr,cr->btnc", low, lora.a[...])
        q_BTNH = self._queries((into_BTNC, rotated_BTNhr), positions_BT, rope, rotary)
        k_BT1R = rotary(k_BTR[:, :, None], positions_BT, **rope)
        new_BT1H = jnp.concatenate((from_BTC[:, :, None], k_BT1R), axis=-1)
        (old_LBS1H,) = cache
        rows_B1 = jnp.arange(x_BTD.shape[0])[:, None]
        k_LBS1H = old_LBS1H.at[layer, rows_B1, positions_BT].set(new_BT1H.astype(old_LBS1H.dtype))
        k_BS1H = k_LBS1H[layer]
        slots_BS = jnp.broadcast_to(jnp.arange(k_BS1H.shape[1]), k_BS1H.shape[:2])
        o_BTNH = decode_attention(
            q_BTNH,
            k_BS1H,
            k_BS1H,
            positions_BT,
            slots_BS,
            sliding_window=config.window(kind),
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
        )
        o_BTNC = o_BTNH[..., : config.kv_rank]
        o_BTNV = jnp.einsum("btnc,cnv->btnv", o_BTNC, self.v[...])
        if (lora := self.v_lora) is not None:
            low = lora.scale * jnp.einsum("btnc,cr->btnr", o_BTNC, lora.a[...])
            o_BTNV += jnp.einsum("btnr,rnv->btnv", low, lora.b[...])
        return plus(rows(o_BTNV, self.out[...]), self.out_lora, o_BTNV), (k_LBS1H,)


def empty_latent_cache(config: ModelConfig, batch: int, slots: int) -> LatentCache:
    """An empty cache."""
    width = config.kv_rank + config.rope_head_dim
    return (jnp.zeros((config.num_layers, batch, slots, 1, width), config.compute_dtype),)
