"""Transformer block of a decoder: attention, MLP, norms, with every option of `ModelConfig`.

Letters: B batch, T query time, S key time, D embed, F mlp hidden, N query heads, K kv heads,
H head_dim, V vocab (padded), L layers.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name as named  # for remat policies

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.models.adapters.lora import adapter_of
from jaxscale.models.kernels import Kernels
from jaxscale.models.latent_attention import MultiHeadLatentAttention
from jaxscale.models.positions import rope_settings
from jaxscale.models.protocol import STREAM, Sums
from jaxscale.models.weights import Weights
from jaxscale.ops.attention.attention import decode_attention
from jaxscale.ops.matmul import WEIGHT_SCALE
from jaxscale.ops.norm import layer_norm, rms_norm
from jaxscale.ops.rope import rotary
from jaxscale.ops.tensor_parallel import add_bias, columns, rows

Cache = tuple[jax.Array, jax.Array]
"""Keys and values of every layer, [layers, batch, slots, kv_heads, head_dim] each."""

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


class Norm(nnx.Module):
    """RMSNorm, or LayerNorm with bias, over the last dimension."""

    def __init__(self, config: ModelConfig, weights: Weights):
        self.scale = weights.zeros("embed") if config.norm_offset else weights.ones("embed")
        self.bias = weights.zeros("embed") if config.norm == "layer" else None
        self.eps, self.offset = config.norm_eps, float(config.norm_offset)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.bias is None:
            return rms_norm(x, self.scale[...], eps=self.eps, offset=self.offset)
        return layer_norm(x, self.scale[...], self.bias[...], eps=self.eps)


class GroupedHeads(nnx.Module):
    """Grouped-query attention: projections, attention, output projection."""

    linear_weights: ClassVar = {"q": 1, "k": 1, "v": 1, "out": 2}  # as in `Stack`

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config = config
        self.q = weights.normal("embed", "heads", "head_dim")
        self.k = weights.normal("embed", "kv_heads", "head_dim")
        self.v = weights.normal("embed", "kv_heads", "head_dim")
        self.out = weights.normal("heads", "head_dim", "embed", residual=True)
        self.sinks = weights.zeros("heads") if config.attention_sinks else None
        self.q_lora = adapter_of("q", config, weights, "embed", "heads", "head_dim")
        self.k_lora = adapter_of("k", config, weights, "embed", "kv_heads", "head_dim")
        self.v_lora = adapter_of("v", config, weights, "embed", "kv_heads", "head_dim")
        self.out_lora = adapter_of(
            "out", config, weights, "heads", "head_dim", "embed", contracted=2
        )
        if config.attention_bias != "none":
            self.q_bias = weights.zeros("heads", "head_dim")
            self.k_bias = weights.zeros("kv_heads", "head_dim")
            self.v_bias = weights.zeros("kv_heads", "head_dim")
        if config.attention_bias == "all":
            self.out_bias = weights.zeros("embed")
        if config.qk_norm:
            scale = weights.zeros if config.norm_offset else weights.ones
            over_heads = config.qk_norm_over_heads
            self.q_scale = scale(*(("heads",) if over_heads else ()), "head_dim")
            self.k_scale = scale(*(("kv_heads",) if over_heads else ()), "head_dim")

    def project_qkv(
        self, x_BTD: jax.Array, names: str, columns: Callable, key_heads: Callable
    ) -> tuple[jax.Array, ...]:
        """Projections named in `names` (of q, k, v), adapters included; no bias, norm or RoPE."""
        heads = {"q": lambda x: x, "k": key_heads, "v": key_heads}
        projected = columns(x_BTD, tuple(heads[name](getattr(self, name)[...]) for name in names))
        adapters = [getattr(self, f"{name}_lora") for name in names]
        return tuple(
            y if adapter is None else y + adapter(x_BTD, heads[name])
            for name, y, adapter in zip(names, projected, adapters)
        )

    def project(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        kind: int,
        columns: Callable = columns,
        rotary: Callable = rotary,
        key_heads: Callable = lambda x: x,
    ) -> tuple[jax.Array, ...]:
        """Queries, keys and values, with bias, norm and RoPE."""
        config = self.config
        projected = self.project_qkv(x_BTD, "qkv", columns, key_heads)
        q_BTNH, k_BTKH, v_BTKH = map(named, projected, ("query", "key", "value"))
        if config.attention_bias != "none":
            q_BTNH = add_bias(q_BTNH, self.q_bias[...])
            k_BTKH = add_bias(k_BTKH, key_heads(self.k_bias[...]))
            v_BTKH = add_bias(v_BTKH, key_heads(self.v_bias[...]))
        if config.qk_norm:
            over_heads = config.qk_norm_over_heads
            norm: dict[str, Any] = {"eps": config.norm_eps, "offset": float(config.norm_offset)}
            norm["num_dims"] = 2 if over_heads else 1
            q_BTNH = rms_norm(q_BTNH, self.q_scale[...], **norm)
            scale = key_heads(self.k_scale[...]) if over_heads else self.k_scale[...]
            k_BTKH = rms_norm(k_BTKH, scale, **norm)
        if config.positions == "rotary":
            rope = rope_settings(config, kind)
            q_BTNH = rotary(q_BTNH, positions_BT, **rope)
            k_BTKH = rotary(k_BTKH, positions_BT, **rope)
        return q_BTNH, k_BTKH, v_BTKH

    def join(self, o_BTNH: jax.Array, rows: Callable = rows) -> jax.Array:
        """Output projection, from the heads to the residual stream."""
        y_BTD = rows(o_BTNH, self.out[...])
        if self.out_lora is not None:
            y_BTD += self.out_lora(o_BTNH)
        y_BTD = named(y_BTD, "attention_out")
        return add_bias(y_BTD, self.out_bias[...]) if self.config.attention_bias == "all" else y_BTD

    @property
    def _sinks(self) -> jax.Array | None:
        return None if self.sinks is None else self.sinks[...]

    def attend(
        self,
        projected: tuple[jax.Array, ...],
        given: tuple[jax.Array | None, ...],
        kernels: Kernels,
        **settings: Any,
    ) -> jax.Array:
        """Attention and output projection: the branch that is added to the residual stream.

        Args:
          projected: queries, keys and values.
          given, settings: the other arguments of `Kernels.attend`.
        """
        q_BTNH, k_BSKH, v_BSKH = projected
        q_BTNH = kernels.shard(q_BTNH, ("batch", "seq", "heads", "head_dim"))
        k_BSKH = kernels.shard(k_BSKH, ("batch", "seq", "kv_heads", "head_dim"))
        v_BSKH = kernels.shard(v_BSKH, ("batch", "seq", "kv_heads", "head_dim"))
        soft_cap = self.config.attention_soft_cap
        o_BTNH = kernels.attend(q_BTNH, k_BSKH, v_BSKH, *given, soft_cap=soft_cap, **settings)
        return self.join(o_BTNH, kernels.rows)

    def decode(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        cache: Cache,
        layer: jax.Array,
        kind: int = 0,
        bias_bN: jax.Array | None = None,
        rotary: Callable = rotary,
    ) -> tuple[jax.Array, Cache]:
        """Writes the tokens to the cache at their positions and attends to all cached tokens."""
        q_BTNH, *new = self.project(x_BTD, positions_BT, kind, rotary=rotary)

        rows_B1 = jnp.arange(x_BTD.shape[0])[:, None]
        k_LBSKH, v_LBSKH = (
            old_LBSKH.at[layer, rows_B1, positions_BT].set(new_BTKH.astype(old_LBSKH.dtype))
            for old_LBSKH, new_BTKH in zip(cache, new)
        )
        k_BSKH, v_BSKH = k_LBSKH[layer], v_LBSKH[layer]
        # Slot i stores position i, so causal order hides slots that are not written yet.
        slots_BS = jnp.broadcast_to(jnp.arange(k_BSKH.shape[1]), k_BSKH.shape[:2])
        o_BTNH = decode_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            positions_BT,
            slots_BS,
            bias_bN,
            self._sinks,
            sliding_window=self.config.window(kind),
            scale=self.config.attention_scale,
            soft_cap=self.config.attention_soft_cap,
            max_distance=self.config.relative_max_distance,
        )
        return self.join(o_BTNH), (k_LBSKH, v_LBSKH)


class Attention(GroupedHeads):
    """Self-attention."""

    def __call__(self, x_BTD: jax.Array, batch: Batch, kernels: Kernels, kind: int) -> jax.Array:
        rotary, scale = kernels.rotary, self.config.attention_scale
        if kernels.rotary_scales and self.config.positions == "rotary":
            rotary, scale = functools.partial(rotary, factor=math.sqrt(scale)), 1.0
        q_BTNH, k_BTKH, v_BTKH = self.project(
            x_BTD, batch.positions, kind, kernels.columns, rotary, kernels.key_heads
        )
        return self.attend(
            (q_BTNH, k_BTKH, v_BTKH),
            (batch.segments, None, None, self._sinks),
            kernels,
            sliding_window=self.config.window(kind),
            causal=self.config.causal,
            scale=scale,
        )


class MLP(nnx.Module):
    """Two matrices with an activation between them, or three with a gate (arXiv 2002.05202).

    Args:
      hidden: the logical axis between the matrices.
    """

    linear_weights: ClassVar = {"up": 1, "gate": 1, "down": 1}  # as in `Stack`

    def __init__(self, config: ModelConfig, weights: Weights, hidden: str = "mlp"):
        self.config, self.biased = config, config.mlp_bias
        self.up = weights.normal("embed", hidden)
        self.down = weights.normal(hidden, "embed", residual=True)
        self.gate = weights.normal("embed", hidden) if config.gated else None
        self.up_lora = adapter_of("up", config, weights, "embed", hidden)
        self.gate_lora = adapter_of("gate", config, weights, "embed", hidden)
        self.down_lora = adapter_of("down", config, weights, hidden, "embed")
        if self.biased:
            self.up_bias = weights.zeros(hidden)
            self.down_bias = weights.zeros("embed")
            self.gate_bias = weights.zeros(hidden) if config.gated else None

    def __call__(
        self, x_BTD: jax.Array, columns: Callable = columns, rows: Callable = rows
    ) -> jax.Array:
        matrices = [self.up, self.gate][: 1 + self.config.gated]
        projected = columns(x_BTD, tuple(weight[...] for weight in matrices if weight is not None))
        inputs = tuple(
            named(y_BTF if adapter is None else y_BTF + adapter(x_BTD), name)
            for y_BTF, adapter, name in zip(
                projected, (self.up_lora, self.gate_lora), ("mlp_up", "mlp_gate")
            )
        )
        if self.biased:
            biases = (self.up_bias, self.gate_bias)[: len(inputs)]
            inputs += tuple(bias[...] for bias in biases if bias is not None)
        # The activation is recomputed for the backward pass: cheaper than saving its result,
        # whatever the remat policy.
        down = jax.checkpoint(
            functools.partial(self._down, rows),
            policy=jax.checkpoint_policies.save_only_these_names(WEIGHT_SCALE),
            prevent_cse=False,
        )
        weights = [self.down[...]]
        if self.down_lora is not None:
            weights += [self.down_lora.a[...], self.down_lora.b[...]]
        y_BTD = down(weights, *inputs)
        return add_bias(y_BTD, self.down_bias[...]) if self.biased else y_BTD

    def feed(
        self, x_BTD: jax.Array, batch: Batch, kernels: Kernels, jitter: Callable
    ) -> tuple[jax.Array, Sums]:
        """The MLP's output, and no sums."""
        del batch, jitter
        return self(x_BTD, kernels.columns, kernels.rows), {}

    def decode(self, x_BTD: jax.Array, kernels: Kernels) -> jax.Array:
        """The MLP's output for tokens without padding."""
        del kernels
        return self(x_BTD)

    def _down(self, rows: Callable, weights: Sequence[jax.Array], *inputs: jax.Array) -> jax.Array:
        """Activation and down projection, adapter included."""
        hidden_BTF, (weight, *adapter) = self.activate(*inputs), weights
        y_BTD = rows(hidden_BTF, weight)
        if self.down_lora is None:
            return y_BTD
        return y_BTD + self.down_lora.matmul(hidden_BTF, *adapter)

    def activate(self, up_BTF: jax.Array, *others: jax.Array) -> jax.Array:
        """The hidden values; `others` are the gate and the biases of up and gate, if present."""
        hidden, biases = (up_BTF, *others), ()
        if self.biased:
            hidden, biases = hidden[: len(hidden) // 2], hidden[len(hidden) // 2 :]
        if biases:
            hidden = tuple(map(add_bias, hidden, biases))
        return activate(self.config, *hidden)


def activate(config: ModelConfig, up: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    """The hidden values of an MLP, or of an expert."""
    act = ACTIVATIONS[config.activation]
    if gate is None:
        return act(up)
    if limit := config.mlp_limit:
        up, gate = jnp.clip(up, -limit, limit) + 1, jnp.minimum(gate, limit)
    return act(gate) * up


class Block(nnx.Module):
    """One layer: attention and MLP, each around a residual, with norms before or after."""

    mlp_type: ClassVar[Any] = MLP  # a module with `feed` and `decode`, made by (config, weights)

    def __init__(self, config: ModelConfig, key: jax.Array):
        weights = Weights(config, key)
        self.placement, self.parallel = config.norm_placement, config.parallel_block
        before, after = self.placement in ("before", "both"), self.placement != "before"
        self.attention_norm = Norm(config, weights) if before else None
        self.attention: Any = (MultiHeadLatentAttention if config.kv_rank else Attention)(
            config, weights
        )
        self.attention_post_norm = Norm(config, weights) if after else None
        self.mlp_norm = Norm(config, weights) if before else None
        self.mlp = type(self).mlp_type(config, weights)
        self.mlp_post_norm = Norm(config, weights) if after else None

    def __call__(
        self,
        x_BTD: jax.Array,
        batch: Batch,
        kernels: Kernels,
        kind: int = 0,
        drop: Callable[[jax.Array, int], jax.Array] = lambda x, site: x,
    ) -> jax.Array:
        """The stream after the layer.

        Args:
          kind: the layer's index modulo `ModelConfig.period`.
          drop: dropout of a branch, (x, site) -> x.
        """
        return self.layer(x_BTD, batch, kernels, kind, drop)[0]

    def layer(
        self,
        x_BTD: jax.Array,
        batch: Batch,
        kernels: Kernels,
        kind: int = 0,
        drop: Callable[[jax.Array, int], jax.Array] = lambda x, site: x,
        jitter: Callable[[jax.Array], jax.Array] = lambda x: x,
    ) -> tuple[jax.Array, Sums]:
        """The stream after the layer and the layer's sums; `jitter` is applied to router inputs."""
        with jax.named_scope("attention"):
            y_BTD = self.attention(_apply(self.attention_norm, x_BTD), batch, kernels, kind)
            y_BTD = drop(y_BTD, 0)
            after_BTD = kernels.shard(self.add(x_BTD, y_BTD, self.attention_post_norm), STREAM)
        with jax.named_scope("mlp"):
            inputs_BTD = _apply(self.mlp_norm, x_BTD if self.parallel else after_BTD)
            z_BTD, sums = self.mlp.feed(inputs_BTD, batch, kernels, jitter)
            z_BTD = drop(z_BTD, 1)
            return kernels.shard(self.add(after_BTD, z_BTD, self.mlp_post_norm), STREAM), sums

    def add(self, x_BTD: jax.Array, y_BTD: jax.Array, norm: Norm | None) -> jax.Array:
        """Adds a branch to the residual stream, with the norm after it."""
        if self.placement == "after_residual":
            return _apply(norm, x_BTD + y_BTD)
        return x_BTD + _apply(norm, y_BTD)

    def decode(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        cache: Any,
        layer: jax.Array,
        kind: int,
        kernels: Kernels,
    ) -> tuple[jax.Array, Any]:
        """The stream after the layer for new tokens, and the cache (`Cache` or `LatentCache`) with
        their keys and values at layer `layer`."""
        y_BTD, cache = self.attention.decode(
            _apply(self.attention_norm, x_BTD),
            positions_BT,
            cache,
            layer,
            kind,
            rotary=kernels.rotary,
        )
        after_BTD = self.add(x_BTD, y_BTD, self.attention_post_norm)
        inputs_BTD = _apply(self.mlp_norm, x_BTD if self.parallel else after_BTD)
        z_BTD = self.mlp.decode(inputs_BTD, kernels)
        return self.add(after_BTD, z_BTD, self.mlp_post_norm), cache


def _apply(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)
