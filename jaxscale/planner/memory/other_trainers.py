"""Bytes per device of trainers other than ours, by their published formulas.

State: ZeRO (arXiv 1910.02054). Activations of a layer with dropout and a plain MLP: Korthikanti et
al. (2205.05198), tables 2 and 3, which give their figures to the digit. For our own engine see
`memory.py`, which is exact.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from jaxscale.layout import MESH_AXES
from jaxscale.planner.cost.communication import local_params
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.model.shape import ModelShape

Floats = Any  # a float, or float [N]

COMMUNICATOR_BYTES = 0.35e9
"""The buffers of each group that NCCL joins (0.2 to 0.5 GB are seen)."""

FRAGMENTATION = 0.05
"""Of what a caching allocator holds, that it cannot use at the peak (3 to 8 per cent are seen)."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on the busiest device."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats  # of all layers and micro-batches in flight
    working: Floats  # of the layer at work, or of the head
    gathered: Floats  # whole weights of the layers at work
    buckets: Floats  # that collectives are collected in
    context: Floats  # of the driver and of NCCL
    fragments: Floats  # that the allocator cannot use
    cached: Floats  # held by the allocator and not needed at the peak

    @property
    def needed(self) -> Floats:
        """Without it the run fails."""
        return sum(value for name, value in vars(self).items() if name != "cached")

    @property
    def reserved(self) -> Floats:
        """What tools show to be taken from the device."""
        return self.needed + self.cached

    def read(self, reading: str) -> Floats:
        """Of the "device", what its "allocator" holds of it, or has "allocated" of that."""
        if reading == "device":
            return self.reserved
        if reading == "allocator":
            return self.reserved - self.context
        return self.needed - self.context - self.fragments


def layer_bytes(shape: ModelShape, parallelism: Parallelism, remat: str | None = None) -> Floats:
    """Activations that one layer keeps of a micro-batch.

    >>> gpt = Shape(48, 6144, 64, 64, 96, 24576, False, 51200, True, 2048, biases=True)
    >>> from jaxscale.planner.validation.trainers import MEGATRON_2021
    >>> choice = Choice(tensor=8, microbatch=4, traits=MEGATRON_2021)
    >>> round(48 * layer_bytes(gpt, choice) / 2**30, 2)
    59.25
    """
    traits, remat = parallelism.traits, remat or parallelism.remat
    t = np.asarray(parallelism.tensor, float)
    tokens = np.asarray(parallelism.microbatch, float) * shape.seq_len / parallelism.context
    streams = t if traits.sequence_parallel else np.ones(())
    d = shape.d_model
    # An encoder's layers are counted with the decoder's that they feed.
    source = shape.encoder_seq_len / shape.seq_len
    both = 1 + shape.encoder_layers / shape.layers * source
    if remat == "full" or remat.startswith("offload:"):
        return float_or_array(tokens * both * 2 * d / streams)
    scores = 0.0
    if traits.attention == "written" and remat == "none":
        scores = 5.0 * shape.heads * shape.seq_len / t
    if shape.biases:  # LayerNorm, dropout, GELU
        wide = 8 * d + 4 * shape.d_ff  # 24 d where the MLP is four times as wide
        stream = (10 if traits.dropout else 8) * d  # with the two masks
        return float_or_array(tokens * (stream / streams + wide / t + scores))
    moe = shape.expert_layers / shape.layers
    dense = (shape.with_mlp - shape.expert_layers) / shape.layers
    # Inputs of products in 8 bits, where these are; the activation's own input stays in 16.
    narrow = 2.0 if traits.matmul == "bfloat16" else 1.0
    wide = (4 if shape.gated else 2) + narrow + 2 * (shape.gated and not traits.fused)
    shared = shape.shared_width
    # Of routed tokens the ranks of tensor share the experts' inside, or fold the experts.
    mixed = moe * shape.top_k * parallelism.imbalance
    mlp = wide * (shape.d_ff * dense + shared * moe + shape.expert_ff * mixed)
    routed = mixed * (2 + narrow) * shape.routed_width / (t if traits.folded_experts else 1.0)
    if remat.startswith("save:"):
        mlp = 0.0
    each = (
        (4 + 2 * narrow) * d / streams + (_mixing_bytes(shape) + mlp) / t + routed + scores
    ) * both
    if shape.encoder_layers:  # cross attention: keys and values are the encoder's
        queries = shape.heads * (4 * shape.head_dim + 4)
        keys = 4 * shape.head_dim * shape.kv_heads * source
        each = each + (2 + narrow) * d / streams + (queries + keys) / t
    return float_or_array(tokens * each)


