"""A transformer with one stack: embedding, blocks, head. A decoder, or a masked model that reads
to both sides.

Letters: B batch, T query time, S key time, D embed, F mlp hidden, N query heads, K kv heads,
H head_dim, V vocab (padded), L layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.batch import Batch
from jaxscale.config.layout import BLOCK_TENSORS
from jaxscale.config.model import ModelConfig
from jaxscale.models.block import Block, Cache
from jaxscale.models.embedding import Embedding
from jaxscale.models.experts import ExpertBlock, expert_metrics
from jaxscale.models.forward import scan_periods
from jaxscale.models.head import Head, make_norm
from jaxscale.models.kernels import Kernels, plain_lookup
from jaxscale.models.latent_attention import empty_latent_cache
from jaxscale.models.lora import borrowed_rows, frozen_names, rows_in_head
from jaxscale.models.positions import rotary_for
from jaxscale.models.prediction import (
    PREDICTION,
    further_fields,
    prediction_stack,
    with_further_targets,
)
from jaxscale.models.protocol import STREAM, Layer, Model, Params, Rows, Stack, Stream, Sums
from jaxscale.models.stacks import (
    Part,
    adjust_biases,
    all_parts,
    join_sums,
    part_axes,
    part_linear,
    part_params,
    part_sums,
    trunk_parts,
)
from jaxscale.models.weights import axes_of, module_of, params_of
from jaxscale.ops.attention.attention import attention
from jaxscale.ops.loss import logits

EMBEDDING_LAYER = 2**24 - 1
"""The number of the embedding among the layers whose activations are dropped."""

ROUTER_SITE = 2
"""The site of the router's jitter, beside the two of dropout in a layer."""

FINAL_NORM = "final_norm"
"""Where the embedding has the norm after the last layer, if modules read after it."""

CACHE_AXES = ("layers", "batch", "slots", "kv_heads", "head_dim")
"""Logical axes of keys and values in a cache; "slots" has a rule in `decoding.placement` only."""


def plain_kernels() -> Kernels:
    """Kernels for a notebook: the reference attention, no mesh."""
    return Kernels(functools.partial(attention, implementation="reference"))


def empty_cache(config: ModelConfig, batch: int, slots: int) -> Cache:
    """Keys and values of no token yet, for every layer of a decoder."""
    shape = (config.num_layers, batch, slots, config.num_kv_heads, config.head_dim)
    return jnp.zeros(shape, config.compute_dtype), jnp.zeros(shape, config.compute_dtype)


