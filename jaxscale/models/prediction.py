"""Multi-token prediction (MTP) modules, in training only (DeepSeek-V3, arXiv 2412.19437, section
2.2).

At each token, module k reads the representation of module k - 1 (module 0 is the model itself,
after its final norm) and the embedding of the token k positions later, and predicts the token
after that one. A separate norm follows each module; all use the model's head.

Letters: B batch, T time, K modules, D embed.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.config.remat_policy import BLOCK_TENSORS
from jaxscale.models.block import Norm
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import STREAM, Axes, Layer, Params, Stack, Stream, Sums
from jaxscale.models.weights import Weights, module_of
from jaxscale.ops.tensor_parallel import linear

PREDICTION = "prediction"
"""The name of the modules' stack."""

MERGE = "merge"
"""The key of `Merge`'s parameters among those of a layer."""

AHEAD: Axes = ("batch", "residual_seq", "depths", "embed")
"""Logical axes of the stack's array with an entry per module."""


class Merge(nnx.Module):
    """The parts of an MTP module around its layer: input norms, output norm, and the projection of
    the concatenated inputs, as two matrices."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        weights = Weights(config, key)
        self.hidden_norm = Norm(config, weights)
        self.embedding_norm = Norm(config, weights)
        half = math.sqrt(0.5)  # two matrices of d_model inputs act as one of 2 * d_model
        self.hidden = weights.normal("embed", "transform", scale=half)
        self.embedding = weights.normal("embed", "transform", scale=half)
        self.output_norm = Norm(config, weights)

    def __call__(
        self, hidden_BTD: jax.Array, embedding_BTD: jax.Array, linear: Callable = linear
    ) -> jax.Array:
        """The layer's input."""
        merged_BTD = linear(self.hidden_norm(hidden_BTD), self.hidden[...])
        return merged_BTD + linear(self.embedding_norm(embedding_BTD), self.embedding[...])


def prediction_stack(
    config: ModelConfig,
    final_norm: Callable[[Params, jax.Array], jax.Array],
    embed: Callable[[Params, Batch, jax.Array, int], jax.Array],
    layer: Callable[[Params, jax.Array, Batch, jax.Array], tuple[jax.Array, Sums]],
    kernels: Kernels,
    sums: Mapping[str, tuple[int, ...]],
) -> Stack:
    """The MTP modules as a stack over {"x": the model's representation, "ahead": [B, T, K, D]}.

    "ahead" has for each module first its input embedding, then its output.

    Args:
      final_norm: (parameters "embed", stream) -> stream.
      embed: (parameters "embed", batch, tokens, module number from 1) -> stream.
      layer: (weights, stream, batch, module index) -> stream and sums.
      sums: of a layer.
    """
    depth, shard = config.prediction_depth, kernels.shard

    def enter(params: Params, stream: Stream, batch: Batch) -> Stream:
        tokens = [batch.targets]  # a document's tokens one position later
        tokens += [batch.extras[f"targets_{k}"] for k in range(1, depth)]
        ahead = [embed(params, batch, one, 1 + k) for k, one in enumerate(tokens)]
        return {
            "x": shard(final_norm(params, stream["x"]), STREAM),
            "ahead": shard(jnp.stack(ahead, axis=2), AHEAD),
        }

    def block(weights: Params, stream: Stream, batch: Batch, place: Layer) -> tuple[Stream, Sums]:
        own = {name: value for name, value in weights.items() if name != MERGE}
        merge: Any = module_of(Merge, config, weights[MERGE])
        index, ahead = place.index, stream["ahead"]

        def at(index: Any) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(ahead, index, axis=2, keepdims=False)

        hidden = stream["x"]
        if depth > 1:
            hidden = jnp.where(index == 0, hidden, at(jnp.maximum(index - 1, 0)))
        with jax.named_scope("merge"):
            merged = shard(merge(hidden, at(index), kernels.linear), STREAM)
        made, sums = layer(own, merged, batch, index)
        made = merge.output_norm(made)[:, :, None]
        ahead = jax.lax.dynamic_update_slice_in_dim(ahead, made, index, axis=2)
        return {"ahead": shard(ahead, AHEAD)}, sums

    return Stack(
        PREDICTION,
        depth,
        enter,
        block,
        carried={"ahead": AHEAD},
        shared={"x": STREAM},
        sums=sums,
        tensors=BLOCK_TENSORS,
    )


def further_fields(depth: int, seq_len: int) -> dict[str, tuple[int, Any]]:
    """The arrays of `with_further_targets`: name -> (length, type)."""
    types = {"targets": jnp.int32, "weights": jnp.float32}
    return {f"{name}_{k}": (seq_len, types[name]) for k in range(1, 1 + depth) for name in types}


def with_further_targets(batch: Batch, depth: int) -> Batch:
    """Adds targets and weights of each MTP module to a batch on the host: for module k those k
    positions later, within the same document."""
    seq_len, extras = batch.tokens.shape[1], dict(batch.extras)
    for k in range(1, 1 + depth):
        targets, weights = np.zeros_like(batch.targets), np.zeros_like(batch.weights)
        here, there = slice(0, max(seq_len - k, 0)), slice(k, None)
        same = batch.segments[:, here] == batch.segments[:, there]
        targets[:, here] = np.where(same, batch.targets[:, there], 0)
        weights[:, here] = np.where(same, batch.weights[:, there], 0)
        extras |= {f"targets_{k}": targets, f"weights_{k}": weights}
    return batch._replace(extras=extras)
