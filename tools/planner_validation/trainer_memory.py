"""Memory per device of other trainers, by published formulas: ZeRO's state (arXiv 1910.02054)."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from jaxscale.config import zero_stage
from jaxscale.config.layout import MESH_AXES
from jaxscale.planner.model.shape import ModelShape
from tools.planner_validation.trainer_activations import trainer_layer_bytes
from tools.planner_validation.trainer_layout import TrainerLayout
from tools.planner_validation.trainer_traffic import trainer_params

Floats = Any  # a float, or float [N]

COMMUNICATOR_BYTES = 0.35e9
"""Buffers per NCCL communicator (0.2 to 0.5 GB are observed)."""

FRAGMENTATION = 0.05
"""Share of a caching allocator's memory lost to fragmentation at the peak (3 to 8 % are
observed)."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on the busiest device."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats  # saved, of all layers and micro-batches in flight
    working: Floats  # temporaries of a layer's backward pass, or of the head
    gathered: Floats  # gathered weights of the current layers
    buckets: Floats  # of bucketed collectives
    context: Floats  # of the driver and of NCCL
    fragments: Floats  # lost to fragmentation
    cached: Floats  # kept by the allocator beyond the peak

    @property
    def needed(self) -> Floats:
        """Bytes without which the run fails."""
        return sum(value for name, value in vars(self).items() if name != "cached")

    @property
    def reserved(self) -> Floats:
        """Bytes that nvidia-smi shows as used."""
        return self.needed + self.cached

    def read(self, reading: str) -> Floats:
        """The figure of a tool: memory used on the "device", reserved by the "allocator", or
        "allocated" of that."""
        if reading == "device":
            return self.reserved
        if reading == "allocator":
            return self.reserved - self.context
        return self.needed - self.context - self.fragments


def passes_in_flight(parallelism: TrainerLayout, stage: Floats = 0) -> Floats:
    """Micro-batches in flight on a pipeline rank, in units of all of its layers.

    1F1B: p - stage. Interleaved, stage 0: p * (1 + (p - 1) / (p v)).
    """
    p, v = np.asarray(parallelism.pipeline, float), np.asarray(parallelism.virtual_stages, float)
    m = np.asarray(parallelism.microbatches, float)
    if parallelism.schedule == "gpipe":
        return m
    deep = np.where(v > 1, ((p - stage - 1) * 2 + (v - 1) * p + 1) / v, p - stage)
    return np.minimum(m, deep)


def published_size(shape: ModelShape, parallelism: TrainerLayout, name: str) -> float:
    """A part of the first rank's memory, by its name in published tables.

    "state": parameters and optimizer with a 32-bit gradient accumulator. "activations": without
    recompute or sequence parallelism; "selective": with selective recompute and sequence
    parallelism. "share": the layout's activations over those of tensor parallelism alone.
    """
    plain = replace(parallelism, traits=replace(parallelism.traits, sequence_parallel=False))
    shared = replace(parallelism, traits=replace(parallelism.traits, sequence_parallel=True))
    if name == "state":  # of the layers' matrices alone, as their table counts
        matrices = 4 * shape.d_model * shape.heads * shape.head_dim
        matrices += (3 if shape.gated else 2) * shape.d_model * shape.d_ff
        return 18.0 * shape.layers * matrices / float(parallelism.tensor * parallelism.pipeline)
    if name == "share":
        return float(
            trainer_layer_bytes(shape, parallelism) / trainer_layer_bytes(shape, plain, "none")
        )
    which, remat = {
        "activations": (plain, "none"),
        "selective": (shared, "save_all_but_attention"),
    }[name]
    mine = shape.layers / np.asarray(parallelism.pipeline, float)
    return float(trainer_layer_bytes(shape, which, remat) * mine * passes_in_flight(which))


