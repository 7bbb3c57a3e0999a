"""Seconds of communication of a layer and of a step, by mesh axis, before overlap.

Volumes are those of tensor and sequence parallelism (Megatron, arXiv 1909.08053, 2205.05198), of
rows x columns of tensor (AxoNN, 2305.13525), ring
attention (2310.01889), expert all-to-alls (2101.03961), ZeRO (1910.02054) and layered gradient
accumulation (2106.02679). Activations are sent in 16 bits.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxscale.planner.cost import collectives
from jaxscale.planner.cost.collectives import Levels
from jaxscale.planner.cost.tensor_volumes import recomputed_features, stream_collectives
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.model.shape import ModelShape

Floats = Any  # a float, or float [N]


class TensorTraffic(NamedTuple):
    """Seconds of an average layer and one micro-batch over tensor, by operation."""

    forward: Floats
    input: Floats
    weights: Floats
    recompute: Floats


@dataclass(frozen=True)
class LayerTraffic:
    """Seconds of an average layer and one micro-batch, (forward, backward)."""

    tensor: TensorTraffic
    context: tuple[Floats, Floats]
    expert: tuple[Floats, Floats]
    message: Floats  # a pipeline send, in one direction


def layer_traffic(
    shape: ModelShape, parallelism: Parallelism, levels: dict[str, Levels]
) -> LayerTraffic:
    """The communication of one micro-batch in an average layer; an encoder's layers are spread over
    the decoder's, and its output travels with the decoder's stream."""
    tokens = np.asarray(parallelism.microbatch) * shape.seq_len / parallelism.context
    stream = 2.0 * tokens * shape.d_model
    tensor = _tensor(shape, parallelism, levels, stream)
    sent = stream * (1 + shape.encoder_seq_len / shape.seq_len)
    if shape.encoder_layers:
        share = shape.encoder_layers / shape.layers
        encoder = layer_traffic(shape.encoder, parallelism, levels).tensor
        tensor = TensorTraffic(*(own + share * more for own, more in zip(tensor, encoder)))
    return LayerTraffic(
        tensor=tensor,
        context=_context(shape, parallelism, levels["context"], tokens),
        expert=_expert(shape, parallelism, levels["expert"], stream),
        message=_message(parallelism, levels, sent),
    )


def _tensor(
    shape: ModelShape, parallelism: Parallelism, levels: dict[str, Levels], stream: Floats
) -> TensorTraffic:
    """Two all-reduces of the residual stream per pass; with sequence parallelism each of them is a
    reduce-scatter, and an all-gather before the next matmul. Where tensor has rows, those of a
    row's features over its columns; and over rows all-reduces of the results of matmuls out of the
    stream, logits included, and of the gradients of what matmuls back into it take. In our layers
    the stream is gathered again, too (`tensor_volumes`); others repeat a forward pass that they
    recompute."""
    blocks = shape.attending / shape.layers + shape.with_mlp / shape.layers
    if parallelism.traits.folded_experts:  # experts are not split: no all-reduce
        blocks = blocks - shape.expert_layers / shape.layers * (shape.shared_experts == 0)
    if shape.mixer:
        blocks = blocks + shape.mixer.layers / shape.layers
    if shape.encoder_layers:
        blocks = blocks + 1  # cross attention
    share = stream / parallelism.tensor_rows
    if parallelism.traits.sequence_parallel:
        one = 2 * collectives.gather_seconds(levels["tensor"], share)
    else:
        one = collectives.reduce_seconds(levels["tensor"], share)
    once = blocks * one
    if not parallelism.traits.own_engine:
        full = parallelism.remat_share if parallelism.remat == "full" else 0.0
        return TensorTraffic(once, once, 0.0 * once, full * once)
    results, gradients, logits = _over_rows(shape, parallelism, levels["tensor_rows"], stream)
    counts, (made, again) = stream_collectives(parallelism), recomputed_features(shape, parallelism)
    return TensorTraffic(
        forward=once + results + logits,
        input=once + gradients,
        weights=once * counts.weights / counts.forward,
        recompute=once * counts.recompute / counts.forward + results * again / max(made, 1),
    )


def _over_rows(
    shape: ModelShape, parallelism: Parallelism, levels: Levels, stream: Floats
) -> tuple[Floats, Floats, Floats]:
    """All-reduces over rows of an average layer: of results, of gradients, and of its share of the
    logits."""
    each = stream / shape.d_model / parallelism.tensor_columns  # a feature of every token

    def seconds(features: float) -> Floats:
        return collectives.reduce_seconds(levels, each * features)

    attention = shape.attending / shape.layers
    mlp = shape.with_mlp / shape.layers
    queries, keys = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    results = attention * seconds(queries + keys) + mlp * seconds((1 + shape.gated) * shape.d_ff)
    gradients = attention * seconds(queries) + mlp * seconds(shape.d_ff)
    return results, gradients, 2 * seconds(shape.vocab) / shape.layers  # logits in 32 bits


def _context(shape: ModelShape, parallelism: Parallelism, levels: Levels, tokens: Floats) -> tuple:
    """Keys and values go round the ring, or are all-gathered; in the backward pass with their
    gradients. Or queries, keys, values and outputs are exchanged, and all of their gradients."""
    c, t = np.asarray(parallelism.context), np.asarray(parallelism.tensor)
    if shape.latent:
        width = shape.heads / t * (2 * shape.latent.nope_dim)
    else:
        width = 2 * shape.head_dim * np.maximum(1, shape.kv_heads / t)
    share = shape.attending / shape.layers
    if parallelism.context_method == "ulysses":
        heads = 2 * (shape.heads / t + np.maximum(shape.kv_heads / t, c))  # keys: at least one each
        both = collectives.exchange_seconds(levels, 2.0 * tokens * shape.head_dim * heads)
        return share * both, share * both
    # Keys outside a window are not needed, but whole chunks are sent.
    held = 2.0 * tokens * width
    if parallelism.context_method == "ring":
        forward = (c - 1) * collectives.send_seconds(levels, held)
    else:
        forward = collectives.gather_seconds(levels, held * c)
    return share * forward, 2 * share * forward


def _expert(shape: ModelShape, parallelism: Parallelism, levels: Levels, stream: Floats) -> tuple:
    """Dispatch and combine: two all-to-alls in each pass."""
    if not shape.expert_layers:
        return 0.0, 0.0
    held = stream * shape.top_k * parallelism.imbalance * shape.routed_width / shape.d_model
    if parallelism.traits.folded_experts:
        held = held / parallelism.tensor
    merged = shape.top_k if parallelism.traits.merged_dispatch else 0
    one = 2 * collectives.exchange_seconds(levels, held, merged=merged)
    one = one * shape.expert_layers / shape.layers
    return one, one


def _message(parallelism: Parallelism, levels: dict[str, Levels], stream: Floats) -> Floats:
    """A send from one pipeline rank to the next."""
    scattered = parallelism.tensor if parallelism.traits.scattered_messages else 1
    return collectives.send_seconds(levels["pipeline"], stream / scattered)


@dataclass(frozen=True)
class StateTraffic:
    """Seconds of collectives over the parameters of all layers of a device, each done once."""

    gather: Floats  # all-gather of the layers' weights, over fsdp and context
    gather_outer: Floats  # the same for embedding and head
    scatter: Floats  # reduce-scatter of gradients, over fsdp and context
    scatter_layers: Floats  # of them, the layers'
    scatter_outer: Floats  # the same for embedding and head
    replicas: Floats  # all-reduce of gradient shards, over data
    whole: Floats  # all-reduce of whole gradients, over data, fsdp and context
    update: Floats  # all-gather of updated parameters, over fsdp and context
    ends: Floats  # exchange of tied embedding gradients between first and last pipeline rank


def local_params(shape: ModelShape, parallelism: Parallelism) -> tuple[Floats, Floats]:
    """Parameters of one device before ZeRO shards them: of layers, and of embedding and head.

    The ends of a pipeline hold embedding and head; the busiest device has one of them.
    """
    t, p, x = (
        np.asarray(v) for v in (parallelism.tensor, parallelism.pipeline, parallelism.expert)
    )
    wide = shape.experts and not parallelism.traits.folded_experts
    routed = shape.routed_params / x / (t if wide else 1)
    layers = ((shape.block_params - shape.routed_params) / t + routed) / p
    ends = np.where(
        p > 1,
        max(shape.embedding_params, shape.embedding_params if shape.tied else shape.head_params),
        shape.embedding_params + shape.head_params,
    )
    return layers, ends / t


def state_traffic(
    shape: ModelShape, parallelism: Parallelism, levels: dict[str, Levels]
) -> StateTraffic:
    """The state collectives of a step, each done once."""
    layers, outer = local_params(shape, parallelism)
    held, zero, data = layers + outer, levels["zero"], levels["data"]
    count = np.maximum(1.0, shape.layers / np.asarray(parallelism.pipeline))
    width = 0.0 if parallelism.traits.frozen else parallelism.traits.gradient_bytes
    ranks = collectives.group_size(zero)
    both = collectives.reduce_seconds(zero, width * held) + collectives.reduce_seconds(
        data, width * held
    )
    # Expert ranks with their own tokens replicate everything but the routed experts.
    own = not parallelism.traits.folded_experts
    t, p, x = (
        np.asarray(v) for v in (parallelism.tensor, parallelism.pipeline, parallelism.expert)
    )
    common = width * own * (held - shape.routed_params / (x * t * p))
    # First and last pipeline rank add up the gradients of a tied embedding.
    tied = width * shape.embedding_params / parallelism.tensor if shape.tied else 0.0
    ends = collectives.send_seconds(levels["pipeline"], tied)
    return StateTraffic(
        gather=count * collectives.gather_seconds(zero, 2.0 * layers / count),
        gather_outer=collectives.gather_seconds(zero, 2.0 * outer),
        scatter=count * collectives.gather_seconds(zero, width * held / count),
        scatter_layers=count * collectives.gather_seconds(zero, width * layers / count),
        scatter_outer=collectives.gather_seconds(zero, width * outer),
        replicas=collectives.reduce_seconds(data, width * held / ranks)
        + collectives.reduce_seconds(levels["expert"], common / ranks),
        whole=both + collectives.reduce_seconds(levels["expert"], common),
        update=collectives.gather_seconds(zero, 2.0 * held),
        ends=ends,
    )
