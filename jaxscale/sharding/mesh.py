"""Device mesh construction, the only one in the package."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxscale.choices import check_kind
from jaxscale.config.layout import Layout, resolve_sizes


def make_mesh(layout: Layout, devices: Sequence[Any] | None = None) -> Mesh:
    """Makes the device mesh of a resolved layout, with the axes over the slowest links first.

    On TPUs axes are laid along the axes of the torus, or along a part of one if sizes allow nothing
    else; with several slices the first axes span the network between them.

    Args:
      layout: its sizes must multiply to the number of devices (`layout.resolve_sizes`).
      devices: default `jax.devices()`; the devices of a topology description to compile ahead of
        time.

    Raises:
      ValueError: the first axes cannot be split over the slices; or the layout does not fit the
        devices.

    Examples:
      >>> mesh = jaxscale.make_mesh(jaxscale.Layout(data=1), jax.devices()[:1])
      >>> mesh.axis_names
      ('pipeline', 'data', 'fsdp', 'expert', 'context', 'tensor')
    """
    check_kind("layout", layout, Layout, "pass the layout of a config, config.layout")
    devices = jax.devices() if devices is None else devices
    if resolve_sizes(layout, len(devices)) != layout:
        raise ValueError(
            "the layout has a size of -1; pass that of the config of jaxscale.open_engine, "
            "or set every size"
        )
    axes = tuple(layout.sizes)
    return Mesh(_arrange(layout, devices), axes, axis_types=(AxisType.Auto,) * len(axes))


def axes_between_slices(layout: Layout, devices: Sequence[Any]) -> tuple[str, ...]:
    """The axes that span the network between slices of TPUs; () with one slice."""
    parts = over_slices(layout.sizes, _slices(devices))
    return tuple(axis for axis, part in zip(layout.sizes, parts, strict=True) if part > 1)


def _arrange(layout: Layout, devices: Sequence[Any]) -> np.ndarray:
    sizes, slices = tuple(layout.sizes.values()), _slices(devices)
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    between = over_slices(layout.sizes, slices)
    within = [size // part for size, part in zip(sizes, between, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(
        within, between, devices, allow_split_physical_axes=True
    )


def _slices(devices: Sequence[Any]) -> int:
    if devices[0].platform != "tpu":
        return 1  # on GPUs JAX calls a node a slice, and lists devices node by node
    return len({getattr(device, "slice_index", 0) for device in devices})


def over_slices(sizes: Mapping[str, int], slices: int) -> list[int]:
    """Splits axes over TPU slices: parts of their sizes that multiply to the number of slices, from
    the first axes.

    >>> over_slices({"data": 4, "fsdp": 16, "tensor": 2}, slices=8)
    [4, 2, 1]

    Raises:
      ValueError: no parts multiply to it.
    """
    parts, left = [], slices
    for size in sizes.values():
        parts.append(math.gcd(size, left))
        left //= parts[-1]
    if left > 1:
        named = ", ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1)
        raise ValueError(
            f"axes of {named} cannot be split over {slices} slices of TPUs: the first axes' sizes "
            f"have no factors that multiply to {slices}; set layout.data = {slices}, or a multiple"
        )
    return parts
