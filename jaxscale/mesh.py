"""The only place where a device mesh is built."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from jaxscale.layout import MESH_AXES, Layout


def make_mesh(layout: Layout, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the six axes of a resolved layout, slowest links first.

    Args:
      layout: its sizes must multiply to the number of devices (`layout.resolve_sizes`).
      devices: all of the process group's by default; those of an absent topology for compiling.
    """
    return jax.make_mesh(
        tuple(layout.sizes.values()),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        devices=devices,
    )
