"""The bytes that a step of our engine would need on one device for a model that it cannot train
yet.

State is ZeRO's (arXiv 1910.02054) in float32, spread as the engine spreads it; activations of a
layer are those of `published.layer_bytes` (after arXiv 2205.05198); the slots of a pipeline are
those of its real table. How they come together in a step follows `memory`, which is exact for what
the engine trains; the suite compares the two on dense models.
"""

from typing import Any

import numpy as np

from jaxscale.planner.choice import Choice
from jaxscale.planner.held import Held
from jaxscale.planner.memory import CHUNK_BYTES, CHUNK_TOKENS, Memory
from jaxscale.planner.published import layer_bytes
from jaxscale.planner.shape import Shape
from jaxscale.planner.state import BATCH_BYTES
from jaxscale.planner.traffic import local_params
from jaxscale.planner.transients import TRANSIENTS
from jaxscale.rules import spreads_outer

Floats = Any  # a float, or float [N]

WIDE, NARROW = 4.0, 2.0
"""Bytes of an element: parameters, moments and sums of gradients; what is computed with."""


def memory(shape: Shape, choice: Choice, held: Held, back_end: str) -> Memory:
    """What a step needs.

    Args:
      held: layers and slots of a rank; without a pipeline `Held(shape.layers)`.
      back_end: "gpu", "tpu" or "cpu".

    Returns:
      Fields are numbers, or float [N].
    """
    p, t, z = (np.asarray(one, float) for one in (choice.pipeline, choice.tensor, choice.fsdp))
    m, zero = np.asarray(choice.microbatches, float), np.asarray(choice.zero_stage)
    pipelined, layered = p > 1, choice.accumulation == "layered"
    group = m if layered else np.ones_like(m)
    single = ~pipelined & (m / group == 1)
    transients = TRANSIENTS[back_end, "llama"]
    # Parameters on a device, whole over fsdp; the mean layer stands for each.
    layer = local_params(shape, choice)[0] * p / shape.layers
    stack = layer * held.rows
    head = (shape.head_params + shape.tied * shape.embedding_params) / t
    outer = (shape.embedding_params + shape.head_params) / t
    at_rest = stack + outer / np.where(spreads_outer(p, z, shape.d_model), p, 1)
    replicas = np.asarray(choice.batch_shards) * choice.context > 1
    gathers = (z > 1) & (zero == 3)
    scatters = (z > 1) & ((zero >= 2) | ((zero == 1) & single))
    reduces = scatters | (single & replicas)
    shard = np.where(scatters, z, 1)
    # Activations of a micro-batch.
    tokens = np.asarray(choice.microbatch, float) * shape.seq_len / choice.context
    stream = NARROW * tokens * shape.d_model / t
    kept, whole = layer_bytes(shape, choice), layer_bytes(shape, choice, "none")
    # Of the sequence, whole where products read it.
    spread = transients.whole * (t - 1) * stream
    # Activations of a layer, and as many gradients.
    working = 2 * whole + spread
    together = group > 1
    stash, messages = _slots(held, choice, kept, whole, stream)
    stash = np.where(pipelined, stash, held.rows * group * kept)
    moments = 2 * WIDE * at_rest / np.where(zero >= 1, z, 1)
    left = (np.asarray(choice.data) * choice.expert > 1) | ((z > 1) & (zero <= 1))
    sums = WIDE * (stack + outer) / np.where(zero >= 1, z, 1)
    waits = choice.offload != "none" and "activations" in choice.offload
    chunk = held.capacity * layer
    return Memory(
        parameters=WIDE * at_rest / np.where(zero == 3, z, 1),
        optimizer=moments * ("optimizer" not in choice.offload),
        batch=BATCH_BYTES * m * tokens * (1 + shape.encoder_seq_len / shape.seq_len),
        gradients=WIDE * (stack + np.where(single, 0.0, outer)) / shard,
        stash=stash * (not waits),
        layer_weights=NARROW * layer * np.where(gathers, np.where(pipelined, held.capacity, 2), 1),
        zeros=0,
        outer_gradients=_outer_gradients(head, outer, shard, single, pipelined, transients.late),
        group=together * (group * (kept + 3 * stream) + 2 * WIDE * layer),
        working_set=working,
        layer_gradients=WIDE * layer * (reduces | pipelined | together)
        + np.where(together, working, 4 * stream),
        forward_loop=together * group * (2 * kept + 5 * stream),
        head=_head(shape, choice, tokens, stream, head, gathers, transients.logits)
        + together * (WIDE * head + 2 * group * stream),
        reduction=np.where(
            single, 2 * WIDE * (layer + outer) * (reduces & ~scatters), sums * left
        ),
        update=0,
        moments_copy=0,
        host_optimizer=moments,
        host_stash=stash * waits,
        messages=messages,
        outer_weights=np.where(pipelined, NARROW * (outer + gathers * chunk), 0.0),
        pending=np.where(pipelined & scatters, WIDE * chunk * (1 + 1 / z), 0.0),
    )  # fmt: skip


def _slots(held: Held, choice: Choice, kept: Floats, whole: Floats, stream: Floats) -> tuple:
    """What the chunks of a rank keep between operations, and what is under way. B hands on to W no
    more than a layer keeps."""
    each = whole if choice.remat == "full" else kept
    residuals = np.maximum(held.residual_b, held.residual_w)
    return (
        held.capacity * each * (residuals + held.cotangent),
        np.where(np.asarray(choice.pipeline) > 1, (held.inbox + held.input + 2) * stream, 0.0),
    )


def _outer_gradients(head, outer, shard, single, pipelined, late: bool) -> Floats:
    """Of embedding and head, as `memory` has them."""
    embed = outer - head
    if not late:
        return np.where(single, WIDE * head / shard + NARROW * embed, 0.0)
    several = np.where(pipelined, 0.0, WIDE * outer)
    return np.where(single, WIDE * (head / shard + head), several)


def _head(shape, choice, tokens, stream, head, gathers, logits: int) -> Floats:
    """Logits of a chunk, the matrix with its gradient, and the stream as it comes and is normed."""
    size = max(CHUNK_BYTES // (4 * shape.vocab), CHUNK_TOKENS)
    chunks = np.ceil(tokens * choice.context / size)
    t = np.asarray(choice.tensor, float)
    return (
        logits * WIDE * tokens * shape.vocab / chunks / t
        + (WIDE + gathers * NARROW) * head
        + 5 * stream * t
    )
