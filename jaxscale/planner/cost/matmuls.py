"""The matmuls of an average layer for one micro-batch: their sizes and seconds.

Letters as in `layer.py`.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxscale.planner.cost import kernels
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.model.shape import ModelShape

Floats = Any  # a float, or float [N]


def matmul_pass_seconds(
    shape: ModelShape, cluster: Cluster, parallelism: Parallelism, tokens: Floats
) -> tuple[Floats, Floats, Floats]:
    """Seconds of an average layer of a decoder: forward, gradients of inputs, of weights."""
    total, matmul = [np.zeros(())] * 3, parallelism.traits.matmul
    wide = parallelism.traits.wide_layers / shape.layers
    operands = {matmul: 1.0 - wide, "bfloat16": wide} if wide else {matmul: 1.0}
    for matmuls, count in _matmuls(shape, parallelism, tokens):
        for m, n, k, batch in matmuls:
            sides = ((m, n, k), (m, k, n), (k, n, m))
            for i, (rows, columns, depth) in enumerate(sides):
                for matmul, share in operands.items():
                    total[i] = total[i] + count * share * kernels.matmul_seconds(
                        cluster, rows, columns, depth, batch, matmul
                    )
    return total[0] / shape.layers, total[1] / shape.layers, total[2] / shape.layers


def _matmuls(
    shape: ModelShape, parallelism: Parallelism, tokens: Floats
) -> Iterator[tuple[list, Floats]]:
    """Lists of (rows, columns, depth, batch), each with the number of layers that have them."""
    t, d = np.asarray(parallelism.tensor_columns), shape.d_model / parallelism.tensor_rows
    wide = shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    # Keys and values are replicated beyond as many ranks as they have heads.
    local = shape.head_dim * (shape.heads / t + 2 * np.maximum(1, shape.kv_heads / t))
    if shape.latent:
        rank, heads = shape.latent, shape.heads / t
        attention = [
            (tokens, rank.query_rank + rank.kv_rank + rank.rope_dim, d, 1),
            (tokens, heads * (rank.nope_dim + rank.rope_dim), rank.query_rank or d, 1),
            (tokens, heads * (rank.nope_dim + rank.value_dim), rank.kv_rank, 1),
            (tokens, d, heads * rank.value_dim, 1),
        ]
    else:
        attention = [(tokens, local, d, 1), (tokens, d, shape.head_dim * shape.heads / t, 1)]
    gate = 2 if shape.gated else 1
    mlp = [(tokens, gate * shape.d_ff / t, d, 1), (tokens, d, shape.d_ff / t, 1)]
    yield attention, shape.attending
    yield mlp, shape.with_mlp - shape.expert_layers
    if shape.expert_layers:
        yield from _expert_matmuls(shape, parallelism, tokens)
    if shape.mixer:
        inner = shape.mixer.heads * shape.mixer.head_dim
        entry = 2 * inner + 2 * shape.mixer.groups * shape.mixer.state + shape.mixer.heads
        yield [(tokens, entry / t, d, 1), (tokens, d, inner / t, 1)], shape.mixer.layers
    if shape.encoder_layers:
        source = tokens * shape.encoder_seq_len / shape.seq_len
        heads = shape.head_dim * shape.heads / t
        cross = [(tokens, heads, d, 1), (source, (wide / t - heads), d, 1), (tokens, d, heads, 1)]
        yield cross, shape.layers


STREAMS = 4
"""CUDA streams on which the matmuls of a device's experts run where they are separate kernels
(Transformer Engine's GroupedLinear)."""


def _expert_matmuls(
    shape: ModelShape, parallelism: Parallelism, tokens: Floats
) -> Iterator[tuple[list, Floats]]:
    """The matmuls of a device's experts, of dispatch by masks, shared experts and projections."""
    x, d, gate = np.asarray(parallelism.expert), shape.d_model, 2 if shape.expert_gated else 1
    t, folded = np.asarray(parallelism.tensor), parallelism.traits.folded_experts
    # Folded experts are not split; each tensor rank brings a share of the tokens.
    width = shape.expert_ff / (1 if folded else t)
    local = np.maximum(1, shape.experts / x)
    rows = tokens / (t if folded else 1) * shape.top_k * parallelism.imbalance / local
    at_once = local if parallelism.traits.grouped_experts else np.minimum(STREAMS, local)
    wide = shape.routed_width
    routed = [(rows, gate * width, wide, at_once), (rows, wide, width, at_once)]
    yield routed, shape.expert_layers * local / at_once
    if parallelism.traits.masked_dispatch:  # dispatch and combine, by sequence
        places = shape.seq_len * shape.top_k * parallelism.imbalance
        mask = (places, wide, shape.seq_len, tokens / shape.seq_len)
        yield [mask, mask], shape.expert_layers
    if shape.shared_experts:
        shared = shape.shared_width / t
        yield [(tokens, gate * shared, d, 1), (tokens, d, shared, 1)], shape.expert_layers
    if shape.expert_width:
        yield [(tokens, wide, d, 1), (tokens, d, wide, 1)], shape.expert_layers