def _mixing_bytes(shape: ModelShape) -> float:
    """What attention keeps of a token in a mean layer (queries, keys, values, the result and its
    sums), or a state-space mixer in its place (what its products, convolution and scan give)."""
    elements = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    if shape.latent:
        rank = shape.latent
        elements = 2 * shape.heads * (rank.nope_dim + rank.rope_dim + rank.value_dim)
        elements += rank.query_rank + rank.kv_rank + rank.rope_dim
    kept = shape.attending * (2 * elements + 4 * shape.heads)
    if shape.mixer:
        inner = shape.mixer.heads * shape.mixer.head_dim
        states = 2 * shape.mixer.groups * shape.mixer.state
        kept += shape.mixer.layers * 2 * (5 * inner + 2 * states)
    return kept / shape.layers


def float_or_array(value: Floats) -> Floats:
    return float(value) if np.ndim(value) == 0 else value


def passes_in_flight(parallelism: Parallelism, stage: Floats = 0) -> Floats:
    """Micro-batches whose activations a rank of the pipeline keeps, in its layers' worth of them.

    One forward, one backward: p - stage. Interleaved, stage 0: p * (1 + (p - 1) / (p v)).
    """
    p, v = np.asarray(parallelism.pipeline, float), np.asarray(parallelism.virtual_stages, float)
    m = np.asarray(parallelism.microbatches, float)
    if parallelism.schedule == "gpipe":
        return m
    deep = np.where(v > 1, ((p - stage - 1) * 2 + (v - 1) * p + 1) / v, p - stage)
    return np.minimum(m, deep)


def published_size(shape: ModelShape, parallelism: Parallelism, name: str) -> float:
    """A part of memory by the name that published tables give it, of the first rank.

    "state" is parameters and optimizer with a 32-bit sum of gradients, "activations" those with
    nothing made again and no sequence parallelism, "selective" with both remedies, and "share"
    the choice's activations over those of tensor parallelism alone.
    """
    plain = replace(parallelism, traits=replace(parallelism.traits, sequence_parallel=False))
    shared = replace(parallelism, traits=replace(parallelism.traits, sequence_parallel=True))
    if name == "state":  # of the layers' matrices alone, as their table counts
        matrices = 4 * shape.d_model * shape.heads * shape.head_dim
        matrices += (3 if shape.gated else 2) * shape.d_model * shape.d_ff
        return 18.0 * shape.layers * matrices / float(parallelism.tensor * parallelism.pipeline)
    if name == "share":
        return float(layer_bytes(shape, parallelism) / layer_bytes(shape, plain, "none"))
    which, remat = {
        "activations": (plain, "none"),
        "selective": (shared, "save_all_but_attention"),
    }[name]
    mine = shape.layers / np.asarray(parallelism.pipeline, float)
    return float(layer_bytes(shape, which, remat) * mine * passes_in_flight(which))


def trainer_memory(
    shape: ModelShape, parallelism: Parallelism, stage: int | None = None
) -> TrainerMemory:
    """What a run of `choice.traits` needs.

    Args:
      stage: a rank of the pipeline; None is the busier of its two ends.
    """
    if stage is not None:
        return _stage(shape, parallelism, stage)
    first = _stage(shape, parallelism, 0)
    if np.all(np.asarray(parallelism.pipeline) == 1):
        return first
    last = _stage(shape, parallelism, np.asarray(parallelism.pipeline) - 1)
    larger = np.asarray(first.needed) >= np.asarray(last.needed)
    return TrainerMemory(
        **{
            one.name: np.where(larger, getattr(first, one.name), getattr(last, one.name))
            for one in fields(TrainerMemory)
        }
    )


