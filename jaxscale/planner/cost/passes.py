"""The operations on a layer (forward, B, W, recompute) with their exposed communication."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.communication import LayerTraffic, TensorTraffic
from jaxscale.planner.cost.layer import ComputeSeconds, LayerCompute
from jaxscale.planner.model.parallelism import Parallelism

Floats = Any  # a float, or float [N]

CONTENTION = 0.2
"""Slowdown of overlapped compute and communication on a GPU, whose cores also drive its links, as a
share of the shorter of the two: the middle of 0.1 to 0.3 (Galvatron's profiler measured 0.126).
TPUs communicate without their cores."""


def contention(cluster: Cluster) -> float:
    return CONTENTION if cluster.chip.cores else 0.0


@dataclass(frozen=True)
class LayerPass:
    """One pass over an average layer with its exposed communication, for one micro-batch."""

    work: ComputeSeconds
    tensor: Floats = 0.0
    context: Floats = 0.0
    expert: Floats = 0.0

    @property
    def seconds(self) -> Floats:
        return self.work.seconds + self.tensor + self.context + self.expert


def make_passes(
    cluster: Cluster, parallelism: Parallelism, layer: LayerCompute, sent: LayerTraffic
) -> tuple[dict[str, LayerPass], dict]:
    """Forward, input gradients, weight gradients and recompute of an average layer; and the seconds
    of communication overlapped with them, by axis."""
    slow = contention(cluster)
    # On TPUs the compiler itself decomposes a matmul and its collective (collective matmul).
    piecewise = parallelism.overlap_tensor or bool(cluster.torus)

    ring = parallelism.context_method == "ring"
    t = np.asarray(parallelism.tensor, float)

    def in_chunks(seconds: Floats, work: Floats, chunks: Floats) -> Floats:
        """Work and its collective in chunks, of which the first is not overlapped."""
        late = np.maximum(seconds / chunks, seconds - work)
        return late + slow * np.minimum(seconds - late, work)

    def exchange(seconds: Floats, work: ComputeSeconds) -> Floats:
        """In halves: the first half's dispatch and the last half's combine are not overlapped."""
        return in_chunks(seconds, work.matmul, 2) if parallelism.overlap_experts else seconds

    def over_tensor(seconds: Floats, work: Floats) -> Floats:
        return in_chunks(seconds, work, t) if piecewise else seconds

    # Gradients of inputs and of weights are one pass, except in a pipeline.
    way, back = sent.tensor.forward, sent.tensor.input + sent.tensor.weights
    exposed_share = [
        over_tensor(seconds, work.matmul) / np.where(seconds > 0, seconds, 1.0)
        for seconds, work in ((way, layer.forward), (back, layer.backward))
    ]
    tensor = TensorTraffic(
        forward=sent.tensor.forward * exposed_share[0],
        input=sent.tensor.input * exposed_share[1],
        weights=sent.tensor.weights * exposed_share[1],
        recompute=sent.tensor.recompute * exposed_share[0],
    )
    exposed = {
        "context": [
            np.maximum(0.0, s - w.attention) if ring else s
            for s, w in zip(sent.context, (layer.forward, layer.backward))
        ],
        "expert": [exchange(s, w) for s, w in zip(sent.expert, (layer.forward, layer.backward))],
    }
    resent = {
        "context": 1.0 if parallelism.remat == "full" else 0.0,
        "expert": _resent_tokens(parallelism.remat),
    }
    passes = {
        "forward": LayerPass(
            layer.forward, tensor.forward, *(exposed[name][0] for name in exposed)
        ),
        "input": LayerPass(
            layer.backward_input, tensor.input, *(exposed[name][1] for name in exposed)
        ),
        "weights": LayerPass(layer.backward_weights, tensor.weights),
        "recompute": LayerPass(
            layer.recompute,
            tensor.recompute,
            *(share * exposed[name][0] for name, share in resent.items()),
        ),
    }
    hidden = {
        name: sum(s - e for s, e in zip(getattr(sent, name), both))
        for name, both in {"tensor": tensor, **exposed}.items()
    }
    return passes, hidden


def _resent_tokens(remat: str) -> float:
    """Share of a layer's all-to-alls that are repeated with its recompute."""
    # No policy by names saves the received rows; no backward pass needs the results, which would
    # be sent back.
    return 0.0 if remat in ("none", "save_all_but_attention") else 0.5
