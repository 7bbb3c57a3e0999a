"""Many layouts at once: the numbers are arrays, the texts are common to all."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.config import Config
from jaxscale.layout import Layout
from jaxscale.planner.memory.step import Memory, step_memory
from jaxscale.planner.model.param_shapes import Ints
from jaxscale.planner.tables.pipeline_slots import RankBuffers

INTEGER_FIELDS = (
    "pipeline",
    "data",
    "fsdp",
    "expert",
    "context",
    "tensor",
    "zero_stage",
    "microbatches",
    "virtual_stages",
    "sequence_chunks",
)


@dataclass(frozen=True)
class LayoutBatch:
    """The fields of `Layout`; each number an int, or int [N]. Nothing is checked."""

    pipeline: Ints = 1
    data: Ints = 1
    fsdp: Ints = 1
    expert: Ints = 1
    context: Ints = 1
    tensor: Ints = 1
    zero_stage: Ints = 3
    microbatches: Ints = 1
    virtual_stages: Ints = 0
    sequence_chunks: Ints = 1
    accumulation: str = "sequential"
    schedule: str = "1f1b"
    context_method: str = "ring"
    remat: str = "none"
    offload: str = "none"

    offloads = Layout.offloads
    batch_shards = Layout.batch_shards

    def __len__(self) -> int:
        return max(np.size(getattr(self, name)) for name in INTEGER_FIELDS)

    def take(self, index: Any) -> "LayoutBatch":
        """Those of an index, or of a mask."""
        count = len(self)
        taken: dict[str, Any] = {
            name: np.broadcast_to(getattr(self, name), (count,))[index]
            for name in INTEGER_FIELDS
            if np.ndim(getattr(self, name))
        }
        return dataclasses.replace(self, **taken)

    def layout(self, n: int) -> Layout:
        """The n-th of them.

        Raises:
          ValueError: `Layout` refuses its fields.
        """
        fields: dict[str, Any] = dataclasses.asdict(self)
        for name in INTEGER_FIELDS:
            fields[name] = int(np.broadcast_to(fields[name], (len(self),))[n])
        return Layout(**fields)


def stack_layouts(layouts: list[Layout]) -> LayoutBatch:
    """Layouts whose texts are the same."""
    texts: dict[str, Any] = {
        field.name: getattr(layouts[0], field.name)
        for field in dataclasses.fields(Layout)
        if field.name not in INTEGER_FIELDS
    }
    numbers: dict[str, Any] = {
        name: np.array([getattr(one, name) for one in layouts]) for name in INTEGER_FIELDS
    }
    return LayoutBatch(**texts, **numbers)


@dataclass(frozen=True)
class _Configs:
    """A config with many layouts, as far as the formulas of memory look."""

    model: Any
    data: Any
    optimizer: Any
    layout: Any


def batch_memory(
    config: Config,
    layouts: LayoutBatch | Layout,
    buffers: RankBuffers | None,
    back_end: str,
    *,
    own_host: bool,
) -> Memory:
    """`memory.memory` of a config with a layout, or with many: fields are int, or int [N].

    Args:
      buffers: of ranks of pipelines; None where there are none.
    """
    many: Any = _Configs(config.model, config.data, config.optimizer, layouts)
    buffers = buffers or RankBuffers(rows=config.model.num_layers)
    return step_memory(many, back_end, own_host=own_host, buffers=buffers)
