"""The bytes that a step of our engine would need on one device for a model that it cannot train
yet.

State is ZeRO's (arXiv 1910.02054) in float32, spread as the engine spreads it; activations of a
layer are those of `published.layer_bytes` (after arXiv 2205.05198); the slots of a pipeline are
those of its real table. How they come together in a step follows `memory`, which is exact for what
the engine trains; the suite compares the two on dense models.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.layout import by_names
from jaxscale.planner.cost.communication import local_params
from jaxscale.planner.memory.at_rest import BATCH_BYTES
from jaxscale.planner.memory.other_trainers import layer_bytes
from jaxscale.planner.memory.step import CHUNK_BYTES, CHUNK_TOKENS, Memory
from jaxscale.planner.memory.transients import TRANSIENTS
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.model.shape import ModelShape
from jaxscale.planner.tables.pipeline_slots import RankBuffers
from jaxscale.sharding.rules import spreads_outer

Floats = Any  # a float, or float [N]

WIDE, NARROW = 4.0, 2.0
"""Bytes of an element: parameters, moments and sums of gradients; what is computed with."""


@dataclass(frozen=True)
class _Step:
    """How a step goes, as `walk.Walk` has it; parameters are those on a device, whole over fsdp."""

    pipelined: Any
    group: Floats  # micro-batches that walk together
    single: Any  # whether a step visits each layer's gradients once
    gathers: Any
    scatters: Any
    layer: Floats  # parameters of one, the mean of all
    stack: Floats  # of all layers
    head: Floats
    outer: Floats  # of embedding and head
    tokens: Floats  # of a micro-batch
    stream: Floats  # bytes of a micro-batch's residual stream

    @classmethod
    def of(cls, shape: ModelShape, parallelism: Parallelism, rows: Floats) -> "_Step":
        p, t, z = (
            np.asarray(one, float)
            for one in (parallelism.pipeline, parallelism.tensor, parallelism.fsdp)
        )
        m, zero = np.asarray(parallelism.microbatches, float), np.asarray(parallelism.zero_stage)
        group = m if parallelism.accumulation == "layered" else np.ones_like(m)
        single = (p == 1) & (m / group == 1)
        layer = local_params(shape, parallelism)[0] * p / shape.layers
        tokens = np.asarray(parallelism.microbatch, float) * shape.seq_len / parallelism.context
        return cls(
            pipelined=p > 1,
            group=group,
            single=single,
            gathers=(z > 1) & (zero == 3),
            scatters=(z > 1) & ((zero >= 2) | ((zero == 1) & single)),
            layer=layer,
            stack=layer * rows,
            head=(shape.head_params + shape.tied * shape.embedding_params) / t,
            outer=(shape.embedding_params + shape.head_params) / t,
            tokens=tokens,
            stream=NARROW * tokens * shape.d_model / t,
        )


def analytic_memory(
    shape: ModelShape, parallelism: Parallelism, buffers: RankBuffers, back_end: str
) -> Memory:
    """What a step needs.

    Args:
      buffers: layers and slots of a rank; without a pipeline `Held(shape.layers)`.
      back_end: "gpu", "tpu" or "cpu".

    Returns:
      Fields are numbers, or float [N].
    """
    step, transients = _Step.of(shape, parallelism, buffers.rows), TRANSIENTS[back_end, "llama"]
    p, z, zero = (
        np.asarray(parallelism.pipeline),
        np.asarray(parallelism.fsdp),
        np.asarray(parallelism.zero_stage),
    )
    layer, group, stream, pipelined = step.layer, step.group, step.stream, step.pipelined
    together = group > 1
    # At rest what is outside the layers is spread over a pipeline, which at work has a tied head
    # beside the embedding.
    rest = step.stack + step.outer / np.where(spreads_outer(p, z, shape.d_model), p, 1)
    ends = step.outer + pipelined * shape.tied * shape.embedding_params / parallelism.tensor
    moments = 2 * WIDE * rest / np.where(zero >= 1, z, 1)
    kept, whole = layer_bytes(shape, parallelism), layer_bytes(shape, parallelism, "none")
    # Activations of a layer and as many gradients; where products read the stream, it is whole.
    spread = (
        (transients.whole + by_names(parallelism.remat))
        * (np.asarray(parallelism.tensor) - 1)
        * stream
    )
    working = 2 * whole + spread
    chunk = buffers.capacity * layer
    reduces = step.scatters | (step.single & (parallelism.batch_shards * parallelism.context > 1))
    return Memory(
        parameters=WIDE * rest / np.where(zero == 3, z, 1),
        optimizer=moments * ("optimizer" not in parallelism.offload),
        batch=BATCH_BYTES
        * parallelism.microbatches
        * step.tokens
        * (1 + shape.encoder_seq_len / shape.seq_len),
        gradients=WIDE
        * (step.stack + np.where(step.single, 0.0, ends))
        / np.where(step.scatters, z, 1),
        stash=np.where(
            pipelined,
            _slots(buffers, whole if parallelism.remat == "full" else kept),
            buffers.rows * group * kept,
        ),
        layer_weights=NARROW * np.where(step.gathers, np.where(pipelined, chunk, 2 * layer), layer),
        zeros=0,
        outer_gradients=_outer_gradients(step, z, transients.late),
        group=together * (group * (kept + 3 * stream) + 2 * WIDE * layer),
        working_set=working,
        layer_gradients=WIDE * layer * (reduces | pipelined | together)
        + np.where(together, working, 4 * stream),
        forward_loop=together * group * (2 * kept + 5 * stream),
        head=_head(shape, parallelism, step, transients.logits),
        reduction=np.where(
            step.single,
            2 * WIDE * (layer + step.outer) * (reduces & ~step.scatters),
            _sums(shape, parallelism, step, buffers.rows),
        ),
        update=0,
        moments_copy=0,
        host_optimizer=moments,
        host_stash=0,
        messages=np.where(pipelined, (buffers.inbox + buffers.input + 2) * stream, 0.0),
        outer_weights=np.where(pipelined, NARROW * (ends + step.gathers * chunk), 0.0),
        pending=np.where(pipelined & step.scatters, WIDE * chunk * (1 + 1 / z), 0.0),
    )


def _slots(buffers: RankBuffers, each: Floats) -> Floats:
    """What the chunks of a rank keep between operations. B hands on to W no more than a layer
    keeps."""
    slots = np.maximum(buffers.residual_b, buffers.residual_w) + buffers.cotangent
    return buffers.capacity * each * slots


def _outer_gradients(step: _Step, z: Floats, late: bool) -> Floats:
    """Of embedding and head, as `memory` has them."""
    shards = step.head / np.where(step.scatters, z, 1)
    if not late:
        return np.where(step.single, WIDE * shards + NARROW * (step.outer - step.head), 0.0)
    several = np.where(step.pipelined, 0.0, WIDE * step.outer)
    return np.where(step.single, WIDE * (shards + step.head), several)


def _head(shape: ModelShape, parallelism: Parallelism, step: _Step, logits: int) -> Floats:
    """Logits of a chunk, the matrix with its gradient, and the stream as it comes and is normed."""
    size = max(CHUNK_BYTES // (4 * shape.vocab), CHUNK_TOKENS)
    chunks = np.ceil(step.tokens * parallelism.context / size)
    streams = 5 * parallelism.tensor + np.where(step.group > 1, 2 * step.group, 0)
    matrices = (WIDE + step.gathers * NARROW + (step.group > 1) * WIDE) * step.head
    each = logits * WIDE * step.tokens * shape.vocab / parallelism.tensor
    return each / chunks + matrices + streams * step.stream


def _sums(shape: ModelShape, parallelism: Parallelism, step: _Step, rows: Floats) -> Floats:
    """Gradients that are left to sum at the end, as they come out; ranks of expert have those of
    no routed expert in common."""
    z, zero = np.asarray(parallelism.fsdp), np.asarray(parallelism.zero_stage)
    every = (np.asarray(parallelism.data) > 1) | ((z > 1) & (zero <= 1))
    common = (shape.block_params - shape.routed_params) / parallelism.tensor * rows / shape.layers
    common = (common + step.outer) * (np.asarray(parallelism.expert) > 1)
    return WIDE * np.where(every, step.stack + step.outer, common) / np.where(zero >= 1, z, 1)
