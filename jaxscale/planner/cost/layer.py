"""Compute seconds of one device in a layer, and in the head, for one micro-batch."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from jaxscale.planner.cost import kernels
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.elementwise import elementwise_seconds
from jaxscale.planner.cost.matmuls import matmul_pass_seconds
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.sharding.model_trace import ModelWork, StackWork

Floats = Any  # a float, or float [N]

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


@dataclass(frozen=True)
class ComputeSeconds:
    """Seconds of one pass over one layer, or over the head."""

    matmul: Floats = 0.0
    attention: Floats = 0.0
    elementwise: Floats = 0.0
    waiting: Floats = 0.0  # for a host that launches kernels slower than they run

    @property
    def seconds(self) -> Floats:
        return self.matmul + self.attention + self.elementwise + self.waiting

    def __add__(self, other: "ComputeSeconds") -> "ComputeSeconds":
        return ComputeSeconds(
            *(getattr(self, one.name) + getattr(other, one.name) for one in fields(ComputeSeconds))
        )

    def __mul__(self, factor: Floats) -> "ComputeSeconds":
        return ComputeSeconds(*(getattr(self, one.name) * factor for one in fields(ComputeSeconds)))


@dataclass(frozen=True)
class LayerCompute:
    """An average layer, and the head, for one micro-batch."""

    forward: ComputeSeconds
    backward_input: ComputeSeconds  # B
    backward_weights: ComputeSeconds  # W
    recompute: ComputeSeconds  # R, by the remat policy
    head_forward: ComputeSeconds
    head_backward: ComputeSeconds

    @property
    def backward(self) -> ComputeSeconds:
        return self.backward_input + self.backward_weights


def layer_compute(work: ModelWork, cluster: Cluster, parallelism: Parallelism) -> LayerCompute:
    """The compute of an average layer, over which that of all stacks is spread, and of the head."""
    total = [ComputeSeconds()] * 4
    for stack in work.stacks:
        passes = _stack_compute(work, stack, cluster, parallelism)
        share = work.share(stack)
        total = [sum_ + one * share for sum_, one in zip(total, passes)]
    forward, inputs, weights, recompute = total
    # Multi-token prediction layers are on the rank of the head.
    extra, tokens = work.extra_predictions, _tokens(work.seq_len, parallelism)
    head, head_back = (
        _head(work, cluster, parallelism, tokens, backward=back) * (work.head_passes + extra)
        for back in (False, True)
    )
    return LayerCompute(
        forward=forward,
        backward_input=inputs,
        backward_weights=weights,
        recompute=recompute,
        head_forward=head + forward * extra,
        head_backward=head_back + (inputs + weights) * extra,
    )


def _tokens(seq_len: int, parallelism: Parallelism) -> Floats:
    """Of a micro-batch on a device."""
    return np.asarray(parallelism.microbatch) * seq_len / parallelism.context


def _stack_compute(
    work: ModelWork, stack: StackWork, cluster: Cluster, parallelism: Parallelism
) -> list[ComputeSeconds]:
    """An average layer of a stack: forward, B, W, R."""
    tokens = _tokens(stack.seq_len, parallelism)
    forward, inputs, weights = matmul_pass_seconds(stack, cluster, parallelism, tokens)
    attention = _attention(stack, cluster, parallelism, tokens)
    elementwise = elementwise_seconds(stack, work.width, cluster, parallelism, tokens)
    launches = _waiting(stack, parallelism)
    if parallelism.frozen:
        weights = np.zeros(())
    first = ComputeSeconds(forward, attention[0], elementwise[0])
    second = ComputeSeconds(inputs, attention[1], elementwise[1] * 0.7)
    third = ComputeSeconds(weights, 0.0, elementwise[1] * 0.3)
    ahead = 0.0 if parallelism.traits.blocking else 1.0  # whether the host runs ahead
    first = replace(first, waiting=np.maximum(0, launches[0] - ahead * first.seconds))
    back = second.seconds + third.seconds
    second = replace(second, waiting=np.maximum(0, launches[1] - ahead * back))
    return [first, second, third, _recompute(work, stack, cluster, parallelism, first)]


def _attention(
    stack: StackWork, cluster: Cluster, parallelism: Parallelism, tokens: Floats
) -> tuple:
    """Core attention and scans, forward and backward, of an average layer."""
    # Rows of tensor repeat what lies between the projections.
    traits, t = parallelism.traits, np.asarray(parallelism.tensor_columns)
    scans = kernels.scan_seconds(cluster, tokens * stack.scan_flops / t)
    if traits.attention == "written":
        return _written_attention(stack, cluster, parallelism, tokens)
    seconds = [scans, kernels.FLASH_BACKWARD * scans]
    for one in stack.attention:
        seen = one if traits.attention_seen else replace(one, keys=float(stack.seq_len))
        for n, back in enumerate((False, True)):
            seconds[n] = seconds[n] + kernels.flash_seconds(
                cluster,
                tokens * seen.flops / t,
                one.features,
                traits.attention,
                back,
                one.length / np.asarray(parallelism.context),
            )
    return seconds[0], seconds[1]


SCORE_BYTES = (9, 11)
"""Bytes per attention score beyond what the matmuls write, forward and backward: softmax reads and
writes, dropout reads, writes and saves a mask (16 bits, a fused masked softmax)."""


def _written_attention(
    stack: StackWork, cluster: Cluster, parallelism: Parallelism, tokens: Floats
) -> tuple:
    """Unfused attention: batched matmuls, softmax and dropout."""
    one, s = stack.attention[0], stack.seq_len
    heads, e = one.heads / np.asarray(parallelism.tensor_columns), one.features
    batch = tokens * parallelism.context / s * heads
    rows = s / np.asarray(parallelism.context)
    scores = kernels.matmul_seconds(cluster, rows, s, e, batch)
    values = kernels.matmul_seconds(cluster, rows, e, s, batch)
    matmuls = (scores + values) * (kernels.MISALIGNED if e % 8 else 1.0)
    elements = batch * rows * s
    forward = matmuls + kernels.memory_seconds(cluster, SCORE_BYTES[0] * elements, plain=True)
    backward = 2 * matmuls + kernels.memory_seconds(cluster, SCORE_BYTES[1] * elements, plain=True)
    return one.share * forward, one.share * backward


def _waiting(stack: StackWork, parallelism: Parallelism) -> tuple[Floats, Floats]:
    """Host seconds to launch the kernels of a layer's forward and backward pass."""
    graph = parallelism.traits.graph
    if not parallelism.traits.eager or graph == "step":
        return 0.0, 0.0
    moe = sum(one.share for one in stack.experts)
    count = max((one.count for one in stack.experts), default=0)
    local = np.maximum(1, count / np.asarray(parallelism.expert))
    each = KERNELS["expert" if parallelism.matmul == "bfloat16" else "quantised"]
    recorded = graph == "modules"
    dense, experts = (0, 0) if recorded else KERNELS["dense"], KERNELS["experts"]
    experts = KERNELS["between"] if recorded else experts
    counts = [(1 - moe) * dense[n] + moe * (experts[n] + local * each[n]) for n in (0, 1)]
    launch = parallelism.traits.launch_seconds
    return counts[0] * launch, counts[1] * launch


