"""Seconds of communication of a layer and of a step, by mesh axis, before overlap.

Volumes are those of tensor and sequence parallelism (Megatron, arXiv 1909.08053, 2205.05198), of
rows x columns of tensor (AxoNN, 2305.13525), ring
attention (2310.01889), expert all-to-alls (2101.03961), ZeRO (1910.02054) and layered gradient
accumulation (2106.02679). Activations are sent in 16 bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config import zero_stage
from jaxscale.config.layout import SLICED
from jaxscale.planner.cost import collectives
from jaxscale.planner.cost.collectives import Levels
from jaxscale.planner.cost.tensor_volumes import (
    recomputed_features,
    returned_features,
    stream_collectives,
)
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.tables.table_makespan import count_copies
from jaxscale.sharding.model_trace import ModelWork, StackWork

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
    head: Floats = 0.0  # sums over pipeline ranks of a sliced head, both passes


def tensor_traffic(
    work: ModelWork,
    stack: StackWork,
    parallelism: Parallelism,
    levels: dict[str, Levels],
    stream: Floats,
) -> TensorTraffic:
    """Two gathers and two reduce-scatters of the residual stream per pass, before and after
    attention and MLP. With tensor rows, those of a row's features over its columns; and over rows
    all-reduces of the results of matmuls out of the stream, logits included, and of the input
    gradients of matmuls back into it. The stream is gathered again, too (`tensor_volumes`)."""
    share = stream / parallelism.tensor_rows
    once = stack.sent * (2 * collectives.gather_seconds(levels["tensor"], share))
    each = stream / work.width / parallelism.tensor_columns  # a feature of every token

    def over_rows(features: float) -> Floats:
        return collectives.reduce_seconds(levels["tensor_rows"], each * features)

    counts, (made, again) = stream_collectives(parallelism), recomputed_features(stack, parallelism)
    logits = 2 * over_rows(work.vocab) / work.layers  # in 32 bits
    return TensorTraffic(
        forward=once + over_rows(made) + logits,
        input=once + over_rows(returned_features(stack)),
        weights=once * counts.weights / counts.forward,
        recompute=once * counts.recompute / counts.forward + over_rows(again),
    )


def _context(
    stack: StackWork, parallelism: Parallelism, levels: Levels, tokens: Floats
) -> tuple[Floats, Floats]:
    """Keys and values circulate in a ring, or are all-gathered; in the backward pass with their
    gradients. Ulysses exchanges queries, keys, values and outputs, and all of their gradients."""
    c, t = np.asarray(parallelism.context), np.asarray(parallelism.tensor)
    forward = backward = np.zeros(())
    for one in stack.attention:
        width = one.features + one.value_features
        heads = np.maximum(1, one.kv_heads / t)
        if parallelism.context_method == "ulysses":
            keys = np.maximum(one.kv_heads / t, c)  # at least one each
            exchanged = 2.0 * tokens * width * (one.heads / t + keys)
            both = one.share * collectives.exchange_seconds(levels, exchanged)
            forward, backward = forward + both, backward + both
            continue
        # Keys outside a window are not needed, but whole chunks are sent.
        held = 2.0 * tokens * width * heads
        if parallelism.context_method == "ring":
            sent = one.share * (c - 1) * collectives.send_seconds(levels, held)
        else:
            sent = one.share * collectives.gather_seconds(levels, held * c)
        forward, backward = forward + sent, backward + 2 * sent
    return forward, backward


def expert_traffic(
    stack: StackWork, parallelism: Parallelism, levels: Levels, tokens: Floats
) -> Floats:
    """Dispatch and combine: two all-to-alls in each pass; in two levels one between the nodes, of
    a row for each node of a token, and one inside."""
    total, nodes = np.zeros(()), np.asarray(parallelism.expert_nodes, float)
    across, inside = collectives.split_levels(levels, nodes)
    for one in stack.experts:
        row = 2.0 * tokens * parallelism.imbalance * one.width
        found = collectives.exchange_seconds(levels, row * one.choices)
        twice = collectives.exchange_seconds(across, row * parallelism.nodes_of_token(one.choices))
        twice = twice + collectives.exchange_seconds(inside, row * one.choices)
        total = total + 2 * np.where(nodes > 1, twice, found) * one.share
    return total


def layer_traffic(
    work: ModelWork,
    parallelism: Parallelism,
    levels: dict[str, Levels],
    tensor_of: Callable[..., TensorTraffic] = tensor_traffic,
    expert_of: Callable[..., Floats] = expert_traffic,
) -> LayerTraffic:
    """Communication of one micro-batch in an average layer, that of all stacks spread over it; the
    output of an encoder is sent with the decoder's stream.

    Args:
      tensor_of: traffic of a stack over tensor.
      expert_of: its traffic over expert, in either pass.
    """
    tokens = np.asarray(parallelism.microbatch) * work.seq_len / parallelism.context
    zeros = np.zeros(())
    tensor, context, expert = TensorTraffic(*[zeros] * 4), (zeros, zeros), zeros
    for stack in work.stacks:
        own, share = tokens * work.tokens(stack), work.share(stack)
        stream = 2.0 * own * work.width
        sent = tensor_of(work, stack, parallelism, levels, stream)
        tensor = TensorTraffic(*(sum_ + share * one for sum_, one in zip(tensor, sent)))
        held = _context(stack, parallelism, levels["context"], own)
        context = tuple(sum_ + share * one for sum_, one in zip(context, held))
        expert = expert + share * expert_of(stack, parallelism, levels["expert"], own)
    streams = 2.0 * tokens * work.width * (1 + work.source_len / work.seq_len)
    message = _message(parallelism, levels, streams * (1 + work.side))
    head = _sliced_head(parallelism, levels, tokens, work.width)
    if work.side:  # two streams between stages, and no backward pass of the layers
        forward = TensorTraffic(tensor.forward, zeros, zeros, zeros)
        return LayerTraffic(forward, (context[0], zeros), (expert, zeros), message, head)
    return LayerTraffic(tensor, context, (expert, expert), message, head)


def _sliced_head(
    parallelism: Parallelism, levels: dict[str, Levels], tokens: Floats, width: int
) -> Floats:
    """All-reduces of a micro-batch over pipeline ranks, each with a slice of the head: of the last
    stage's output, which one rank has, of its gradients, and for each token of the maximum, the sum
    and the target's logit, in 32 bits."""
    if parallelism.head != SLICED:
        return np.zeros(())
    stream = 2.0 * tokens * width / parallelism.tensor
    sums = (stream, stream, 4.0 * tokens, 8.0 * tokens)
    return sum(collectives.reduce_seconds(levels["pipeline"], size) for size in sums)


