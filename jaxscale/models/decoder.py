"""A decoder-only transformer; Llama-style and GPT-style are two settings of it.

Letters: B batch, T query time, S key time, D embed, F mlp hidden, N query heads, K kv heads,
H head_dim, V vocab (padded), L layers.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name as named  # for remat policies
from jax.typing import DTypeLike

from jaxscale.batch import Batch
from jaxscale.config import ModelConfig
from jaxscale.layout import BLOCK_TENSORS
from jaxscale.models.protocol import STREAM, Layer, Params, Rows, Stack, Stream, Sums
from jaxscale.ops.attention import attention, decode_attention
from jaxscale.ops.embedding import lookup
from jaxscale.ops.loss import cross_entropy, logits
from jaxscale.ops.norm import layer_norm, rms_norm
from jaxscale.ops.rope import rotary
from jaxscale.ops.tensor_parallel import add_bias, columns, rows

Cache = tuple[jax.Array, jax.Array]
"""Keys and values of every layer, [layers, batch, slots, kv_heads, head_dim] each."""

CACHE_AXES = ("layers", "batch", "seq", "kv_heads", "head_dim")


def plain_lookup(
    table_VD: jax.Array, indices_BT: jax.Array, rows: str, dtype: DTypeLike
) -> jax.Array:
    """Rows, in `dtype`, of a table that this device holds whole; `rows` names its first axis."""
    del rows
    return lookup(table_VD, indices_BT, dtype)


@dataclass(frozen=True)
class Kernels:
    """The functions of a model that a layout may replace by others with the same result.

    The defaults run anywhere, with no mesh.

    `attend(q, k, v, segments, **settings)` has the settings of `ops.attention.attention`, per call:
    `sliding_window`, `causal`, `scale`, `soft_cap`, and for cross attention and T5's position bias
    `segments_BS`, `bias_bN` and `max_distance`. Where `rotary_scales`, a model that rotates queries
    and keys should multiply each by the root of the scale there (`factor`) and pass scale 1.

    `key_heads` takes what has key/value heads as its last dimension but one: weights, biases,
    scales. It repeats heads where ranks of tensor outnumber them.
    """

    attend: Callable[..., jax.Array]
    lookup: Callable[[jax.Array, jax.Array, str, DTypeLike], jax.Array] = plain_lookup
    columns: Callable[[jax.Array, Sequence[jax.Array]], tuple[jax.Array, ...]] = columns
    rows: Callable[[jax.Array, jax.Array], jax.Array] = rows
    rotary: Callable[..., jax.Array] = rotary
    rotary_scales: bool = False
    key_heads: Callable[[jax.Array], jax.Array] = lambda x: x
    cross_entropy: Callable[..., tuple[jax.Array, jax.Array]] = cross_entropy
    shard: Callable[[jax.Array, tuple[str, ...]], jax.Array] = lambda x, axes: x


def plain_kernels() -> Kernels:
    """Kernels for a notebook: the reference attention, no mesh."""
    return Kernels(functools.partial(attention, implementation="reference"))


class Weights:
    """Makes the parameters of one module: shape, scale and placement follow from the axes."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        self.sizes = {
            "embed": config.d_model,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "mlp": config.d_ff,
            "vocab": config.padded_vocab_size,
            "positions": config.max_seq_len,
        }
        self.dtype = jnp.dtype(config.param_dtype)
        # "Small init" (Nguyen and Salazar 2019, arXiv 1910.05895); the outputs into the residual
        # stream shrink with depth as in GPT-2.
        self.std = math.sqrt(2 / (5 * config.d_model))
        self.depth_scale = 1 / math.sqrt(2 * config.num_layers)
        self.keys = nnx.RngStream(key, tag="params")

    def normal(self, *axes: str, residual: bool = False) -> nnx.Param:
        """A matrix; `residual` marks those that write into the residual stream."""
        std = self.std * (self.depth_scale if residual else 1.0)
        value = exact_normal(self.keys(), self.shape(axes), std)
        return nnx.Param(value.astype(self.dtype), axes=axes)

    def ones(self, *axes: str) -> nnx.Param:
        return nnx.Param(jnp.ones(self.shape(axes), self.dtype), axes=axes)

    def zeros(self, *axes: str) -> nnx.Param:
        return nnx.Param(jnp.zeros(self.shape(axes), self.dtype), axes=axes)

    def shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.sizes[axis] for axis in axes)


