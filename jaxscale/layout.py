"""How a run is spread over devices: one frozen record, and the checks that need no devices."""

import dataclasses
import difflib
import math
from dataclasses import dataclass

MESH_AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""From the slowest links to the fastest."""

MANUAL_AXES = ("pipeline", "data", "fsdp")
"""Axes whose collectives we write ourselves."""

AUTOMATIC_AXES = ("expert", "context", "tensor")
"""Axes whose collectives the compiler writes, from the constraints that it is given."""

# What each setting may be today, and what the design names but this version does not have.
ACCUMULATIONS = ("sequential",)
SCHEDULES = ("1f1b",)
REMATS = ("none", "full")
PLANNED = {
    "accumulation": ("layered",),
    "remat": ("save_matmuls", "save_names", "save_all_but_attention", "offload_names"),
    "offload": ("optimizer", "activations"),
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes and how the step walks over them.

    One axis may be -1: it takes the devices that are left. `zero_stage` says what is sharded over
    `fsdp`: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters (ZeRO,
    arXiv 1910.02054). `data` replicates, so data x fsdp is hybrid sharding.
    """

    pipeline: int = 1
    data: int = -1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    zero_stage: int = 3
    microbatches: int = 1  # a step; their gradients are summed
    accumulation: str = "sequential"
    schedule: str = "1f1b"  # read only when pipeline > 1
    virtual_stages: int = 1
    sequence_chunks: int = 1
    remat: str = "none"
    offload: str = "none"

    def __post_init__(self) -> None:
        for axis in MESH_AXES:
            size = getattr(self, axis)
            if size < 1 and size != -1:
                raise ValueError(
                    f"layout.{axis} = {size}; an axis has a size of at least 1, or -1 for the "
                    "devices that are left"
                )
        free = [axis for axis in MESH_AXES if getattr(self, axis) == -1]
        if len(free) > 1:
            raise ValueError(
                f"layout.{free[0]} and layout.{free[1]} are both -1; only one axis can take the "
                "devices that are left"
            )
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"layout.zero_stage = {self.zero_stage}; it can be 0, 1, 2 or 3")
        if self.microbatches < 1:
            raise ValueError(f"layout.microbatches = {self.microbatches}; at least 1")
        for name, allowed in (
            ("accumulation", ACCUMULATIONS),
            ("schedule", SCHEDULES),
            ("remat", REMATS),
            ("offload", ("none",)),
        ):
            _check_available(name, getattr(self, name), allowed)
        for name in ("pipeline", "expert", "context", "virtual_stages", "sequence_chunks"):
            if getattr(self, name) != 1:
                raise ValueError(
                    f"layout.{name} = {getattr(self, name)} is not available in this version; "
                    f"set layout.{name} = 1"
                )

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> size, in mesh order."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def num_devices(self) -> int:
        """Devices of a resolved layout."""
        return math.prod(self.sizes.values())

    @property
    def batch_shards(self) -> int:
        """Ways in which the global batch is split: data x fsdp."""
        return self.data * self.fsdp


def _check_available(name: str, got: str, allowed: tuple[str, ...]) -> None:
    if got in allowed:
        return
    if got in PLANNED.get(name, ()):
        raise ValueError(
            f"layout.{name} = {got!r} is not available in this version; "
            f"it can be {', '.join(allowed)}"
        )
    near = difflib.get_close_matches(got, allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"layout.{name} = {got!r} is not known; it can be {', '.join(allowed)}{hint}")


def resolve_sizes(layout: Layout, num_devices: int) -> Layout:
    """Replaces -1 by the devices that are left.

    Raises:
      ValueError: the sizes do not multiply to `num_devices`.
    """
    free = [axis for axis, size in layout.sizes.items() if size == -1]
    fixed = math.prod(size for size in layout.sizes.values() if size != -1)
    named = " x ".join(f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1)
    if free:
        if num_devices % fixed:
            raise ValueError(
                f"layout.{free[0]} = -1 takes what {named} leaves of {num_devices} devices, but "
                f"{num_devices} is not a multiple of {fixed}; change one of the sizes"
            )
        return dataclasses.replace(layout, **{free[0]: num_devices // fixed})
    if fixed != num_devices:
        raise ValueError(
            f"the layout ({named or 'every axis 1'}) needs {fixed} devices and there are "
            f"{num_devices}; change a size, or set layout.data = -1 to use them all"
        )
    return layout