def trainer_memory(
    shape: ModelShape, parallelism: TrainerLayout, stage: int | None = None
) -> TrainerMemory:
    """Memory of a run.

    Args:
      stage: a pipeline rank; None is the busier of the first and the last.
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


def _stage(shape: ModelShape, parallelism: TrainerLayout, stage: Any) -> TrainerMemory:
    traits, zero = parallelism.traits, np.asarray(parallelism.zero_stage)
    p, z = np.asarray(parallelism.pipeline, float), np.asarray(parallelism.zero_ranks, float)
    params = trainer_params(shape.work, parallelism)
    layers, outer = params.layers, params.outer
    is_end = (np.asarray(stage) == 0) | (np.asarray(stage) == p - 1)
    mine = np.ceil((shape.layers + 2 * traits.balanced_ends * (p > 1)) / p)
    mine = mine - traits.balanced_ends * is_end * (p > 1)
    held = layers * mine * p / shape.layers + outer * is_end
    state_ranks = np.where(zero_stage.shards_state(zero), z, 1)
    third, trained = zero_stage.gathers_each_pass(zero), 0.0 if traits.frozen else 1.0
    # 32-bit accumulators are allocated in addition to the 16-bit gradients.
    sums = np.where(third, 0.0, 4.0 * (traits.gradient_bytes == 4))
    gradients = np.where(third, 4.0, 2.0 + sums) * held / np.where(zero_stage.scatters(zero), z, 1)
    optimizer = np.where(third, 8.0, 12.0) * held / state_ranks
    share = np.asarray(parallelism.remat_share)
    each = share * trainer_layer_bytes(shape, parallelism) + (1 - share) * trainer_layer_bytes(
        shape, parallelism, "none"
    )
    last = np.asarray(stage) == p - 1
    (layer, logits), (one, head) = (
        _working(shape, parallelism),
        _gathered(shape, parallelism, layers, outer),
    )
    at_head = last & (logits + third * head > layer + third * one)
    # Offloaded except for the current layer and the next.
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
    # 32-bit gradients for the update only, of a device's optimizer shard.
    update = np.where(third | (sums > 0), 0.0, 4.0 * held / state_ranks) * trained
    fragments = FRAGMENTATION * sum(parts.values())
    eager = float(traits.eager)  # compiled steps allocate ahead of time
    return TrainerMemory(**parts, fragments=eager * fragments, cached=eager * update)


def _gathered(
    shape: ModelShape, parallelism: TrainerLayout, layers: Floats, outer: Floats
) -> tuple:
    """Gathered weights during a layer and during the head. Eager FSDP: two layers, and embedding
    and head throughout a step; DeepSpeed: a module and its live parameters; compiled: two
    matrices."""
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


def _boundary(shape: ModelShape, parallelism: TrainerLayout, stage: Any) -> Floats:
    """Outputs of a stage, saved for each micro-batch in flight."""
    tokens = np.asarray(parallelism.microbatch, float) * shape.seq_len / parallelism.context
    sent = 2.0 * tokens * shape.d_model / parallelism.tensor
    return np.where(
        np.asarray(parallelism.pipeline) > 1, sent * passes_in_flight(parallelism, stage), 0.0
    )


def _context(parallelism: TrainerLayout) -> Floats:
    if not parallelism.traits.eager:
        return np.zeros(())  # reserved before the compiler sees the memory
    groups = 1 + sum(np.asarray(getattr(parallelism, axis)) > 1 for axis in MESH_AXES)
    return parallelism.traits.context_bytes + COMMUNICATOR_BYTES * groups


LOGIT_BYTES = {"compiled": 2.0, "fused": 4.0, "plain": 10.0}
"""Bytes per logit during the loss, for 16-bit logits. A compiler writes the gradient in place, a
fused kernel out of place, and a plain loss also saves logits and softmax in 32 bits."""


def _working(shape: ModelShape, parallelism: TrainerLayout) -> tuple:
    """Temporaries of a layer's backward pass with recompute, and the logits of the head. The MLP's
    temporaries are freed before attention scores have gradients."""
    layer = trainer_layer_bytes(shape, parallelism, "none")
    if parallelism.remat == "full" and parallelism.traits.eager:
        layer = layer + trainer_layer_bytes(shape, parallelism, "save_all_but_attention")
    tokens = np.asarray(parallelism.microbatch, float) * shape.seq_len / parallelism.context
    return layer, tokens * shape.vocab / parallelism.tensor * LOGIT_BYTES[parallelism.traits.loss]


def _widened(shape: ModelShape, parallelism: TrainerLayout, is_end: Any) -> Floats:
    """A 32-bit copy of the largest matrix' gradient on its way into the accumulator, for which no
    cached block is large enough."""
    if parallelism.traits.gradient_bytes != 4 or not parallelism.traits.eager:
        return np.zeros(())
    inner = shape.d_model * max(shape.d_ff, shape.heads * shape.head_dim)
    largest = np.where(is_end, max(shape.embedding_params, inner), inner)
    return np.where(
        np.asarray(parallelism.zero_stage) == 3, 0.0, 4.0 * largest / parallelism.tensor
    )
