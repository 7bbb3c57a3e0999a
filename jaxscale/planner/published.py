"""Bytes per device of trainers other than ours, by their published formulas.

State: ZeRO (arXiv 1910.02054). Activations of a layer with dropout and a plain MLP: Korthikanti et
al. (2205.05198), tables 2 and 3, which give their figures to the digit. For our own engine see
`memory.py`, which is exact.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxscale.planner.choice import Choice
from jaxscale.planner.shape import Shape
from jaxscale.planner.traffic import local_params

Floats = Any  # a float, or float [N]

CONTEXT_BYTES = 1.5e9
"""Of a GPU that its context and the communicators of NCCL take (1 to 3 GB are seen)."""

FRAGMENTATION = 0.04
"""Of what an allocator holds, that it cannot use (3 to 8 per cent are seen)."""


@dataclass(frozen=True)
class Published:
    """Bytes on the busiest device."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats  # of all layers and micro-batches in flight
    working: Floats  # of the layer at work, or of the head
    gathered: Floats  # whole weights of the layers at work
    overhead: Floats

    @property
    def peak(self) -> Floats:
        return sum(vars(self).values())


def layer_bytes(shape: Shape, choice: Choice, remat: str | None = None) -> Floats:
    """Activations that one layer keeps of a micro-batch.

    >>> gpt = Shape(48, 6144, 64, 64, 96, 24576, False, 51200, True, 2048, biases=True)
    >>> from jaxscale.planner.software import MEGATRON_2021
    >>> choice = Choice(tensor=8, microbatch=4, traits=MEGATRON_2021)
    >>> round(48 * layer_bytes(gpt, choice) / 2**30, 2)
    59.25
    """
    traits, remat = choice.traits, remat or choice.remat
    t = np.asarray(choice.tensor, float)
    tokens = np.asarray(choice.microbatch, float) * shape.seq_len / choice.context
    streams = t if traits.sequence_parallel else np.ones(())
    d = shape.d_model
    if remat == "full":
        return float_or_array(tokens * 2 * d / streams)
    scores = 0.0
    if traits.attention == "written" and remat == "none":
        scores = 5.0 * shape.heads * shape.seq_len / t
    if shape.biases:  # LayerNorm, dropout, GELU
        wide = 8 * d + 4 * shape.d_ff  # 24 d where the MLP is four times as wide
        return float_or_array(tokens * (10 * d / streams + wide / t + scores))
    heads = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    moe = shape.expert_layers / shape.layers
    # Inputs of products in 8 bits, where these are; the activation's own input stays in 16.
    narrow = 2.0 if traits.matmul == "bfloat16" else 1.0
    wide = (4 if shape.gated else 2) + narrow
    shared = shape.shared_experts * (shape.shared_ff or shape.expert_ff)
    mlp = wide * (shape.d_ff * (1 - moe) + shared * moe)
    folded = t if traits.folded_experts else 1.0
    routed = (
        moe
        * shape.top_k
        * traits.imbalance
        * ((2 + narrow) * shape.routed_width / folded + wide * shape.expert_ff / folded)
    )
    kept = tokens * (
        (4 + 2 * narrow) * d / streams + (2 * heads + 4 * shape.heads + mlp) / t + routed + scores
    )
    if remat.startswith("save:"):
        kept = kept - tokens * mlp / t
    return float_or_array(kept)


def float_or_array(value: Floats) -> Floats:
    return float(value) if np.ndim(value) == 0 else value


def in_flight(choice: Choice, stage: Floats = 0) -> Floats:
    """Micro-batches whose activations a rank of the pipeline keeps, in its layers' worth of them.

    One forward, one backward: p - stage. Interleaved, stage 0: p * (1 + (p - 1) / (p v)).
    """
    p, v = np.asarray(choice.pipeline, float), np.asarray(choice.virtual_stages, float)
    m = np.asarray(choice.microbatches, float)
    if choice.schedule == "gpipe":
        return m
    deep = np.where(v > 1, ((p - stage - 1) * 2 + (v - 1) * p + 1) / v, p - stage)
    return np.minimum(m, deep)


def memory(shape: Shape, choice: Choice, *, overhead: bool = True) -> Published:
    """What a run of `choice.traits` needs at its peak.

    Args:
      overhead: with what the driver, NCCL and the allocator take, as `nvidia-smi` shows it.
    """
    traits, zero = choice.traits, np.asarray(choice.zero_stage)
    layers, outer = local_params(shape, choice)
    held = layers + outer
    z = np.asarray(choice.fsdp, float)
    weights = np.where(zero == 3, 4.0 * held / z, 2.0 * held)
    width = 4.0 if zero_is_three(zero) else float(max(2, traits.gradient_bytes))
    gradients = (not traits.frozen) * width * held / np.where(zero >= 2, z, 1)
    trained = 0.0 if traits.frozen else 1.0
    optimizer = trained * np.where(zero == 3, 8.0, 12.0) * held / np.where(zero >= 1, z, 1)
    p = np.asarray(choice.pipeline, float)
    mine = np.ceil(shape.layers / p)
    share = np.asarray(choice.remat_share)
    each = share * layer_bytes(shape, choice) + (1 - share) * layer_bytes(shape, choice, "none")
    kept = each * mine * in_flight(choice)
    return Published(
        weights=weights, gradients=gradients, optimizer=optimizer, activations=kept,
        working=_working(shape, choice),
        gathered=np.where(zero == 3, 2 * 2.0 * layers / mine + 2.0 * outer * (p == 1), 0.0),
        overhead=np.asarray(CONTEXT_BYTES if overhead else 0.0),
    )  # fmt: skip


def size(shape: Shape, choice: Choice, name: str) -> float:
    """A part of memory by the name that published tables give it, of the first rank.

    "state" is parameters and optimizer with a 32-bit sum of gradients, "activations" those with
    nothing made again and no sequence parallelism, "selective" with both remedies, and "share"
    the choice's activations over those of tensor parallelism alone.
    """
    plain = replace(choice, traits=replace(choice.traits, sequence_parallel=False))
    shared = replace(choice, traits=replace(choice.traits, sequence_parallel=True))
    if name == "state":
        return 18 * float(local_params(shape, choice)[0] + local_params(shape, choice)[1])
    if name == "share":
        return float(layer_bytes(shape, choice) / layer_bytes(shape, plain, "none"))
    which, remat = {
        "activations": (plain, "none"),
        "selective": (shared, "save_all_but_attention"),
    }[name]
    mine = shape.layers / np.asarray(choice.pipeline, float)
    return float(layer_bytes(shape, which, remat) * mine * in_flight(which))


def zero_is_three(zero: Floats) -> bool:
    return bool(np.all(zero == 3))


def _working(shape: Shape, choice: Choice) -> Floats:
    """The layer that is made again, with its gradients; or the head's logits, in 16 and 32 bits."""
    layer = 2 * layer_bytes(shape, choice, "none")
    tokens = np.asarray(choice.microbatch, float) * shape.seq_len / choice.context
    logits = tokens * shape.vocab / choice.tensor * (6.0 if choice.traits.fused else 10.0)
    alone = np.asarray(choice.pipeline) == 1
    again = layer if choice.remat == "full" else layer / 2
    return np.where(alone, np.maximum(again, logits), again)
