"""The matmuls of an average layer for one micro-batch: their sizes and seconds."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxscale.planner.cost import kernels
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.sharding.model_trace import Matmul, RoutedExperts, StackWork

Floats = Any  # a float, or float [N]

Sizes = tuple[tuple, Floats]
"""(rows, columns, depth, batch) of a matmul on a device, and how many an average layer has."""


def matmul_pass_seconds(
    sizes: Iterable[Sizes], cluster: Cluster, parallelism: Parallelism
) -> tuple[Floats, Floats, Floats]:
    """Seconds of an average layer of a stack: forward, gradients of inputs, of weights."""
    total = [np.zeros(())] * 3
    for (m, n, k, batch), count in sizes:
        for i, (rows, columns, depth) in enumerate(((m, n, k), (m, k, n), (k, n, m))):
            total[i] = total[i] + count * kernels.matmul_seconds(
                cluster, rows, columns, depth, batch, parallelism.matmul
            )
    return total[0], total[1], np.zeros(()) if parallelism.frozen else total[2]


def matmul_sizes(work: StackWork, parallelism: Parallelism, tokens: Floats) -> Iterator[Sizes]:
    """The matmuls of an average layer."""
    experts = (expert_sizes(one, parallelism, tokens) for one in work.experts)
    return itertools.chain(dense_sizes(work, parallelism, tokens), *experts)


def dense_sizes(work: StackWork, parallelism: Parallelism, tokens: Floats) -> Iterator[Sizes]:
    """The matmuls outside the routed experts."""
    for one in work.matmuls:
        inputs, outputs = local_features(one, parallelism)
        ranks = np.asarray(parallelism.tensor) if one.over == "tokens" else 1
        yield (tokens * one.tokens / ranks, outputs, inputs, 1), one.share


def local_features(one: Matmul, parallelism: Parallelism) -> tuple[Floats, Floats]:
    """Inputs and outputs on a device. Tensor ranks beyond the number of key heads replicate keys
    and values."""
    t, rows = np.asarray(parallelism.tensor_columns), parallelism.tensor_rows
    if one.over == "outputs":
        local = sum(np.maximum(1, units / t) * each for units, each in one.outputs)
        return one.inputs / rows, local
    if one.over == "inputs":
        return one.inputs / t, one.features / rows
    return one.inputs / rows, one.features


def expert_sizes(
    one: RoutedExperts, parallelism: Parallelism, tokens: Floats
) -> tuple[Sizes, Sizes]:
    """The matmuls of a device's experts, all of them in one kernel."""
    hidden = one.hidden / np.asarray(parallelism.tensor)
    local = np.maximum(1, one.count / np.asarray(parallelism.expert))
    rows = tokens * one.choices * parallelism.imbalance / local
    return (
        ((rows, (1 + one.gated) * hidden, one.width, local), one.share),
        ((rows, one.width, hidden, local), one.share),
    )
