"""Compute seconds of other trainers, where they differ from ours: kernels, launches by the host,
and recomputation."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from jaxscale.planner.cost import kernels
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.elementwise import (
    ROUTED_BYTES,
    STREAM_BYTES,
    cast_elements,
    copied_elements,
    inner_bytes,
    router_bytes,
)
from jaxscale.planner.cost.layer import (
    LOSS_BYTES,
    ComputeSeconds,
    LayerCompute,
    Passes,
    attention_seconds,
    average_layer,
    compute_passes,
    head_passes,
    local_tokens,
    recomputed_pass,
)
from jaxscale.planner.cost.matmuls import Sizes, dense_sizes, expert_sizes, matmul_pass_seconds
from jaxscale.sharding.model_trace import ModelWork, StackWork
from tools.planner_validation.trainer_layout import TrainerLayout

Floats = Any  # a float, or float [N]


def trainer_compute(work: ModelWork, cluster: Cluster, layout: TrainerLayout) -> LayerCompute:
    """The compute of an average layer and of the head."""
    stacks = [_passes(work, stack, cluster, layout) for stack in work.stacks]
    head = head_passes(work, cluster, layout)
    if layout.traits.loss == "plain":
        shares = (plain / fused for plain, fused in zip(PLAIN_LOSS_BYTES, LOSS_BYTES))
        up, down = (
            replace(one, elementwise=one.elementwise * more) for one, more in zip(head, shares)
        )
        head = up, down
    return average_layer(work, stacks, head)


PLAIN_LOSS_BYTES = (24, 14)
"""`LOSS_BYTES` of a plain cross entropy, which casts to 32 bits, subtracts, exponentiates and
divides in separate kernels."""


def _passes(work: ModelWork, stack: StackWork, cluster: Cluster, layout: TrainerLayout) -> Passes:
    """The passes over an average layer of a stack."""
    tokens = local_tokens(stack.seq_len, layout)
    forward, inputs, weights = compute_passes(
        _matmuls(stack, cluster, layout, tokens),
        _attention(stack, cluster, layout, tokens),
        _elementwise(stack, work.width, cluster, layout, tokens),
    )
    ahead = 0.0 if layout.traits.blocking else 1.0  # whether the host runs ahead
    way, back = _launches(stack, layout)
    waiting = np.maximum(0, way - ahead * forward.seconds)
    waiting_back = np.maximum(0, back - ahead * (inputs.seconds + weights.seconds))
    whole = replace(forward, elementwise=forward.elementwise + waiting)
    if layout.remat.startswith("modules:"):
        again = _modules(work, stack, cluster, layout, forward)
    else:
        again = recomputed_pass(stack, layout, whole)
        if layout.remat == "full" and not layout.traits.lockstep:
            # Other trainers also recompute a layer's last matmul.
            again = replace(again, matmul=whole.matmul)
    inputs = replace(inputs, elementwise=inputs.elementwise + waiting_back)
    return whole, inputs, weights, again


def _matmuls(
    stack: StackWork, cluster: Cluster, layout: TrainerLayout, tokens: Floats
) -> list[Floats]:
    """Matmuls forward, and backward for inputs and weights; those of `wide_layers` in 16 bits."""
    wide = layout.traits.wide_layers / stack.num_layers
    seconds = matmul_pass_seconds(_sizes(stack, layout, tokens), cluster, layout)
    if not wide:
        return list(seconds)
    plain = replace(layout, traits=replace(layout.traits, matmul="bfloat16"))
    others = matmul_pass_seconds(_sizes(stack, layout, tokens), cluster, plain)
    return [(1 - wide) * one + wide * other for one, other in zip(seconds, others)]


STREAMS = 4
"""CUDA streams on which the matmuls of a device's experts run where they are separate kernels
(Transformer Engine's GroupedLinear)."""


def _sizes(stack: StackWork, layout: TrainerLayout, tokens: Floats) -> Iterator[Sizes]:
    """Sizes of matmuls, and of dispatch by masks."""
    yield from dense_sizes(stack, layout, tokens)
    for one in stack.experts:
        alone, own = layout, tokens
        if layout.traits.folded_experts:  # not split; each tensor rank has a share of the tokens
            alone, own = replace(layout, tensor=1), tokens / np.asarray(layout.tensor)
        for (rows, columns, depth, local), count in expert_sizes(one, alone, own):
            at_once = local if layout.traits.grouped_experts else np.minimum(STREAMS, local)
            yield (rows, columns, depth, at_once), count * local / at_once
        if layout.traits.masked_dispatch:  # dispatch and combine, by sequence
            slots, s = stack.seq_len * one.choices * layout.imbalance, stack.seq_len
            yield (slots, one.width, s, tokens / s), 2 * one.share


FLASH_1 = {"sm80": (0.40, 0.30), "sm90": (0.20, 0.15)}
"""`kernels.FLASH` of FlashAttention 1: arXiv 2307.08691, figures 4 to 7; the Triton one at half of
the second version's."""

FLASH_2 = {
    "sm80": (0.58, 0.50),
    "sm90": (0.36, 0.32),
    "sm100": (0.25, 0.20),
    "sm103": (0.25, 0.20),
}
"""The same of FlashAttention 2."""

SCORE_BYTES = (9, 11)
"""Bytes per attention score beyond what the matmuls write, forward and backward: softmax reads and
writes, dropout reads, writes and saves a mask (16 bits, a fused masked softmax)."""

MISALIGNED = 9.0
"""Slowdown of attention's batched matmuls when the head size is not a multiple of 8 elements: its
rows are not aligned to 16 bytes, and tensor cores load single elements: 2 to 9 times (Anthony et
al., The Case for Co-Designing Model Architectures with Hardware, arXiv 2401.14489)."""


def _attention(
    stack: StackWork, cluster: Cluster, layout: TrainerLayout, tokens: Floats
) -> tuple[Floats, Floats]:
    """Core attention, forward and backward; each kernel has measurements of some generations."""
    if layout.traits.attention == "written":
        return _written_attention(stack, cluster, layout, tokens)
    if not layout.traits.attention_seen:  # masked blocks are computed
        whole = tuple(replace(one, keys=float(stack.seq_len)) for one in stack.attention)
        stack = replace(stack, attention=whole)
    rates = {"flash1": FLASH_1, "flash2": FLASH_2, "fused": kernels.FLASH}[layout.traits.attention]
    return attention_seconds(stack, cluster, layout, tokens, rates)


def _written_attention(
    stack: StackWork, cluster: Cluster, layout: TrainerLayout, tokens: Floats
) -> tuple[Floats, Floats]:
    """Unfused attention: batched matmuls, softmax and dropout."""
    one, s = stack.attention[0], stack.seq_len
    heads, e = one.heads / np.asarray(layout.tensor_columns), one.features
    batch = tokens * layout.context / s * heads
    rows = s / np.asarray(layout.context)
    scores = kernels.matmul_seconds(cluster, rows, s, e, batch)
    values = kernels.matmul_seconds(cluster, rows, e, s, batch)
    matmuls = (scores + values) * (MISALIGNED if e % 8 else 1.0)
    moved = [
        kernels.memory_seconds(cluster, each * batch * rows * s) / kernels.PLAIN_KERNEL
        for each in SCORE_BYTES
    ]
    return one.share * (matmuls + moved[0]), one.share * (2 * matmuls + moved[1])


DROPOUT_STREAM_BYTES, PLAIN_STREAM_BYTES = (22, 44), (32, 44)
"""`STREAM_BYTES` with fused bias, dropout and addition (Megatron): two norms 4 each, two additions
7 each; backward, norms 10, dropouts 5, additions 6 and bias reductions. Of plain kernels: norms 4,
additions 6, copies of queries, keys and values 12; backward, norms 10 and additions 6 each."""

PLAIN_EXPERT_BYTES = ((54, 28), (80, 36))
"""Bytes per element inside a routed expert beyond a fused activation, and per output element, where
each bias addition, clamp, sigmoid and multiplication is a kernel, and 32-bit routing weights make
those 32-bit (`TEGroupedMLP._apply_bias` and its unfused branch). Forward: bias and
concatenation 16, clamps 8, gate 14, offset 4, multiplication 6, weight and cast 12; outputs 28."""


def _elementwise(
    work: StackWork, width: int, cluster: Cluster, layout: TrainerLayout, tokens: Floats
) -> list[Floats]:
    """Norms, residual, positions, activation, casts: forward and backward."""
    traits, t = layout.traits, np.asarray(layout.tensor)
    stream_bytes = DROPOUT_STREAM_BYTES if traits.dropout else PLAIN_STREAM_BYTES
    stream_bytes = STREAM_BYTES if traits.fused else stream_bytes
    streams = t if traits.sequence_parallel else 1.0
    folded = t if traits.folded_experts else 1.0
    copies = copied_elements(work, layout) / folded
    # An all-to-all kernel that sorts leaves half of the permutation.
    routed = ROUTED_BYTES * copies / (1 + traits.fused_experts) + router_bytes(work)
    rate = kernels.PLAIN_KERNEL if traits.eager else 1.0
    found = []
    for stream, inner, elements, (inside, out) in zip(
        stream_bytes,
        inner_bytes(work, layout),
        cast_elements(work, layout, copies),
        PLAIN_EXPERT_BYTES if traits.plain_experts else ((0, 0), (0, 0)),
    ):
        plain = sum(
            one.share * one.choices * layout.imbalance * (inside * one.hidden + out * one.width)
            for one in work.experts
        )
        moved = stream * width * work.branches / 2 / streams + inner + routed + plain / folded
        seconds = kernels.memory_seconds(cluster, tokens * moved) / rate
        found.append(seconds + kernels.cast_seconds(cluster, tokens * elements, layout.matmul))
    return found


KERNELS = {
    "dense": (24, 44),
    "experts": (60, 110),
    "between": (12, 22),
    "expert": (2, 4),
    "quantised": (6, 10),
}
"""Kernel launches of a layer's forward and backward pass in an eager trainer: projections,
attention, norms, residual, bias, dropout and activation; experts add routing and permutation
("between": those between the all-to-alls, which stay outside CUDA graphs); each local expert adds
its matmuls, with casts and transposes of quantised operands."""


def _launches(stack: StackWork, layout: TrainerLayout) -> tuple[Floats, Floats]:
    """Host seconds to launch the kernels of a layer's forward and backward pass."""
    graph = layout.traits.graph
    if not layout.traits.eager or graph == "step":
        return 0.0, 0.0
    moe = sum(one.share for one in stack.experts)
    count = max((one.count for one in stack.experts), default=0)
    local = np.maximum(1, count / np.asarray(layout.expert))
    each = KERNELS["expert" if layout.matmul == "bfloat16" else "quantised"]
    recorded = graph == "modules"
    dense, experts = (0, 0) if recorded else KERNELS["dense"], KERNELS["experts"]
    experts = KERNELS["between"] if recorded else experts
    counts = [(1 - moe) * dense[n] + moe * (experts[n] + local * each[n]) for n in (0, 1)]
    launch = layout.traits.launch_seconds
    return counts[0] * launch, counts[1] * launch


def _modules(
    work: ModelWork,
    stack: StackWork,
    cluster: Cluster,
    layout: TrainerLayout,
    forward: ComputeSeconds,
) -> ComputeSeconds:
    """Megatron's recomputation for `recompute_modules`."""
    recompute, names = ComputeSeconds(), layout.remat.partition(":")[2].split(",")
    if "mla_up_proj" in names:
        opened = [one for one in stack.matmuls if {"query", "key"} & {*one.names}]
        opened = [one for one in opened if one.inputs != work.width]
        share = sum(one.flops for one in opened) / stack.matmul_flops
        recompute = recompute + ComputeSeconds(matmul=forward.matmul * share)
    if "moe" in names and stack.experts:
        rest, tokens = _without_experts(stack), local_tokens(stack.seq_len, layout)
        plain = _elementwise(rest, work.width, cluster, layout, tokens)[0]
        recompute = recompute + ComputeSeconds(
            matmul=forward.matmul - _matmuls(rest, cluster, layout, tokens)[0],
            elementwise=forward.elementwise - plain,
        )
    return recompute


def _without_experts(stack: StackWork) -> StackWork:
    """The work of a stack without its experts, the shared one included."""
    shared = [one for one in stack.matmuls if one.of_shared]
    inside = sum(one.inputs * one.share for one in shared if one.over == "inputs")
    opened = sum(one.features * one.share for one in shared if one.over == "outputs")
    return replace(
        stack,
        matmuls=tuple(one for one in stack.matmuls if not one.of_shared),
        experts=(),
        hidden=stack.hidden - inside,
        opened=stack.opened - opened,
        read=stack.read - inside,
        made=stack.made - opened,
    )
