"""The choice of the arrays of a training state that rest in host memory, without JAX.

`layout.offload_bytes` of a device's state rest there, in whole arrays (a stack's layers together),
in a fixed order: matrices of optimizer moments, which a step reads and writes once, then matrices
of the layers' parameters, which it reads in each pass. Moments of layers come before those of
embedding and head, experts before other weights (InfMoE, arXiv 2106.10715), and large arrays before
small ones. Vectors, and parameters outside the layers, stay on the device.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxscale.sharding.rules import Axes

Ints = Any
"""An int, or int [N] for N layouts."""

OUTSIDE = ("embed", "head")
"""Parts of a model outside its stacks of layers."""


@dataclass(frozen=True)
class StateArray:
    """An array of a training state."""

    path: str  # of its parameter: "layers/mlp/up"
    moment: str  # "" for the parameter itself, or such as "mu"
    axes: Axes
    whole_bytes: int  # on all devices, without replication
    device_bytes: Ints  # on one device

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"{self.path} ({self.moment})" if self.moment else self.path

    @property
    def can_rest_on_host(self) -> bool:
        """Whether it is a matrix that the layer loop or the update copies to the device."""
        dimensions = sum(axis != "layers" for axis in self.axes)
        return dimensions > 1 and bool(self.moment or self.in_layers)

    @property
    def part(self) -> str:
        """The part of the model: "embed", the name of a stack, or "head"."""
        return self.path.partition("/")[0]

    @property
    def in_layers(self) -> bool:
        """Whether its parameter is of a stack's layers."""
        return self.part not in OUTSIDE

    @property
    def order(self) -> tuple:
        """The sort key: arrays of lower keys leave the device first."""
        others = "experts" not in self.axes
        size = -self.whole_bytes
        return (not self.moment, not self.in_layers, others, size, self.path, self.moment)


def choose_host_arrays(
    arrays: Iterable[StateArray], offload_bytes: Ints
) -> Iterator[tuple[StateArray, Any]]:
    """The arrays that can rest in host memory, in order, each with whether it does: the first ones
    until they are `offload_bytes` of a device.

    Args:
      offload_bytes: `layout.offload_bytes`; one, or int [N] for N layouts.
    """
    before = 0
    for one in sorted(filter(lambda one: one.can_rest_on_host, arrays), key=lambda one: one.order):
        yield one, before < offload_bytes
        before = before + one.device_bytes


def most_host_bytes(arrays: Iterable[StateArray]) -> Ints:
    """Bytes of a device's arrays that can rest in host memory."""
    return sum(one.device_bytes for one in arrays if one.can_rest_on_host)
