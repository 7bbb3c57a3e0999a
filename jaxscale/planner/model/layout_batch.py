"""A batch of layouts: integer settings are arrays, other settings are common to all."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from jaxscale.config.layout import MESH_AXES, Layout
from jaxscale.sharding.model_trace import Ints

INTEGER_FIELDS = (
    *MESH_AXES,
    "tensor_rows",
    "zero_stage",
    "microbatches",
    "virtual_stages",
    "sequence_chunks",
)


@dataclass(frozen=True)
class LayoutBatch:
    """N layouts: the fields of `Layout`, each integer an int or int [N]. Nothing is checked."""

    pipeline: Ints = 1
    data: Ints = 1
    fsdp: Ints = 1
    expert: Ints = 1
    context: Ints = 1
    tensor: Ints = 1
    tensor_rows: Ints = 1
    zero_stage: Ints = 3
    microbatches: Ints = 1
    virtual_stages: Ints = 0
    sequence_chunks: Ints = 1
    accumulation: str = "sequential"
    schedule: str = "1f1b"
    pipeline_gather: str = "chunk"
    context_method: str = "ring"
    overlap_experts: bool = False
    overlap_tensor: bool = False
    unroll_layers: bool = False
    remat: str = "none"
    offload: str = "none"

    schedule_spec = Layout.schedule_spec
    remat_policy = Layout.remat_policy
    offloads = Layout.offloads
    batch_shards = Layout.batch_shards
    zero_ranks = Layout.zero_ranks
    num_groups = Layout.num_groups
    casts_once = Layout.casts_once
    tensor_columns = Layout.tensor_columns

    def __len__(self) -> int:
        return max(np.size(value) for value in vars(self).values())

    def take(self, index: Any) -> Self:
        """The layouts of an index or a mask."""
        count = len(self)
        taken: dict[str, Any] = {
            name: np.broadcast_to(value, (count,))[index]
            for name, value in vars(self).items()
            if np.ndim(value)
        }
        return dataclasses.replace(self, **taken)

    def layout(self, n: int) -> Layout:
        """The n-th layout.

        Raises:
          ValueError: `Layout` refuses its fields.
        """
        fields: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(Layout)
        }
        for name in INTEGER_FIELDS:
            fields[name] = int(np.broadcast_to(fields[name], (len(self),))[n])
        return Layout(**fields)


SETTINGS = tuple(
    field.name for field in dataclasses.fields(LayoutBatch) if field.name not in INTEGER_FIELDS
)
"""Fields that all layouts of a batch have in common."""


def stack_layouts(layouts: list[Layout]) -> LayoutBatch:
    """A batch of layouts whose settings are equal but for integer ones."""
    common: dict[str, Any] = {
        field.name: getattr(layouts[0], field.name)
        for field in dataclasses.fields(Layout)
        if field.name not in INTEGER_FIELDS
    }
    integers: dict[str, Any] = {
        name: np.array([getattr(one, name) for one in layouts]) for name in INTEGER_FIELDS
    }
    return LayoutBatch(**common, **integers)


def join_batches(batches: Sequence[LayoutBatch]) -> LayoutBatch:
    """The layouts of several batches, with the other settings of the first."""
    integers: dict[str, Any] = {
        name: np.concatenate([np.broadcast_to(getattr(one, name), (len(one),)) for one in batches])
        for name in INTEGER_FIELDS
    }
    return dataclasses.replace(batches[0], **integers)