def _message(parallelism: Parallelism, levels: dict[str, Levels], stream: Floats) -> Floats:
    """A send from one pipeline rank to the next, split over tensor ranks; with overlapped pairs
    every tick sends two."""
    lanes = _copies(parallelism)[1]
    return collectives.send_seconds(levels["pipeline"], lanes * stream / parallelism.tensor)


def _copies(parallelism: Parallelism) -> tuple[int, int]:
    """Directions and lanes of the schedule, if any layout has a pipeline."""
    piped = np.any(np.asarray(parallelism.pipeline) > 1)
    return count_copies(parallelism.schedule) if piped else (1, 1)


@dataclass(frozen=True)
class StateTraffic:
    """Seconds of collectives over the parameters of all layers of a device, each done once."""

    gather: Floats  # all-gather of the layers' weights, over the axes of ZeRO
    gather_outer: Floats  # the same for embedding and head
    scatter: Floats  # reduce-scatter of gradients, over the axes of ZeRO
    scatter_layers: Floats  # of them, the layers'
    scatter_outer: Floats  # the same for embedding and head
    scatter_embedding: Floats  # for the embedding alone
    scatter_slice: Floats  # for a pipeline rank's slice of the head
    replicas: Floats  # all-reduce of gradient shards, over data
    whole: Floats  # all-reduce of whole gradients, over data and the axes of ZeRO
    update: Floats  # all-gather of updated parameters, over the axes of ZeRO
    # Exchange of tied embedding gradients between first and last pipeline rank; and of weights
    # and gradients with the mirrored rank.
    ends: Floats