def exact_normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """Float32 draws from (nearly) a normal distribution, the same bits on any layout and back end.

    The sum of four uniform 16-bit integers, which ends at 3.5 standard deviations, times one
    constant: all exact but for one rounding. `jax.random.normal` goes through a polynomial whose
    last bit depends on how the compiler cuts the array.
    """
    words = jax.random.bits(key, (2, *shape), jnp.uint32)
    total = jnp.sum((words >> 16) + (words & 0xFFFF), axis=0, dtype=jnp.uint32).astype(jnp.int32)
    centred = (total - 2 * 0xFFFF).astype(jnp.float32)
    return centred * jnp.float32(std / math.sqrt(4 * (2**32 - 1) / 12))


class Norm(nnx.Module):
    """RMSNorm (llama) or LayerNorm with bias (gpt), over the last dimension."""

    def __init__(self, config: ModelConfig, weights: Weights, axis: str = "embed"):
        self.scale = weights.ones(axis)
        self.bias = weights.zeros(axis) if config.family == "gpt" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.bias is None:
            return rms_norm(x, self.scale[...])
        return layer_norm(x, self.scale[...], self.bias[...])


class Attention(nnx.Module):
    """Causal self-attention with grouped heads."""

    def __init__(self, config: ModelConfig, weights: Weights):
        self.q = weights.normal("embed", "heads", "head_dim")
        self.k = weights.normal("embed", "kv_heads", "head_dim")
        self.v = weights.normal("embed", "kv_heads", "head_dim")
        self.out = weights.normal("heads", "head_dim", "embed", residual=True)
        if config.family == "gpt":
            self.q_bias = weights.zeros("heads", "head_dim")
            self.k_bias = weights.zeros("kv_heads", "head_dim")
            self.v_bias = weights.zeros("kv_heads", "head_dim")
            self.out_bias = weights.zeros("embed")
        if config.qk_norm:
            self.q_scale = weights.ones("head_dim")
            self.k_scale = weights.ones("head_dim")
        self.gpt, self.qk_norm = config.family == "gpt", config.qk_norm
        self.rope_theta, self.rope_scaling = config.rope_theta, config.rope_scaling
        self.sliding_window = config.sliding_window

    def project(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        columns: Callable = columns,
        rotary: Callable = rotary,
        key_heads: Callable = lambda x: x,
    ) -> tuple[jax.Array, ...]:
        """Queries, keys and values, rotary positions applied."""
        weights = (self.q[...], key_heads(self.k[...]), key_heads(self.v[...]))
        projected = columns(x_BTD, weights)
        q_BTNH, k_BTKH, v_BTKH = map(named, projected, ("query", "key", "value"))
        if self.gpt:
            q_BTNH = add_bias(q_BTNH, self.q_bias[...])
            k_BTKH = add_bias(k_BTKH, key_heads(self.k_bias[...]))
            v_BTKH = add_bias(v_BTKH, key_heads(self.v_bias[...]))
        if self.qk_norm:
            q_BTNH = rms_norm(q_BTNH, self.q_scale[...])
            k_BTKH = rms_norm(k_BTKH, self.k_scale[...])
        if not self.gpt:
            turn = {"theta": self.rope_theta, "scaling": self.rope_scaling}
            q_BTNH = rotary(q_BTNH, positions_BT, **turn)
            k_BTKH = rotary(k_BTKH, positions_BT, **turn)
        return q_BTNH, k_BTKH, v_BTKH

    def join(self, o_BTNH: jax.Array, rows: Callable = rows) -> jax.Array:
        """The heads' outputs, projected back into the residual stream."""
        y_BTD = named(rows(o_BTNH, self.out[...]), "attention_out")
        return add_bias(y_BTD, self.out_bias[...]) if self.gpt else y_BTD

    def __call__(self, x_BTD: jax.Array, batch: Batch, kernels: Kernels) -> jax.Array:
        rotary, scale = kernels.rotary, None
        if kernels.rotary_scales and not self.gpt:
            rotary = functools.partial(rotary, factor=self.q.shape[-1] ** -0.25)
            scale = 1.0
        q_BTNH, k_BTKH, v_BTKH = self.project(
            x_BTD, batch.positions, kernels.columns, rotary, kernels.key_heads
        )
        q_BTNH = kernels.shard(q_BTNH, ("batch", "seq", "heads", "head_dim"))
        k_BTKH = kernels.shard(k_BTKH, ("batch", "seq", "kv_heads", "head_dim"))
        v_BTKH = kernels.shard(v_BTKH, ("batch", "seq", "kv_heads", "head_dim"))
        o_BTNH = kernels.attend(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            batch.segments,
            sliding_window=self.sliding_window,
            scale=scale,
        )
        return self.join(o_BTNH, kernels.rows)

    def decode(
        self, x_BTD: jax.Array, positions_BT: jax.Array, cache: Cache, layer: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Writes these tokens to the cache at their positions, and attends to all that it holds."""
        q_BTNH, *new = self.project(x_BTD, positions_BT)

        rows_B1 = jnp.arange(x_BTD.shape[0])[:, None]
        k_LBSKH, v_LBSKH = (
            old_LBSKH.at[layer, rows_B1, positions_BT].set(new_BTKH.astype(old_LBSKH.dtype))
            for old_LBSKH, new_BTKH in zip(cache, new)
        )
        k_BSKH, v_BSKH = k_LBSKH[layer], v_LBSKH[layer]
        # Slot i holds position i. Slots that are not written yet lie beyond every query.
        slots_BS = jnp.broadcast_to(jnp.arange(k_BSKH.shape[1]), k_BSKH.shape[:2])
        o_BTNH = decode_attention(
            q_BTNH, k_BSKH, v_BSKH, positions_BT, slots_BS, sliding_window=self.sliding_window
        )
        return self.join(o_BTNH), (k_LBSKH, v_LBSKH)


class MLP(nnx.Module):
    """SwiGLU (llama) or GELU with biases (gpt)."""

    def __init__(self, config: ModelConfig, weights: Weights):
        self.gpt = config.family == "gpt"
        self.up = weights.normal("embed", "mlp")
        self.down = weights.normal("mlp", "embed", residual=True)
        if self.gpt:
            self.up_bias = weights.zeros("mlp")
            self.down_bias = weights.zeros("embed")
        else:
            self.gate = weights.normal("embed", "mlp")

    def __call__(
        self, x_BTD: jax.Array, columns: Callable = columns, rows: Callable = rows
    ) -> jax.Array:
        if self.gpt:
            (up_BTF,) = columns(x_BTD, (self.up[...],))
            inputs = named(up_BTF, "mlp_up"), self.up_bias[...]
        else:
            up_BTF, gate_BTF = columns(x_BTD, (self.up[...], self.gate[...]))
            inputs = named(up_BTF, "mlp_up"), named(gate_BTF, "mlp_gate")
        # The activation is recomputed for the backward pass: cheaper than saving its result,
        # whatever the remat policy.
        down = jax.checkpoint(
            lambda weight, *inputs: rows(self.activate(*inputs), weight), prevent_cse=False
        )
        y_BTD = down(self.down[...], *inputs)
        return add_bias(y_BTD, self.down_bias[...]) if self.gpt else y_BTD

    def activate(self, up_BTF: jax.Array, other: jax.Array) -> jax.Array:
        """The hidden values; `other` is the bias of gpt, the gate of llama."""
        if self.gpt:
            return jax.nn.gelu(add_bias(up_BTF, other))
        return jax.nn.silu(other) * up_BTF


class Block(nnx.Module):
    """One layer: attention and MLP, each after a norm and around a residual."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        weights = Weights(config, key)
        self.attention_norm = Norm(config, weights)
        self.attention = Attention(config, weights)
        self.mlp_norm = Norm(config, weights)
        self.mlp = MLP(config, weights)

    def __call__(self, x_BTD: jax.Array, batch: Batch, kernels: Kernels) -> jax.Array:
        with jax.named_scope("attention"):
            x_BTD += self.attention(self.attention_norm(x_BTD), batch, kernels)
            x_BTD = kernels.shard(x_BTD, STREAM)
        with jax.named_scope("mlp"):
            x_BTD += self.mlp(self.mlp_norm(x_BTD), kernels.columns, kernels.rows)
            return kernels.shard(x_BTD, STREAM)

    def decode(
        self, x_BTD: jax.Array, positions_BT: jax.Array, cache: Cache, layer: jax.Array
    ) -> tuple[jax.Array, Cache]:
        y_BTD, cache = self.attention.decode(self.attention_norm(x_BTD), positions_BT, cache, layer)
        x_BTD += y_BTD
        return x_BTD + self.mlp(self.mlp_norm(x_BTD)), cache


class Embedding(nnx.Module):
    """Tokens, and learned positions for gpt, to the residual stream."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        weights = Weights(config, key)
        self.tokens = weights.normal("vocab", "embed")
        self.positions = weights.normal("positions", "embed") if config.family == "gpt" else None
        self.compute_dtype = config.compute_dtype

    def __call__(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, lookup: Callable
    ) -> jax.Array:
        x_BTD = lookup(self.tokens[...], tokens_BT, "vocab", self.compute_dtype)
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

    @property
    def stacks(self) -> tuple[Stack]:
        """The only one."""

        def enter(embed: Params, stream: Stream, batch: Batch) -> Stream:
            del stream
            return {"x": self.embed(embed, batch)}

        def block(weights: Params, stream: Stream, batch: Batch, layer: Layer) -> tuple:
            return {"x": self.block(weights, stream["x"], batch)}, {}

        return (Stack("layers", self.settings.num_layers, enter, block, tensors=BLOCK_TENSORS),)

    @property
    def borrows(self) -> Mapping[str, tuple[str, ...]]:
        """A tied head uses the embedding."""
        return {"tied": ("embed", "tokens")} if self.settings.tied_embeddings else {}

    @property
    def metrics(self) -> tuple[str, ...]:
        """None."""
        return ()

    def init(self, key: jax.Array, rows: Rows | None = None) -> Params:
        """Fresh parameters; they depend on the key alone. None stacks all layers in order."""
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        layer_keys = jax.random.split(layers_key, self.settings.num_layers)
        make = jax.vmap(lambda key: _params(Block(self.settings, key)))
        if rows is None:
            layers = make(layer_keys)
        else:
            row = rows["layers"]
            layers = jax.tree.map(
                lambda x: jnp.where(row.reshape(-1, *(1,) * (x.ndim - 1)) >= 0, x, 0),
                make(layer_keys[row]),
            )
        return {
            "embed": _params(Embedding(self.settings, embed_key)),
            "layers": layers,
            "head": _params(Head(self.settings, head_key)),
        }

    @property
    def axes(self) -> Params:
        """The tree of parameters with the tuple of logical axes in place of each array."""
        blocks = _axes(Block, self.settings)
        return {
            "embed": _axes(Embedding, self.settings),
            "layers": jax.tree.map(
                lambda axes: ("layers", *axes), blocks, is_leaf=lambda node: type(node) is tuple
            ),
            "head": _axes(Head, self.settings),
        }

    def embed(self, embed: Params, batch: Batch) -> jax.Array:
        """Tokens to [batch, seq, d_model] in the compute type, whatever the type of `embed`."""
        with jax.named_scope("embed"):
            x_BTD = self._module(Embedding, embed)(
                batch.tokens, batch.positions, self.kernels.lookup
            )
            return self.kernels.shard(x_BTD, STREAM)

    def block(self, layer: Params, x_BTD: jax.Array, batch: Batch) -> jax.Array:
        """One layer."""
        return self._module(Block, layer)(x_BTD, batch, self.kernels)

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
                vocab_size=self.settings.vocab_size,
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
            vocab_size=self.settings.vocab_size,
            soft_cap=self.settings.logit_soft_cap,
            transposed=self.settings.tied_embeddings,
        )

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

        # The cache is carried, not scanned over: carried, it is updated in place.
        def one(carry, layer):
            weights, index = layer
            return self._module(Block, weights).decode(
                shard(carry[0], ("batch",)), positions_BT, carry[1], index
            ), None

        layers = (params["layers"], jnp.arange(self.settings.num_layers))
        return jax.lax.scan(one, (x_BTD, cache), layers)[0]

    def _final(self, head: Params, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = {name: value for name, value in head.items() if name != "tied"}
        module = self._module(Head, own)
        matrix = head["tied"] if self.settings.tied_embeddings else module.output[...]
        return module.norm(x_BTD), matrix

    def _module(self, kind: type[nnx.Module], params: Params) -> Any:
        return nnx.merge(_graph(kind, self.settings)[0], params)


def _params(module: nnx.Module) -> Params:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _graph(kind: Callable[..., nnx.Module], config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: kind(config, jax.random.key(0))), nnx.Param)


def _axes(kind: Callable[..., nnx.Module], config: ModelConfig) -> Params:
    state = _graph(kind, config)[1]
    return nnx.to_pure_dict(
        jax.tree.map(lambda param: param.axes, state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    )
