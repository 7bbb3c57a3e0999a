"""Compute seconds of one device in a layer, and in the head, for one micro-batch.

Letters: T tokens of a micro-batch on a device, D d_model, H heads, K kv_heads, E head_dim, F d_ff,
V vocab, t ranks of tensor.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from jaxscale.planner.cost import kernels
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.elementwise import elementwise_seconds
from jaxscale.planner.cost.matmuls import matmul_pass_seconds
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.model.shape import ModelShape

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


def layer_compute(shape: ModelShape, cluster: Cluster, parallelism: Parallelism) -> LayerCompute:
    """The compute of an average layer; an encoder's layers are spread over the decoder's."""
    decoder = _decoder_compute(shape, cluster, parallelism)
    if not shape.encoder_layers:
        return decoder
    encoder = _decoder_compute(shape.encoder, cluster, parallelism)
    share = shape.encoder_layers / shape.layers
    names = ("forward", "backward_input", "backward_weights", "recompute")
    both = {name: getattr(decoder, name) + getattr(encoder, name) * share for name in names}
    return replace(decoder, **both)


def _decoder_compute(shape: ModelShape, cluster: Cluster, parallelism: Parallelism) -> LayerCompute:
    """The same without an encoder's layers, of which cross attention reads the output."""
    tokens = np.asarray(parallelism.microbatch) * shape.seq_len / parallelism.context
    forward, inputs, weights = matmul_pass_seconds(shape, cluster, parallelism, tokens)
    attention = _attention(shape, cluster, parallelism, tokens)
    elementwise = elementwise_seconds(shape, cluster, parallelism, tokens)
    launches = _waiting(shape, parallelism)
    if parallelism.traits.frozen:
        weights = np.zeros(())
    passes = [
        ComputeSeconds(forward, attention[0], elementwise[0]),
        ComputeSeconds(inputs, attention[1], elementwise[1] * 0.7),
        ComputeSeconds(weights, 0.0, elementwise[1] * 0.3),
    ]
    first, second, third = passes
    ahead = 0.0 if parallelism.traits.blocking else 1.0  # whether the host runs ahead
    first = replace(first, waiting=np.maximum(0, launches[0] - ahead * first.seconds))
    back = second.seconds + third.seconds
    second = replace(second, waiting=np.maximum(0, launches[1] - ahead * back))
    # Multi-token prediction layers are on the rank of the head.
    extra = shape.extra_predictions
    head, head_back = (
        _head(shape, cluster, parallelism, tokens, backward=back) * (shape.head_passes + extra)
        for back in (False, True)
    )
    return LayerCompute(
        forward=first,
        backward_input=second,
        backward_weights=third,
        recompute=_recompute(shape, cluster, parallelism, first),
        head_forward=head + first * extra,
        head_backward=head_back + (second + third) * extra,
    )


def _attention(
    shape: ModelShape, cluster: Cluster, parallelism: Parallelism, tokens: Floats
) -> tuple:
    """Core attention and scans, forward and backward, of an average layer of a decoder."""
    # Rows of tensor repeat what lies between the projections.
    traits, t = parallelism.traits, np.asarray(parallelism.tensor_columns)
    share = shape.attending / shape.layers
    scans = kernels.scan_seconds(cluster, tokens * _scan_flops(shape) / t)
    if traits.attention != "written":
        keys = shape.mean_keys if traits.attention_seen else float(shape.seq_len)
        # A window counts as the sequence whose mean query sees as many keys.
        reads = [(keys, 2 * keys if shape.causal else keys)]
        if shape.encoder_layers:
            reads.append((shape.encoder_seq_len, shape.encoder_seq_len))
        seconds = [
            sum(
                kernels.flash_seconds(
                    cluster,
                    tokens * share * shape.core_flops(seen) / t,
                    shape.head_dim,
                    traits.attention,
                    back,
                    length / np.asarray(parallelism.context),
                )
                for seen, length in reads
            )
            for back in (False, True)
        ]
        return seconds[0] + scans, seconds[1] + kernels.FLASH_BACKWARD * scans
    return _written_attention(shape, cluster, parallelism, tokens, share)


def _scan_flops(shape: ModelShape) -> float:
    """FLOPs of the scan, per token of an average layer."""
    if not shape.mixer:
        return 0.0
    return shape.mixer.layers / shape.layers * (shape.mixer_flops - 2.0 * shape.mixer_params)


SCORE_BYTES = (9, 11)
"""Bytes per attention score beyond what the matmuls write, forward and backward: softmax reads and
writes, dropout reads, writes and saves a mask (16 bits, a fused masked softmax)."""


def _written_attention(shape, cluster, parallelism, tokens, share) -> tuple:
    """Unfused attention: batched matmuls, softmax and dropout."""
    heads = shape.heads / np.asarray(parallelism.tensor_columns)
    s, e = shape.seq_len, shape.head_dim
    batch = tokens * parallelism.context / s * heads
    rows = s / np.asarray(parallelism.context)
    scores = kernels.matmul_seconds(cluster, rows, s, e, batch)
    values = kernels.matmul_seconds(cluster, rows, e, s, batch)
    matmuls = (scores + values) * (kernels.MISALIGNED if e % 8 else 1.0)
    elements = batch * rows * s
    forward = matmuls + kernels.memory_seconds(cluster, SCORE_BYTES[0] * elements, plain=True)
    backward = 2 * matmuls + kernels.memory_seconds(cluster, SCORE_BYTES[1] * elements, plain=True)
    return share * forward, share * backward