class LocalParams(NamedTuple):
    """Parameters of one device."""

    dense: Floats  # of layers, without experts
    experts: Floats  # of layers
    outer: Floats  # of embedding and head

    @property
    def layers(self) -> Floats:
        """Of layers."""
        return self.dense + self.experts

    @property
    def total(self) -> Floats:
        """All of them."""
        return self.layers + self.outer

    def shards(self, parallelism: Parallelism, wanted: Any = True) -> "LocalParams":
        """Where wanted, those of a ZeRO shard. Ranks of expert have other experts already."""
        ranks = np.where(wanted, parallelism.zero_ranks, 1)
        of_experts = np.where(wanted, np.asarray(parallelism.fsdp) * parallelism.context, 1)
        return LocalParams(self.dense / ranks, self.experts / of_experts, self.outer / ranks)


def local_params(work: ModelWork, parallelism: Parallelism) -> LocalParams:
    """Parameters of one device before ZeRO shards them.

    The ends of a pipeline have embedding and head; the busiest device has one of them.
    """
    t, p, x = (
        np.asarray(v) for v in (parallelism.tensor, parallelism.pipeline, parallelism.expert)
    )
    routed = work.routed_params / x / t / p
    dense = (work.block_params - work.routed_params) / t / p
    ends = np.where(
        p > 1,
        max(work.embedding_params, work.embedding_params if work.tied else work.head_params),
        work.embedding_params + work.head_params,
    )
    return LocalParams(dense, routed, ends / t)


def _mirror_seconds(
    params: LocalParams, parallelism: Parallelism, levels: dict[str, Levels]
) -> Floats:
    """With two directions: a permute of weights in 16 bits before the first tick, of shards where
    there are some; and of accumulated gradients in 32 bits after the last."""
    if _copies(parallelism)[0] == 1:
        return np.zeros(())
    zero = parallelism.zero_stage
    weights = params.shards(parallelism, zero_stage.shards_state(zero)).layers
    grads = params.shards(parallelism, zero_stage.scatters(zero)).layers
    return sum(
        collectives.send_seconds(levels["pipeline"], size)
        for size in (2.0 * weights, 4.0 * (not parallelism.frozen) * grads)
    )


def state_traffic(
    work: ModelWork,
    params: LocalParams,
    parallelism: Parallelism,
    levels: dict[str, Levels],
) -> StateTraffic:
    """The state collectives of a step, each done once; with ranks of expert, experts and other
    parameters in separate groups."""
    zero, data = levels["zero"], levels["data"]
    count = np.maximum(1.0, work.layers / np.asarray(parallelism.pipeline))
    width = 0.0 if parallelism.frozen else parallelism.gradient_bytes

    def both(seconds: Callable[[Levels, Floats], Floats], scale: Floats, outer: Floats) -> Floats:
        common, experts = scale * (params.dense + outer), scale * params.experts
        apart = seconds(zero, common) + seconds(levels["zero_experts"], experts)
        together = seconds(zero, scale * (params.layers + outer))
        return np.where(np.asarray(parallelism.expert) > 1, apart, together)

    def gather(scale: Floats, outer: Floats) -> Floats:
        return both(collectives.gather_seconds, scale, outer)

    head = work.embedding_params if work.tied else work.head_params
    # First and last pipeline rank add up the gradients of a tied embedding.
    tied = width * work.embedding_params / parallelism.tensor if work.tied else 0.0
    shards = params.shards(parallelism).total
    return StateTraffic(
        gather=count * gather(2.0 / count, 0.0),
        gather_outer=collectives.gather_seconds(zero, 2.0 * params.outer),
        scatter=count * gather(width / count, params.outer),
        scatter_layers=count * gather(width / count, 0.0),
        scatter_outer=collectives.gather_seconds(zero, width * params.outer),
        scatter_embedding=collectives.gather_seconds(
            zero, width * work.embedding_params / parallelism.tensor
        ),
        scatter_slice=collectives.gather_seconds(
            zero, width * head / (parallelism.tensor * parallelism.pipeline)
        ),
        replicas=collectives.reduce_seconds(data, width * shards),
        whole=both(collectives.reduce_seconds, width, params.outer)
        + collectives.reduce_seconds(data, width * params.total),
        update=gather(2.0, params.outer) + (_copies(parallelism)[0] - 1) * gather(2.0, 0.0),
        ends=collectives.send_seconds(levels["pipeline"], tied)
        + _mirror_seconds(params, parallelism, levels),
    )
