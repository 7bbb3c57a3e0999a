"""Seconds of communication of a layer and of a step, by mesh axis, before anything is hidden.

Volumes follow b.5 of the usual accounts: Megatron's tensor and sequence parallelism (arXiv
1909.08053, 2205.05198), ring attention (2310.01889), expert all-to-alls (2101.03961), ZeRO
(1910.02054) and layered accumulation (2106.02679). Activations travel in 16 bits.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.planner.cost import collectives
from jaxscale.planner.cost.collectives import Levels
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.model.shape import ModelShape

Floats = Any  # a float, or float [N]


@dataclass(frozen=True)
class LayerTraffic:
    """Of a mean layer and one micro-batch, (forward, backward)."""

    tensor: tuple[Floats, Floats]
    context: tuple[Floats, Floats]
    expert: tuple[Floats, Floats]
    message: Floats  # of the pipeline, one way


def layer_traffic(
    shape: ModelShape, parallelism: Parallelism, levels: dict[str, Levels]
) -> LayerTraffic:
    """What a micro-batch sends while it passes a layer."""
    tokens = np.asarray(parallelism.microbatch) * shape.seq_len / parallelism.context
    stream = 2.0 * tokens * shape.d_model
    return LayerTraffic(
        tensor=_tensor(shape, parallelism, levels["tensor"], stream),
        context=_context(shape, parallelism, levels["context"], tokens),
        expert=_expert(shape, parallelism, levels["expert"], stream),
        message=_message(parallelism, levels, stream),
    )


def _tensor(shape: ModelShape, parallelism: Parallelism, levels: Levels, stream: Floats) -> tuple:
    """Two sums of the residual stream a pass; with sequence parallelism each is a reduce-scatter,
    and a gather before the next product."""
    blocks = shape.attending / shape.layers + shape.with_mlp / shape.layers
    if parallelism.traits.folded_experts:  # whole experts need no sum
        blocks = blocks - shape.expert_layers / shape.layers * (shape.shared_experts == 0)
    if shape.mixer:
        blocks = blocks + shape.mixer.layers / shape.layers
    if shape.encoder_layers:
        blocks = (
            blocks
            + 1
            + 2 * shape.encoder_layers / shape.layers * (shape.encoder_seq_len / shape.seq_len)
        )
    if parallelism.traits.sequence_parallel:
        one = 2 * collectives.gather_seconds(levels, stream)
    else:
        one = collectives.reduce_seconds(levels, stream)
    return blocks * one, blocks * one


def _context(shape: ModelShape, parallelism: Parallelism, levels: Levels, tokens: Floats) -> tuple:
    """Keys and values go round; their gradients come with them on the way back."""
    c, t = np.asarray(parallelism.context), np.asarray(parallelism.tensor)
    if shape.latent:
        width = shape.heads / t * (2 * shape.latent.nope_dim)
    else:
        width = 2 * shape.head_dim * np.maximum(1, shape.kv_heads / t)
    share = shape.attending / shape.layers
    # Of keys outside a window nothing is needed, but whole pieces travel.
    held = 2.0 * tokens * width
    if parallelism.context_method == "ring":
        forward = (c - 1) * collectives.send_seconds(levels, held)
    else:
        forward = collectives.gather_seconds(levels, held * c)
    return share * forward, 2 * share * forward


def _expert(shape: ModelShape, parallelism: Parallelism, levels: Levels, stream: Floats) -> tuple:
    """Tokens go to their experts and back, in each pass."""
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
    """From one rank of the pipeline to the next."""
    scattered = parallelism.tensor if parallelism.traits.scattered_messages else 1
    return collectives.send_seconds(levels["pipeline"], stream / scattered)


@dataclass(frozen=True)
class StateTraffic:
    """Collectives over the parameters that one device holds of all its layers, once each."""

    gather: Floats  # whole weights of the layers, over fsdp
    gather_outer: Floats  # of embedding and head
    scatter: Floats  # gradients, over fsdp
    replicas: Floats  # of gradient shards, over data
    whole: Floats  # gradients that are not scattered, over data and fsdp
    update: Floats  # parameters after the update, over fsdp
    ends: Floats  # gradients of a tied table, between the first and the last rank of a pipeline


def local_params(shape: ModelShape, parallelism: Parallelism) -> tuple[Floats, Floats]:
    """Parameters that one device holds before ZeRO divides them: of layers, and of the outside.

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
    """Gathers and reductions of a step, each done once."""
    layers, outer = local_params(shape, parallelism)
    held, fsdp, data = layers + outer, levels["fsdp"], levels["data"]
    count = np.maximum(1.0, shape.layers / np.asarray(parallelism.pipeline))
    width = 0.0 if parallelism.traits.frozen else parallelism.traits.gradient_bytes
    ranks = collectives.group_size(fsdp)
    both = collectives.reduce_seconds(fsdp, width * held) + collectives.reduce_seconds(
        data, width * held
    )
    # Where the ranks of expert have tokens of their own they share all but the routed experts.
    own = not parallelism.traits.folded_experts
    t, p, x = (
        np.asarray(v) for v in (parallelism.tensor, parallelism.pipeline, parallelism.expert)
    )
    common = width * own * (held - shape.routed_params / (x * t * p))
    # The ends of a pipeline add up their gradients of a table that both have.
    tied = width * shape.embedding_params / parallelism.tensor if shape.tied else 0.0
    ends = collectives.send_seconds(levels["pipeline"], tied)
    return StateTraffic(
        gather=count * collectives.gather_seconds(fsdp, 2.0 * layers / count),
        gather_outer=collectives.gather_seconds(fsdp, 2.0 * outer),
        scatter=count * collectives.gather_seconds(fsdp, width * held / count),
        replicas=collectives.reduce_seconds(data, width * held / ranks)
        + collectives.reduce_seconds(levels["expert"], common / ranks),
        whole=both + collectives.reduce_seconds(levels["expert"], common),
        update=collectives.gather_seconds(fsdp, 2.0 * held),
        ends=ends,
    )