def _waiting(shape: ModelShape, parallelism: Parallelism) -> tuple[Floats, Floats]:
    """Host seconds to launch the kernels of a layer's forward and backward pass."""
    graph = parallelism.traits.graph
    if not parallelism.traits.eager or graph == "step":
        return 0.0, 0.0
    moe = shape.expert_layers / shape.layers
    local = np.maximum(1, shape.experts / np.asarray(parallelism.expert))
    each = KERNELS["expert" if parallelism.traits.matmul == "bfloat16" else "quantised"]
    recorded = graph == "modules"
    dense, experts = (0, 0) if recorded else KERNELS["dense"], KERNELS["experts"]
    experts = KERNELS["between"] if recorded else experts
    counts = [(1 - moe) * dense[n] + moe * (experts[n] + local * each[n]) for n in (0, 1)]
    return counts[0] * parallelism.traits.launch_seconds, counts[
        1
    ] * parallelism.traits.launch_seconds


def _modules(
    shape: ModelShape, cluster: Cluster, parallelism: Parallelism, forward: ComputeSeconds
) -> ComputeSeconds:
    """What Megatron recomputes for `recompute_modules`."""
    recompute, names = ComputeSeconds(), parallelism.remat.partition(":")[2].split(",")
    if "mla_up_proj" in names and shape.latent:
        rank = shape.latent
        opened = rank.query_rank * (rank.nope_dim + rank.rope_dim)
        opened += rank.kv_rank * (rank.nope_dim + rank.value_dim)
        share = 2.0 * shape.heads * opened * shape.attending / shape.matmul_flops
        recompute = recompute + ComputeSeconds(matmul=forward.matmul * share)
    if "moe" in names and shape.experts:
        rest = replace(shape, experts=0, mlp_layers=shape.dense_layers)
        tokens = np.asarray(parallelism.microbatch) * shape.seq_len / parallelism.context
        recompute = recompute + ComputeSeconds(
            matmul=forward.matmul - matmul_pass_seconds(rest, cluster, parallelism, tokens)[0],
            elementwise=forward.elementwise
            - elementwise_seconds(rest, cluster, parallelism, tokens)[0],
        )
    return recompute


def _recompute(
    shape: ModelShape, cluster: Cluster, parallelism: Parallelism, forward: ComputeSeconds
) -> ComputeSeconds:
    """What a remat policy recomputes of a forward pass."""
    remat = parallelism.remat
    if remat == "none":
        return ComputeSeconds()
    if remat.startswith("modules:"):
        return _modules(shape, cluster, parallelism, forward)
    if remat == "save_all_but_attention":
        return ComputeSeconds(attention=forward.attention)
    if remat == "save_matmuls":
        return ComputeSeconds(elementwise=forward.elementwise)
    names = remat.partition(":")[2].split(",") if ":" in remat else []
    matmuls = {
        "query": shape.heads,
        "key": shape.kv_heads,
        "value": shape.kv_heads,
        "attention_out": shape.heads,
    }
    sizes = {name: 2.0 * shape.d_model * shape.head_dim * n for name, n in matmuls.items()}
    if shape.encoder_layers:  # cross attention has the same; its keys are of the encoder's tokens
        source = shape.encoder_seq_len / shape.seq_len
        more = {"query": 2, "key": 1 + source, "value": 1 + source, "attention_out": 2}
        sizes = {name: size * more[name] for name, size in sizes.items()}
    mlp = 2.0 * shape.d_model * shape.d_ff
    if shape.expert_layers:
        mlp = shape.expert_flops / (3 if shape.expert_gated else 2)
    sizes |= {"mlp_up": mlp, "mlp_gate": mlp if shape.gated else 0.0}
    recomputed = sum(size for name, size in sizes.items() if name not in names)
    # A layer's last matmul is never recomputed, since the backward pass does not need its result;
    # trainers that recompute whole layers recompute it, too.
    down = mlp if not parallelism.traits.lockstep else 0.0
    share = (recomputed + down) / (sum(sizes.values()) + mlp)
    core = 0.0 if "attention" in names else 1.0
    return ComputeSeconds(
        matmul=forward.matmul * share,
        attention=forward.attention * core,
        elementwise=forward.elementwise,
        waiting=forward.waiting,
    )


LOSS_BYTES = {"compiled": (8, 6), "fused": (8, 6), "plain": (24, 14)}
"""Bytes per logit beyond what the matmul writes, forward and backward: fused cross entropy reads 16
bits twice; a plain one casts to 32 bits, subtracts, exponentiates and divides in separate kernels.
"""


def _head(shape, cluster, parallelism, tokens, backward: bool) -> ComputeSeconds:
    local = shape.vocab / np.asarray(parallelism.tensor_columns)
    width = shape.d_model / parallelism.tensor_rows
    matmul = kernels.matmul_seconds(cluster, tokens, local, width)
    width = LOSS_BYTES[parallelism.traits.loss][backward]
    return ComputeSeconds(
        matmul=matmul * ((1 if parallelism.traits.frozen else 2) if backward else 1),
        elementwise=kernels.memory_seconds(cluster, tokens * local * width),
    )
