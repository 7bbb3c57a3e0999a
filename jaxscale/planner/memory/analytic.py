"""Memory per device of our engine, for a model given by its sizes alone.

State follows ZeRO (arXiv 1910.02054) in float32, sharded as in the engine. Activations of a layer
are counted by `layer_activations` (after arXiv 2205.05198), pipeline slots from the schedule's
table. The phases of a step are the same as in `memory.step`, which reads the sizes of a config's
layers; the suite compares the two on dense models.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.config import zero_stage
from jaxscale.config.remat_policy import parse_remat
from jaxscale.ops.sizes import loss_chunk_tokens
from jaxscale.planner.cost.communication import local_params
from jaxscale.planner.memory.at_rest import BATCH_BYTES
from jaxscale.planner.memory.layer_activations import layer_bytes
from jaxscale.planner.memory.terms import Memory
from jaxscale.planner.memory.transients import TRANSIENTS, Transients
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.model.shape import ModelShape
from jaxscale.planner.tables.pipeline_slots import RankBuffers
from jaxscale.sharding.rules import spreads_outer

Floats = Any  # a float, or float [N]

WIDE, NARROW = 4.0, 2.0
"""Bytes per element: parameters, moments and gradient accumulators; compute."""


@dataclass(frozen=True)
class _Step:
    """Sizes as in `layer_loop.LayerLoop`; parameters are per device, not sharded by ZeRO."""

    pipelined: Any
    group: Floats  # micro-batches of an accumulation group
    single: Any  # whether a step computes each layer's gradients once
    gathers: Any
    scatters: Any
    layer: Floats  # parameters of an average layer
    layer_shard: Floats  # those of a ZeRO shard of it
    stack: Floats  # parameters of all layers
    stack_shard: Floats
    head: Floats
    outer: Floats  # parameters of embedding and head
    accumulated: Floats  # of them, those of a rank's gradient accumulators
    tokens: Floats  # of a micro-batch
    stream: Floats  # bytes of a micro-batch's residual stream

    @classmethod
    def of(cls, shape: ModelShape, parallelism: Parallelism, rows: Floats) -> "_Step":
        p, t, z = (
            np.asarray(one, float)
            for one in (parallelism.pipeline, parallelism.tensor, parallelism.zero_ranks)
        )
        m, zero = np.asarray(parallelism.microbatches, float), np.asarray(parallelism.zero_stage)
        group = m if parallelism.accumulation == "layered" else np.ones_like(m)
        single = (p == 1) & (m / group == 1)
        params = local_params(shape.work, parallelism)
        whole, shard = (
            one.layers * p / shape.layers for one in (params, params.shards(parallelism))
        )
        tokens = np.asarray(parallelism.microbatch, float) * shape.seq_len / parallelism.context
        embedding, outer = shape.embedding_params / t, shape.embedding_params + shape.head_params
        head = (shape.head_params + shape.tied * shape.embedding_params) / t
        head = head / parallelism.head_ranks
        return cls(
            pipelined=p > 1,
            group=group,
            single=single,
            gathers=(z > 1) & zero_stage.gathers_each_pass(zero),
            scatters=(z > 1) & zero_stage.leaves_shards(zero, single),
            layer=whole,
            layer_shard=shard,
            stack=whole * rows,
            stack_shard=shard * rows,
            head=head,
            outer=outer / t,
            accumulated=np.where(p > 1, embedding + head, outer / t),
            tokens=tokens,
            stream=NARROW * tokens * shape.d_model / t,
        )


def analytic_memory(
    shape: ModelShape, parallelism: Parallelism, buffers: RankBuffers, back_end: str
) -> Memory:
    """Memory of a step.

    Args:
      buffers: of the busiest pipeline rank; without a pipeline `RankBuffers((shape.layers,))`.
      back_end: "gpu", "tpu" or "cpu".

    Returns:
      Fields are numbers, or float [N].
    """
    (rows,), (capacity,) = buffers.rows, buffers.capacity or (0,)
    step, transients = _Step.of(shape, parallelism, rows), TRANSIENTS[back_end, "llama"]
    p, z, zero = (
        np.asarray(parallelism.pipeline),
        np.asarray(parallelism.zero_ranks),
        np.asarray(parallelism.zero_stage),
    )
    shards = zero_stage.shards_state(zero)
    layer, group, stream, pipelined = step.layer, step.group, step.stream, step.pipelined
    together = group > 1
    # Between steps embedding and head are sharded over the pipeline; during a step a tied head is a
    # second copy of the embedding.
    outer = step.outer / np.where(spreads_outer(p, z, shape.d_model), p, 1)
    rest = np.where(shards, step.stack_shard + outer / z, step.stack + outer)
    ends = step.accumulated
    moments = 2 * WIDE * rest
    kept, whole = layer_bytes(shape, parallelism), layer_bytes(shape, parallelism, "none")
    # Activations of a layer and as many gradients; matmuls read the stream gathered over tensor.
    spread = (
        (transients.whole + parse_remat(parallelism.remat).by_names)
        * (np.asarray(parallelism.tensor) - 1)
        * stream
    )
    working = 2 * whole + spread
    chunk = capacity * layer
    by_layer = parallelism.pipeline_gather == "layer"
    held = layer if by_layer else chunk
    next_chunk = chunk * (not by_layer) * (np.asarray(buffers.chunks) > 1)
    reduces = step.scatters | (~pipelined & (parallelism.batch_shards * parallelism.context > 1))
    summed = np.where(step.single, 0.0, ends)
    gradients = WIDE * np.where(step.scatters, step.stack_shard + summed / z, step.stack + summed)
    late = (z > 1) & zero_stage.scatters_last(zero) & ~step.scatters & ~pipelined
    keeps, lanes = (z > 1) & zero_stage.keeps(zero), np.asarray(buffers.lanes)
    in_place = transients.in_place
    return Memory(
        parameters=WIDE * rest,
        optimizer=moments * ("optimizer" not in parallelism.offload),
        batch=BATCH_BYTES
        * parallelism.microbatches
        * step.tokens
        * (1 + shape.encoder_seq_len / shape.seq_len),
        gradients=gradients,
        stash=np.where(
            pipelined,
            capacity * _slots(buffers, whole if parallelism.remat == "full" else kept),
            rows * group * kept,
        ),
        layer_weights=NARROW
        * np.where(step.gathers, np.where(pipelined, lanes * held, 2 * layer), layer),
        outer_gradients=_outer_gradients(step, z, transients.late),
        group=together * (group * (kept + 3 * stream) + 2 * WIDE * layer),
        working_set=working,
        layer_gradients=WIDE * layer * (reduces | pipelined | together)
        + np.where(together, working, 4 * stream),
        forward_loop=together * group * (2 * kept + 5 * stream),
        head=_head(shape, parallelism, step, transients),
        head_sums=np.where(step.single & in_place, 0.0, gradients),
        end=np.where(
            pipelined,
            _sums(parallelism, step),
            2 * WIDE * (layer + step.outer) * (reduces & np.logical_not(shards)),
        ),
        host_optimizer=moments * ("optimizer" in parallelism.offload),
        messages=np.where(pipelined, (buffers.inbox + buffers.input + 2 * lanes) * stream, 0.0),
        paired_forward=(lanes - 1) * kept,
        **_mirrored(step, buffers, keeps),
        reduced_gradients=late * WIDE * step.stack_shard,
        kept_weights=NARROW * keeps * (step.stack + np.where(pipelined, 0.0, step.outer)),
        outer_weights=np.where(pipelined, NARROW * (ends + step.gathers * next_chunk), 0.0),
        pending=np.where(
            pipelined & step.scatters & (not by_layer),
            WIDE * (chunk + next_chunk * step.layer_shard / layer),
            0.0,
        ),
    )


def _mirrored(step: _Step, buffers: RankBuffers, keeps: Floats) -> dict[str, Floats]:
    """Weights and gradients of two directions, as in `memory.step`."""
    directions = np.asarray(buffers.directions)
    whole, shards = step.stack, step.stack_shard
    both = np.where(keeps, whole, 2 * np.where(step.gathers, shards, whole))
    return {
        "mirrored_weights": NARROW * (directions > 1) * both,
        "mirrored_gradients": WIDE * (directions - 1) * np.where(step.scatters, shards, whole),
    }


def _slots(buffers: RankBuffers, each: Floats) -> Floats:
    """Saved activations of a rank per layer of a chunk. B passes to W at most what a layer
    saves."""
    return each * (np.maximum(buffers.residual_b, buffers.residual_w) + buffers.cotangent)


def _outer_gradients(step: _Step, z: Floats, late: bool) -> Floats:
    """Gradients of embedding and head, as in `memory.step`."""
    shards = step.head / np.where(step.scatters, z, 1)
    if not late:
        return np.where(step.single, WIDE * shards + NARROW * (step.outer - step.head), 0.0)
    several = np.where(step.pipelined, 0.0, WIDE * step.outer)
    return np.where(step.single, WIDE * (shards + step.head), several)


def _head(
    shape: ModelShape, parallelism: Parallelism, step: _Step, transients: Transients
) -> Floats:
    """Logits of a chunk, the output matrix with its gradient, and the stream before and after the
    norm."""
    logits = 1.5 if transients.in_place else transients.logits  # float32 arrays
    features = shape.d_model if transients.in_place else 0
    context = np.asarray(parallelism.context)
    ranks = np.asarray(parallelism.tensor) * parallelism.head_ranks * context
    vocab = np.ceil(shape.vocab / ranks)
    chunks = np.ceil(step.tokens / np.maximum(loss_chunk_tokens(vocab, features) // context, 1))
    streams = 5 * parallelism.tensor + np.where(step.group > 1, 2 * step.group, 0)
    matrices = (WIDE / context + step.gathers * NARROW + (step.group > 1) * WIDE) * step.head
    each = logits * WIDE * step.tokens * context * vocab
    return each / chunks + matrices + streams * step.stream


def _sums(parallelism: Parallelism, step: _Step) -> Floats:
    """Outputs of the gradient reductions at the end of a step."""
    z, zero = np.asarray(parallelism.zero_ranks), np.asarray(parallelism.zero_stage)
    every = zero_stage.remains(zero, z, np.asarray(parallelism.data))
    shards = zero_stage.shards_state(zero)
    left = np.where(shards, step.stack_shard + step.outer / z, step.stack + step.outer)
    return WIDE * every * left