def _stage(shape: ModelShape, parallelism: Parallelism, stage: Any) -> TrainerMemory:
    traits, zero = parallelism.traits, np.asarray(parallelism.zero_stage)
    p, z = np.asarray(parallelism.pipeline, float), np.asarray(parallelism.fsdp, float)
    layers, outer = local_params(shape, parallelism)
    is_end = (np.asarray(stage) == 0) | (np.asarray(stage) == p - 1)
    mine = np.ceil((shape.layers + 2 * traits.balanced_ends * (p > 1)) / p)
    mine = mine - traits.balanced_ends * is_end * (p > 1)
    held = layers * mine * p / shape.layers + outer * is_end
    third, trained = zero == 3, 0.0 if traits.frozen else 1.0
    # Sums in 32 bits come beside the 16-bit gradients that they are made of.
    sums = np.where(third, 0.0, 4.0 * (traits.gradient_bytes == 4))
    gradients = np.where(third, 4.0, 2.0 + sums) * held / np.where(zero >= 2, z, 1)
    optimizer = np.where(third, 8.0, 12.0) * held / np.where(zero >= 1, z, 1)
    share = np.asarray(parallelism.remat_share)
    each = share * layer_bytes(shape, parallelism) + (1 - share) * layer_bytes(
        shape, parallelism, "none"
    )
    last = np.asarray(stage) == p - 1
    (layer, logits), (one, head) = (
        _working(shape, parallelism),
        _gathered(shape, parallelism, layers, outer),
    )
    at_head = last & (logits + third * head > layer + third * one)
    # In host memory but for the layer at work and the next.
    resident = np.minimum(2.0, mine) if "activations" in parallelism.offload else mine
    parts = {
        "weights": np.where(third, 4.0 * held / z, 2.0 * held),
        "gradients": trained * gradients,
        "optimizer": trained * optimizer,
        "activations": each * resident * passes_in_flight(parallelism, stage)
        + _boundary(shape, parallelism, stage),
        "working": np.where(at_head, logits, layer) + _widened(shape, parallelism, is_end),
        "gathered": np.where(third, np.where(at_head, head, one), 0.0),
        "buckets": np.asarray(traits.bucket_bytes),
        "context": np.asarray(_context(parallelism)),
    }
    # Gradients in 32 bits for the update alone, of the shard that a device updates.
    update = np.where(third | (sums > 0), 0.0, 4.0 * held / np.where(zero >= 1, z, 1)) * trained
    fragments = FRAGMENTATION * sum(parts.values())
    eager = float(traits.eager)  # a compiled step is laid out before it runs
    return TrainerMemory(**parts, fragments=eager * fragments, cached=eager * update)


def _gathered(shape: ModelShape, parallelism: Parallelism, layers: Floats, outer: Floats) -> tuple:
    """Whole weights while a layer is at work, and while the head is: two layers beside embedding
    and head, which stay through a step; or a module and some parameters more; of a compiled step
    the matrix at work and the next."""
    traits, t = parallelism.traits, np.asarray(parallelism.tensor)
    if traits.eager and not traits.gather_params:
        whole = 2 * 2.0 * layers * np.asarray(parallelism.pipeline) / shape.layers + 2.0 * outer
        return whole, whole
    experts = shape.expert_ff * shape.experts / np.asarray(parallelism.expert)
    widest = np.maximum(max(shape.d_ff, shape.heads * shape.head_dim), experts)
    largest = 2.0 * shape.d_model * widest / t
    if traits.eager:
        return (largest + 2.0 * traits.gather_params,) * 2
    return 2 * largest, 2.0 * outer / (1 if shape.tied else 2)


def _boundary(shape: ModelShape, parallelism: Parallelism, stage: Any) -> Floats:
    """What a stage hands on, kept for each micro-batch in flight."""
    tokens = np.asarray(parallelism.microbatch, float) * shape.seq_len / parallelism.context
    sent = 2.0 * tokens * shape.d_model / parallelism.tensor
    return np.where(
        np.asarray(parallelism.pipeline) > 1, sent * passes_in_flight(parallelism, stage), 0.0
    )


def _context(parallelism: Parallelism) -> Floats:
    if not parallelism.traits.eager:
        return np.zeros(())  # taken before the compiler is told how much there is
    groups = 1 + sum(np.asarray(getattr(parallelism, axis)) > 1 for axis in MESH_AXES)
    return parallelism.traits.context_bytes + COMMUNICATOR_BYTES * groups


LOGIT_BYTES = {"compiled": 2.0, "fused": 4.0, "plain": 10.0}
"""Of a logit while the loss is computed, in 16 bits. A compiler writes its gradient in its place, a
fused kernel beside it, and a plain loss also keeps the logits and their softmax in 32 bits."""


def _working(shape: ModelShape, parallelism: Parallelism) -> tuple:
    """The layer that is made again, with its gradients; and the logits of the head. When the scores
    of attention have a gradient, those of the MLP are gone."""
    layer = layer_bytes(shape, parallelism, "none")
    if parallelism.remat == "full" and parallelism.traits.eager:
        layer = layer + layer_bytes(shape, parallelism, "save_all_but_attention")
    tokens = np.asarray(parallelism.microbatch, float) * shape.seq_len / parallelism.context
    return layer, tokens * shape.vocab / parallelism.tensor * LOGIT_BYTES[parallelism.traits.loss]


def _widened(shape: ModelShape, parallelism: Parallelism, is_end: Any) -> Floats:
    """A gradient on its way into a sum of 32 bits: of the largest matrix at once. No smaller block
    that the allocator holds can take it."""
    if parallelism.traits.gradient_bytes != 4 or not parallelism.traits.eager:
        return np.zeros(())
    inner = shape.d_model * max(shape.d_ff, shape.heads * shape.head_dim)
    largest = np.where(is_end, max(shape.embedding_params, inner), inner)
    return np.where(
        np.asarray(parallelism.zero_stage) == 3, 0.0, 4.0 * largest / parallelism.tensor
    )
