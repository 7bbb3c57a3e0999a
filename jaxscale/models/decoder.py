"""Decoder-only transformer (or bidirectional masked model): embedding, blocks, head.

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
from jaxscale.config.model import ModelConfig
from jaxscale.config.remat_policy import BLOCK_TENSORS
from jaxscale.models.adapters.lora import borrowed_rows, frozen_names, rows_in_head
from jaxscale.models.adapters.side import side_stream, split_side, with_side
from jaxscale.models.block import Block, Cache
from jaxscale.models.embedding import (
    Embedding,
    ngram_fields,
    ngram_tables,
    ngram_vectors,
    with_ngrams,
)
from jaxscale.models.experts import ExpertBlock, expert_metrics
from jaxscale.models.forward import scan_periods
from jaxscale.models.head import Head, make_norm
from jaxscale.models.kernels import Kernels, kernels_within, plain_lookup
from jaxscale.models.latent_attention import empty_latent_cache
from jaxscale.models.positions import rotary_for
from jaxscale.models.prediction import (
    PREDICTION,
    further_fields,
    prediction_stack,
    with_further_targets,
)
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
from jaxscale.models.shared_layers import first_layers, share_layers
from jaxscale.models.stacks import (
    Part,
    adjust_biases,
    all_parts,
    join_sums,
    pack_layers,
    part_axes,
    part_linear,
    part_memory,
    part_params,
    part_stored,
    part_sums,
    trunk_parts,
)
from jaxscale.models.weights import axes_of, module_of, params_of
from jaxscale.ops.attention.attention import attention
from jaxscale.ops.loss import logits
from jaxscale.ops.storage.quantised_storage import unpack_weights

EMBEDDING_LAYER = 2**24 - 1
"""The number of the embedding among the layers whose activations are dropped."""

ROUTER_SITE = 2
"""The noise site of the router's jitter; sites 0 and 1 of a layer are its dropouts."""

FINAL_NORM = "final_norm"
"""The embedding's entry with the norm after the last layer, if MTP modules read after it."""

CACHE_AXES = ("layers", "batch", "slots", "kv_heads", "head_dim")
"""Logical axes of keys and values in a cache; "slots" has a rule in `decoding.placement` only."""


def plain_kernels() -> Kernels:
    """Kernels for a notebook: the reference attention, no mesh."""
    return Kernels(functools.partial(attention, implementation="reference"))


def empty_cache(config: ModelConfig, batch: int, slots: int) -> Cache:
    """Empty key/value cache for every layer of a decoder."""
    shape = (config.num_layers, batch, slots, config.num_kv_heads, config.head_dim)
    return jnp.zeros(shape, config.compute_dtype), jnp.zeros(shape, config.compute_dtype)