def _without_experts(stack: StackWork) -> StackWork:
    """The work of a stack but that of its experts, the shared one included."""
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


def _modules(
    work: ModelWork,
    stack: StackWork,
    cluster: Cluster,
    parallelism: Parallelism,
    forward: ComputeSeconds,
) -> ComputeSeconds:
    """What Megatron recomputes for `recompute_modules`."""
    recompute, names = ComputeSeconds(), parallelism.remat.partition(":")[2].split(",")
    if "mla_up_proj" in names:
        opened = [one for one in stack.matmuls if {"query", "key"} & {*one.names}]
        opened = [one for one in opened if one.inputs != work.width]
        share = sum(one.flops for one in opened) / stack.matmul_flops
        recompute = recompute + ComputeSeconds(matmul=forward.matmul * share)
    if "moe" in names and stack.experts:
        rest = _without_experts(stack)
        tokens = _tokens(stack.seq_len, parallelism)
        plain = elementwise_seconds(rest, work.width, cluster, parallelism, tokens)[0]
        recompute = recompute + ComputeSeconds(
            matmul=forward.matmul - matmul_pass_seconds(rest, cluster, parallelism, tokens)[0],
            elementwise=forward.elementwise - plain,
        )
    return recompute


def _recompute(
    work: ModelWork,
    stack: StackWork,
    cluster: Cluster,
    parallelism: Parallelism,
    forward: ComputeSeconds,
) -> ComputeSeconds:
    """What a remat policy recomputes of a forward pass."""
    remat = parallelism.remat
    if remat == "none":
        return ComputeSeconds()
    if remat.startswith("modules:"):
        return _modules(work, stack, cluster, parallelism, forward)
    if remat == "save_all_but_attention":
        return ComputeSeconds(attention=forward.attention)
    if remat == "save_matmuls":
        return ComputeSeconds(elementwise=forward.elementwise)
    names = remat.partition(":")[2].split(",") if ":" in remat else []
    # A layer's last matmul is never recomputed, since the backward pass does not need its result;
    # trainers that recompute whole layers recompute it, too.
    again = stack.recomputed_matmuls(names, last=not parallelism.traits.lockstep)
    core = 0.0 if "attention" in names else 1.0
    return ComputeSeconds(
        matmul=forward.matmul * again / stack.matmul_flops,
        attention=forward.attention * core,
        elementwise=forward.elementwise,
        waiting=forward.waiting,
    )


LOSS_BYTES = {"compiled": (8, 6), "fused": (8, 6), "plain": (24, 14)}
"""Bytes per logit beyond what the matmul writes, forward and backward: fused cross entropy reads 16
bits twice; a plain one casts to 32 bits, subtracts, exponentiates and divides in separate kernels.
"""


def _head(
    work: ModelWork, cluster: Cluster, parallelism: Parallelism, tokens: Floats, backward: bool
) -> ComputeSeconds:
    local = work.vocab / np.asarray(parallelism.tensor_columns)
    width = work.width / parallelism.tensor_rows
    matmul = kernels.matmul_seconds(cluster, tokens, local, width)
    width = LOSS_BYTES[parallelism.traits.loss][backward]
    return ComputeSeconds(
        matmul=matmul * ((1 if parallelism.frozen else 2) if backward else 1),
        elementwise=kernels.memory_seconds(cluster, tokens * local * width),
    )