@dataclass(frozen=True)
class Decoder(Model):
    """A decoder as pure functions over its parameters: a `models.protocol.Model` over the stream
    {"x": [batch, seq, d_model]}, of one stack, "layers", or where the first layers have no
    experts of two, "dense_layers" and "expert_layers". The modules that predict further tokens, if
    there are any, are one more stack, "prediction".
    """

    settings: ModelConfig
    kernels: Kernels
    trains: bool = True  # otherwise without the stack "prediction", whose parameters are left alone
    block_type: ClassVar[Any] = Block  # a module, made by (settings, key)
    head_type: ClassVar[Any] = Head  # likewise

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """One of all layers, or one without experts and one with them; and in training that of the
        modules that predict further tokens."""
        return tuple(self._stack(part) for part in (self.parts if self.trains else self.trunk))

    @property
    def evaluated(self) -> "Decoder":
        """The model of the same parameters without what only training needs."""
        return dataclasses.replace(self, trains=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stacks' names, types of block, and layers, of all parameters."""
        return all_parts(self.settings, type(self).block_type)

    @property
    def trunk(self) -> tuple[Part, ...]:
        """Those of `parts` that a prediction of the next token goes through."""
        return trunk_parts(self.settings, type(self).block_type)

    def _stack(self, part: Part) -> Stack:
        sums = part_sums(part, self.settings)
        if part.name == PREDICTION:
            return prediction_stack(
                self.settings,
                lambda embed, x: self._final_norm(embed.get(FINAL_NORM), x),
                self._embed,
                lambda weights, x, batch, index: self._turn(
                    part, weights, x, batch, 0, part.layer(index)
                ),
                self.kernels,
                sums,
            )

        def enter(embed: Params, stream: Stream, batch: Batch) -> Stream:
            return {"x": stream["x"] if part.first else self.embed(embed, batch)}

        def block(weights: Params, stream: Stream, batch: Batch, layer: Layer) -> tuple:
            index = part.layer(layer.index)
            x, sums = self._turn(part, weights, stream["x"], batch, layer.kind, index)
            return {"x": x}, sums

        return Stack(
            part.name,
            part.num_layers,
            enter,
            block,
            sums=sums,
            period=self.settings.period,
            turn=len(part.blocks),
            linear=part_linear(part, self.settings),
            tensors=BLOCK_TENSORS,
        )

    @property
    def borrows(self) -> Mapping[str, tuple[str, ...]]:
        """A tied head uses the embedding; and the final norm, where modules read after it."""
        config = self.settings
        found = borrowed_rows(config)
        if config.tied_embeddings:
            found["tied"] = ("embed", "tokens")
        if config.prediction_depth and config.final_norm:
            for leaf in ("scale", "bias") if config.norm == "layer" else ("scale",):
                found[f"{FINAL_NORM}_{leaf}"] = ("embed", FINAL_NORM, leaf)
        return found

    @property
    def metrics(self) -> tuple[str, ...]:
        """The losses of the modules that predict further tokens."""
        return self._prediction_losses

    @property
    def _prediction_losses(self) -> tuple[str, ...]:
        depth = self.settings.prediction_depth if self.trains else 0
        return tuple(f"prediction_loss_{k}" for k in range(1, 1 + depth))

    @property
    def frozen(self) -> tuple[str, ...]:
        """All but adapters, where there are some; else the biases of routers, which `adjust`
        changes."""
        if self.settings.lora_rank:
            return frozen_names(self.axes)
        return tuple(
            "/".join((part.name, *path, "mlp", "router_bias"))
            for part in self._biased
            for path in part.expert_paths
        )

    @property
    def _biased(self) -> tuple[Part, ...]:
        """Those whose routers have a bias for balancing, which adapters leave as it is."""
        if not self.settings.router_bias or self.settings.lora_rank:
            return ()
        return tuple(part for part in self.parts if part.expert_paths)

    @property
    def adjust(self) -> Callable[[Params, Sums], Params] | None:
        """Balancing without an auxiliary loss (arXiv 2408.15664): the bias of an expert that more
        tokens chose than the mean falls by `balance_rate`, and that of one with fewer rises."""
        return self._balance if self._biased else None

    def _balance(self, params: Params, sums: Sums) -> Params:
        def change(load_LE: jax.Array) -> jax.Array:
            uneven_LE = jnp.sign(jnp.mean(load_LE, axis=-1, keepdims=True) - load_LE)
            return self.settings.balance_rate * uneven_LE

        changed = {
            part.name: adjust_biases(part, params[part.name], sums[f"{part.name}/load"], change)
            for part in self._biased
        }
        return {**params, **changed}

    @property
    def report(self) -> Callable[[Sums], Sums] | None:
        """How evenly tokens are spread over the experts of each layer."""
        return expert_metrics if self.settings.num_experts else None

    @property
    def draws_noise(self) -> bool:
        """For dropout, or the jitter of routers."""
        return bool(self.settings.dropout or self.settings.router_jitter)

    @property
    def rules(self) -> Mapping[str, tuple[str, ...]]:
        """What the stream has for each module that predicts a further token is on every rank."""
        return {"depths": ()} if self.settings.prediction_depth else {}

    def extras(self, seq_len: int) -> Mapping[str, tuple[int, Any]]:
        """The targets of the modules that predict further tokens, which `prepare` makes."""
        return further_fields(self.settings.prediction_depth, seq_len)

    def prepare(self, batch: Batch) -> Batch:
        """A batch on the host, with `extras`."""
        depth = self.settings.prediction_depth
        return with_further_targets(batch, depth) if depth else batch

    def init(self, key: jax.Array, rows: Rows | None = None) -> Params:
        """Fresh parameters; they depend on the key alone. None stacks all layers in order."""
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        embed = params_of(Embedding(self.settings, embed_key))
        layers = {
            part.name: part_params(
                part, self.settings, layers_key, None if rows is None else rows[part.name]
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
            **{part.name: part_axes(part, self.settings) for part in self.parts},
            "head": axes_of(type(self).head_type, self.settings),
        }

    def embed(self, embed: Params, batch: Batch) -> jax.Array:
        """Tokens to [batch, seq, d_model] in the compute type, whatever the type of `embed`."""
        return self._embed(embed, batch, batch.tokens, 0)

    def _embed(self, embed: Params, batch: Batch, tokens: jax.Array, site: int) -> jax.Array:
        """`embed` of other tokens at the places of the batch's; `site` is of dropout."""
        with jax.named_scope("embed"):
            x_BTD = self._module(Embedding, embed)(
                tokens,
                batch.positions,
                self.kernels.lookup,
                batch.segments,
                dict(batch.extras).get("token_types"),
            )
            if self._drops(batch):
                x_BTD = self._dropout(batch, EMBEDDING_LAYER)(x_BTD, site)
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
        return self._turn(self.parts[0], layer, x_BTD, batch, kind, index)[0]

    def _turn(
        self,
        part: Part,
        layers: Params,
        x_BTD: jax.Array,
        batch: Batch,
        kind: int,
        index: jax.Array | int,
    ) -> tuple[jax.Array, Sums]:
        """A layer of a stack, which is one of the model or a few, and their sums."""
        if len(part.blocks) == 1:
            return self._layer(part.blocks[0], layers, x_BTD, batch, kind, index)
        found = []
        for i, (block, (name,)) in enumerate(zip(part.blocks, part.paths)):
            x_BTD, sums = self._layer(block, layers[name], x_BTD, batch, kind, index + i)
            found += [sums] if sums else []
        return x_BTD, join_sums(found)

    def _layer(
        self,
        kind_of_block: Any,
        layer: Params,
        x_BTD: jax.Array,
        batch: Batch,
        kind: int,
        index: jax.Array | int,
    ) -> tuple[jax.Array, Sums]:
        block = self._module(kind_of_block, layer)
        noise: dict[str, Any] = {}
        if self._drops(batch):
            noise["drop"] = self._dropout(batch, index)
        if kind_of_block is ExpertBlock:
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
        """The sum over weighted tokens of loss, and of the negative log-likelihood in nats; in the
        loss of a step also those of the modules that predict further tokens, `metrics`."""
        config, x_BTD = self.settings, stream["x"]
        with jax.named_scope("head"):
            if not self._prediction_losses:  # the modules have applied it
                x_BTD = self._final_norm(self._borrowed_norm(head), x_BTD)
            loss, nll = self._cross_entropy(head, x_BTD, batch.targets, batch.weights)
            sums = {"loss": loss, "nll": nll}
            for k, name in enumerate(self._prediction_losses, 1):
                targets, weights = batch.extras[f"targets_{k}"], batch.extras[f"weights_{k}"]
                ahead_BTD = stream["ahead"][:, :, k - 1]
                loss, sums[name] = self._cross_entropy(head, ahead_BTD, targets, weights)
                sums["loss"] += config.prediction_weight / config.prediction_depth * loss
            return sums

    def _cross_entropy(
        self, head: Params, x_BTD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x_BTD, matrix, how = self._final(head, x_BTD)
        how["z_loss"] = self.settings.z_loss
        return self.kernels.cross_entropy(x_BTD, matrix, targets_BT, weights_BT, **how)

    def logits(self, head: Params, x_BTD: jax.Array) -> jax.Array:
        """Float32 [batch, seq, vocab_size]."""
        x_BTD = self._final_norm(self._borrowed_norm(head), x_BTD)
        x_BTD, matrix, how = self._final(head, x_BTD)
        return logits(x_BTD, matrix, **how)

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
        lengths_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """The stream after every layer, and the cache with these tokens in it.

        Args:
          params: of the whole model.
          tokens_BT: the next tokens of each sequence.
          positions_BT: their positions, which are also their slots in the cache.
          shard: constrains the stream that enters each layer. Otherwise the partitioner would
            shard d_model over fsdp, as the weights, and replicate keys and values to write them.
          lengths_B: of each text with the tokens that are still to come, on which rotary positions
            may depend; None is `rope_length` of the settings for all.
        """
        rotary = rotary_for(self.settings, lengths_B)
        kernels = dataclasses.replace(self.kernels, rotary=rotary)
        x_BTD = self._module(Embedding, params["embed"])(tokens_BT, positions_BT, plain_lookup)

        def one(part, carry, layer, kind):
            weights, index = layer
            for i, (make, path) in enumerate(zip(part.blocks, part.paths)):
                block = self._module(make, weights[path[0]] if path else weights)
                x_BTD = shard(carry[0], ("batch",))
                carry = block.decode(x_BTD, positions_BT, carry[1], index + i, kind, kernels)
            return carry

        # The cache is carried, not scanned over: carried, it is updated in place.
        carry = x_BTD, cache
        for part in self.trunk:
            layers = params[part.name], part.layer(jnp.arange(part.num_layers))
            function = functools.partial(one, part)
            carry = scan_periods(function, carry, layers, self.settings.period)
        return carry

    def _borrowed_norm(self, head: Params) -> Params | None:
        """The parameters of the final norm where it is not the head's own."""
        paths = {name: path for name, path in self.borrows.items() if FINAL_NORM in path}
        return {path[-1]: head[name] for name, path in paths.items()} or None

    def _final_norm(self, params: Params | None, x_BTD: jax.Array) -> jax.Array:
        return x_BTD if params is None else module_of(make_norm, self.settings, params)(x_BTD)

    def _final(self, head: Params, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """What the output matrix takes, the matrix, and the other arguments of `logits`."""
        own = {name: value for name, value in head.items() if name not in self.borrows}
        module = self._module(type(self).head_type, own)
        tied = self.settings.tied_embeddings
        matrix = head["tied"] if tied else module.output[...]
        bias = getattr(module, "output_bias", None)
        how = {
            "vocab_size": self.num_classes or self.settings.vocab_size,
            "bias_V": None if bias is None else bias[...],
            "soft_cap": self.settings.logit_soft_cap,
            "transposed": tied,
            **rows_in_head(self.settings, head),
        }
        return module(x_BTD), matrix, how

    def _module(self, kind: type[nnx.Module], params: Params) -> Any:
        return module_of(kind, self.settings, params)