@dataclass(frozen=True)
class Decoder(Model):
    """A decoder as pure functions over its parameters: a `models.protocol.Model`.

    Its stream is {"x": [batch, seq, d_model]}. It has one stack, "layers", or two,
    "dense_layers" and "expert_layers", where the first layers have no experts. Multi-token
    prediction (MTP) modules are one more stack, "prediction".
    """

    settings: ModelConfig
    kernels: Kernels
    trains: bool = True  # False omits the stack "prediction" and leaves its parameters unused
    block_type: ClassVar[Any] = Block  # a module, made by (settings, key)
    head_type: ClassVar[Any] = Head  # made in the same way

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The trunk's stacks and, in training, that of the MTP modules."""
        parts = self.parts if self.trains else self.trunk
        return tuple(self._shared_stack(part) for part in parts)

    @property
    def evaluated(self) -> "Decoder":
        """The model with the same parameters, without the MTP modules."""
        return dataclasses.replace(self, trains=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Names, block types and layers of all stacks, the MTP modules' included."""
        return all_parts(self.settings, type(self).block_type)

    @property
    def trunk(self) -> tuple[Part, ...]:
        """The `parts` that predict the next token, without the MTP modules."""
        return trunk_parts(self.settings, type(self).block_type)

    def _shared_stack(self, part: Part) -> Stack:
        """The stack of a part, whose layers may share weights; not those of MTP modules."""
        group = 1 if part.name == PREDICTION else self.settings.share_layers
        stack = share_layers(self._stack(part), group)
        stored = part_stored(part, self.settings)
        linear = {name: n for name, n in stack.linear.items() if name not in stored}
        return dataclasses.replace(stack, stored=stored, linear=linear)

    def _stack(self, part: Part) -> Stack:
        sums = part_sums(part, self.settings)
        if part.name == PREDICTION:
            return prediction_stack(
                self.settings,
                lambda embed, x: self._final_norm(embed.get(FINAL_NORM), x),
                self._embed,
                lambda weights, x, batch, index: self._stack_layer(
                    part, weights, x, batch, 0, part.layer(index)
                ),
                self.kernels,
                sums,
            )

        def enter(embed: Params, stream: Stream, batch: Batch) -> Stream:
            kernels, _ = kernels_within(self.kernels, stream, batch)
            model = dataclasses.replace(self, kernels=kernels)
            return {"x": stream["x"] if part.first else model.embed(embed, batch)}

        def block(weights: Params, stream: Stream, batch: Batch, layer: Layer) -> tuple:
            index = part.layer(layer.index)
            kernels, left = kernels_within(self.kernels, stream, batch)
            model = dataclasses.replace(self, kernels=kernels)
            x, sums = model._stack_layer(part, weights, stream["x"], batch, layer.kind, index)
            return {"x": x, **left}, sums

        stack = Stack(
            part.name,
            part.num_layers,
            enter,
            block,
            sums=sums,
            period=self.settings.period,
            model_layers=len(part.blocks),
            linear=part_linear(part, self.settings),
            memory=functools.partial(part_memory, part, self.settings, self.kernels),
            tensors=BLOCK_TENSORS,
        )
        if self.settings.side_width:
            last = part.name == self.trunk[-1].name
            return with_side(stack, self.settings, self.kernels, last=last)
        return stack

    @property
    def borrows(self) -> Mapping[str, tuple[str, ...]]:
        """A tied head uses the embedding's table; with MTP the head uses its final norm."""
        config = self.settings
        found = borrowed_rows(config)
        if config.tied_embeddings:
            found["tied"] = ("embed", "tokens")
        if config.prediction_depth and config.final_norm:
            for leaf in ("scale", "bias") if config.norm == "layer" else ("scale",):
                found[f"{FINAL_NORM}_{leaf}"] = ("embed", FINAL_NORM, leaf)
        return found

    @property
    def tables(self) -> Mapping[str, EmbeddingTable]:
        """The table of n-gram embeddings, if any."""
        return ngram_tables(self.settings.ngram_rows, self.settings.d_model)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The losses of the MTP modules."""
        return self._prediction_losses

    @property
    def _prediction_losses(self) -> tuple[str, ...]:
        depth = self.settings.prediction_depth if self.trains else 0
        return tuple(f"prediction_loss_{k}" for k in range(1, 1 + depth))

    @property
    def frozen(self) -> tuple[str, ...]:
        """With adapters, all other parameters; else the router biases, which `adjust`
        changes."""
        if self.settings.adapts:
            return frozen_names(self.axes)
        return tuple(
            "/".join((part.name, *path, "mlp", "router_bias"))
            for part in self._biased
            for path in part.expert_paths
        )

    @property
    def slices_head(self) -> bool:
        """True for the loss and the head here, of the next token alone."""
        ours = type(self).loss is Decoder.loss and type(self).head_type is Head
        return ours and not self.settings.prediction_depth

    @property
    def _biased(self) -> tuple[Part, ...]:
        """Parts whose routers have a bias for load balancing; adapters freeze it: none."""
        if not self.settings.router_bias or self.settings.adapts:
            return ()
        return tuple(part for part in self.parts if part.expert_paths)

    @property
    def adjust(self) -> Callable[[Params, Sums], Params] | None:
        """Auxiliary-loss-free load balancing (arXiv 2408.15664): the bias of an expert with more
        tokens than the mean falls by `balance_rate`; with fewer it rises."""
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
        """Load metrics of the experts of each layer."""
        return expert_metrics if self.settings.num_experts else None

    @property
    def draws_noise(self) -> bool:
        """True with dropout or router jitter."""
        return bool(self.settings.dropout or self.settings.router_jitter)

    @property
    def rules(self) -> Mapping[str, tuple[str, ...]]:
        """The stream's axis of MTP modules is replicated on every rank."""
        return {"depths": ()} if self.settings.prediction_depth else {}

    def extras(self, seq_len: int) -> Mapping[str, tuple[int, Any]]:
        """The targets of the MTP modules and the ids of n-grams, which `prepare` makes."""
        further = further_fields(self.settings.prediction_depth, seq_len)
        return further | ngram_fields(self.settings.ngram_rows, seq_len)

    def prepare(self, batch: Batch) -> Batch:
        """Adds `extras` to a batch on the host."""
        depth, rows = self.settings.prediction_depth, self.settings.ngram_rows
        batch = with_further_targets(batch, depth) if depth else batch
        return with_ngrams(batch, rows) if rows else batch

    def init(self, key: jax.Array, rows: Rows | None = None) -> Params:
        """Initial parameters, which depend on the key only; `rows` None stacks layers in order."""
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        embed = params_of(Embedding(self.settings, embed_key))
        layers = {
            part.name: part_params(
                part, self.settings, layers_key, first_layers(self._shared_stack(part), rows)
            )
            for part in self.parts
        }
        layers = {
            part.name: pack_layers(part, self.settings, layers[part.name]) for part in self.parts
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
        """`embed` of other tokens at the batch's positions; `site` is the dropout's."""
        with jax.named_scope("embed"):
            x_BTD = self._module(Embedding, embed)(
                tokens,
                batch.positions,
                self.kernels.lookup,
                batch.segments,
                dict(batch.extras).get("token_types"),
            )
            if (vectors_BTD := ngram_vectors(batch, x_BTD.dtype)) is not None:
                x_BTD += vectors_BTD
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
        return self._stack_layer(self.parts[0], layer, x_BTD, batch, kind, index)[0]

    def _stack_layer(
        self,
        part: Part,
        layers: Params,
        x_BTD: jax.Array,
        batch: Batch,
        kind: int,
        index: jax.Array | int,
    ) -> tuple[jax.Array, Sums]:
        """One layer of a stack, which may be several of the model, and their sums."""
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
        """Whether dropout is active: in a training step, not in an evaluation."""
        return self.settings.dropout > 0 and not isinstance(batch.noise, tuple)

    def _dropout(
        self, batch: Batch, layer: jax.Array | int
    ) -> Callable[[jax.Array, int], jax.Array]:
        rate = self.settings.dropout
        return lambda x, site: self.kernels.dropout(x, batch.noise, layer, site, rate)

    def loss(self, head: Params, stream: Stream, batch: Batch) -> Sums:
        """Sums over weighted tokens: loss and negative log-likelihood in nats; in training also
        the losses of the MTP modules, named in `metrics`."""
        config, x_BTD = self.settings, stream["x"]
        with jax.named_scope("head"):
            if not self._prediction_losses:  # MTP modules have applied the norm
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
        """Whether the model can generate: not with expert-choice routing, which sees later
        tokens, nor with n-grams, which are looked up for whole batches."""
        if self.settings.experts_choose or self.settings.ngram_rows:
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
        """One decoding step: the stream after the last layer, and the cache with the new tokens.

        Args:
          params: of the whole model.
          tokens_BT: the next tokens of each sequence.
          positions_BT: their positions, which are also their slots in the cache.
          shard: constrains the stream that enters each layer. Without it the partitioner shards
            d_model over fsdp, as the weights are, and replicates keys and values to write them.
          lengths_B: final length of each text, on which rotary positions may depend; None is
            `rope_length` of the settings for all.
        """
        rotary = rotary_for(self.settings, lengths_B)
        kernels = dataclasses.replace(self.kernels, rotary=rotary)
        x_BTD = self._module(Embedding, params["embed"])(tokens_BT, positions_BT, plain_lookup)

        def one(part, carry, weights, index, kind):
            weights, side = split_side(unpack_weights(weights, part_stored(part, self.settings)))
            x_BTD, y_BTD, cache = carry
            for i, (make, path) in enumerate(zip(part.blocks, part.paths)):
                block = self._module(make, weights[path[0]] if path else weights)
                x_BTD = shard(x_BTD, ("batch",))
                x_BTD, cache = block.decode(x_BTD, positions_BT, cache, index + i, kind, kernels)
            y_BTD = y_BTD if side is None else side_stream(self.settings, side, x_BTD, y_BTD)
            return x_BTD, y_BTD, cache

        def group(part, repeats, carry, layer, kind):
            weights, number = layer
            for i in range(repeats):
                index, kind_of_one = part.layer(repeats * number + i), repeats * kind + i
                carry = one(part, carry, weights, index, kind_of_one)
            return carry

        # As a carry of the scan the cache is updated in place; as a scanned input it is copied.
        carry = x_BTD, jnp.zeros_like(x_BTD) if self.settings.side_width else None, cache
        for part in self.trunk:
            stack = self._shared_stack(part)
            layers = params[part.name], jnp.arange(stack.num_layers)
            function = functools.partial(group, part, stack.repeats)
            carry = scan_periods(function, carry, layers, stack.period)
        x_BTD, y_BTD, cache = carry
        return x_BTD if y_BTD is None else x_BTD + y_BTD, cache

    def _borrowed_norm(self, head: Params) -> Params | None:
        """The final norm's parameters where the head borrows it from the embedding."""
        paths = {name: path for name, path in self.borrows.items() if FINAL_NORM in path}
        return {path[-1]: head[name] for name, path in paths.items()} or None

    def _final_norm(self, params: Params | None, x_BTD: jax.Array) -> jax.Array:
        return x_BTD if params is None else module_of(make_norm, self.settings, params)(x_BTD)

    def _final(self, head: Params, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """The output matrix's input, the matrix, and the other arguments of `logits`."""
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
