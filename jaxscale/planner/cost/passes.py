"""The four operations on a layer, with the part of their communication that nothing hides."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.communication import LayerTraffic
from jaxscale.planner.cost.layer import ComputeSeconds, LayerCompute
from jaxscale.planner.model.parallelism import Parallelism

Floats = Any  # a float, or float [N]

CROWDING = 0.2
"""Of the shorter of computation and a collective at work beside it, that the two lose to each
other on a GPU, whose cores also drive its links: the middle of the 0.1 to 0.3 that are seen
(Galvatron's profiler measured 0.126). TPUs move data beside their cores."""


def crowding(cluster: Cluster) -> float:
    return CROWDING if cluster.chip.cores else 0.0


@dataclass(frozen=True)
class LayerPass:
    """A mean layer's pass with its communication, for one micro-batch."""

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
    """Forward, input and weight gradients and what is made again, of a mean layer; and what is
    hidden in them of a micro-batch, by axis."""
    traits, slow = parallelism.traits, crowding(cluster)
    # On TPUs the compiler cuts a product and its collective into pieces by itself.
    piecewise = traits.overlap_tensor or bool(cluster.torus)

    def beside(seconds: Floats, work: Floats, wanted: bool) -> Floats:
        return np.maximum(0.0, seconds - work) if wanted else seconds

    ring = parallelism.context_method == "ring"
    t = np.asarray(parallelism.tensor, float)

    def in_pieces(seconds: Floats, work: Floats) -> Floats:
        """A product and its collective in t pieces: the first of them has nothing beside it."""
        if not piecewise:
            return seconds
        first = seconds / t
        late = np.maximum(first, seconds - work)
        return late + slow * np.minimum(seconds - late, work)

    exposed = {
        "tensor": [
            in_pieces(s, w.matmul) for s, w in zip(sent.tensor, (layer.forward, layer.backward))
        ],
        "context": [
            beside(s, w.attention, ring)
            for s, w in zip(sent.context, (layer.forward, layer.backward))
        ],
        "expert": [
            beside(s, w.seconds, traits.overlap_experts)
            for s, w in zip(sent.expert, (layer.forward, layer.backward))
        ],
    }
    full = parallelism.remat_share if parallelism.remat == "full" else 0.0
    again = layer.recompute * parallelism.remat_share
    experts = (
        1.0 if parallelism.remat.startswith("modules:") and "moe" in parallelism.remat else full
    )
    remade = {"tensor": full, "context": full, "expert": experts}
    passes = {
        "forward": LayerPass(layer.forward, *(exposed[name][0] for name in exposed)),
        "input": LayerPass(layer.backward_input, *(exposed[name][1] for name in exposed)),
        "weights": LayerPass(layer.backward_weights),
        "recompute": LayerPass(
            again, *(share * exposed[name][0] for name, share in remade.items())
        ),
    }
    hidden = {
        name: sum(s - e for s, e in zip(getattr(sent, name), exposed[name])) for name in exposed
    }
    return passes, hidden
