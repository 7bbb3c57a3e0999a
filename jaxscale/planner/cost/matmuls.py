"""The matmuls of an average layer for one micro-batch: their sizes and seconds."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxscale.planner.cost import kernels
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.sharding.model_trace import Matmul, RoutedExperts, StackWork

Floats = Any  # a float, or float [N]


def matmul_pass_seconds(
    work: StackWork, cluster: Cluster, parallelism: Parallelism, tokens: Floats
) -> tuple[Floats, Floats, Floats]:
    """Seconds of an average layer of a stack: forward, gradients of inputs, of weights."""
    total, matmul = [np.zeros(())] * 3, parallelism.matmul
    wide = parallelism.traits.wide_layers / work.num_layers
    operands = {matmul: 1.0 - wide, "bfloat16": wide} if wide else {matmul: 1.0}
    for (m, n, k, batch), count in _sizes(work, parallelism, tokens):
        for i, (rows, columns, depth) in enumerate(((m, n, k), (m, k, n), (k, n, m))):
            for matmul, share in operands.items():
                total[i] = total[i] + count * share * kernels.matmul_seconds(
                    cluster, rows, columns, depth, batch, matmul
                )
    return total[0], total[1], total[2]


def _sizes(work: StackWork, parallelism: Parallelism, tokens: Floats) -> Iterator[tuple]:
    """(rows, columns, depth, batch) of each matmul on a device, and how many an average layer
    has."""
    for one in work.matmuls:
        inputs, outputs = local_features(one, parallelism)
        ranks = np.asarray(parallelism.tensor) if one.over == "tokens" else 1
        yield (tokens * one.tokens / ranks, outputs, inputs, 1), one.share
    for one in work.experts:
        yield from _expert_sizes(one, work.seq_len, parallelism, tokens)


def local_features(one: Matmul, parallelism: Parallelism) -> tuple[Floats, Floats]:
    """Inputs and outputs on a device. Keys and values are replicated beyond as many ranks of tensor
    as they have heads."""
    t, rows = np.asarray(parallelism.tensor_columns), parallelism.tensor_rows
    if one.over == "outputs":
        local = sum(np.maximum(1, units / t) * each for units, each in one.outputs)
        return one.inputs / rows, local
    if one.over == "inputs":
        return one.inputs / t, one.features / rows
    return one.inputs / rows, one.features


STREAMS = 4
"""CUDA streams on which the matmuls of a device's experts run where they are separate kernels
(Transformer Engine's GroupedLinear)."""


def _expert_sizes(
    one: RoutedExperts, seq_len: int, parallelism: Parallelism, tokens: Floats
) -> Iterator[tuple]:
    """The matmuls of a device's experts, and of dispatch by masks."""
    x, folded = np.asarray(parallelism.expert), parallelism.traits.folded_experts
    t = np.asarray(parallelism.tensor)
    # Folded experts are not split; each tensor rank brings a share of the tokens.
    hidden = one.hidden / (1 if folded else t)
    local = np.maximum(1, one.count / x)
    rows = tokens / (t if folded else 1) * one.choices * parallelism.imbalance / local
    at_once = local if parallelism.traits.grouped_experts else np.minimum(STREAMS, local)
    count = one.share * local / at_once
    yield (rows, (1 + one.gated) * hidden, one.width, at_once), count
    yield (rows, one.width, hidden, at_once), count
    if parallelism.traits.masked_dispatch:  # dispatch and combine, by sequence
        places = seq_len * one.choices * parallelism.imbalance
        yield (places, one.width, seq_len, tokens / seq_len), 2 * one.share
