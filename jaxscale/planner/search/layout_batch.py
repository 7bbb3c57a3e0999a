"""A batch of layouts: integer settings are arrays, string settings are common to all."""

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
    """N layouts: the fields of `Layout`, each integer an int or int [N]. Nothing is checked."""

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

    schedule_spec = Layout.schedule_spec
    remat_policy = Layout.remat_policy
    offloads = Layout.offloads
    batch_shards = Layout.batch_shards

    def __len__(self) -> int:
        return max(np.size(getattr(self, name)) for name in INTEGER_FIELDS)

    def take(self, index: Any) -> "LayoutBatch":
        """The layouts of an index or a mask."""
        count = len(self)
        taken: dict[str, Any] = {
            name: np.broadcast_to(getattr(self, name), (count,))[index]
            for name in INTEGER_FIELDS
            if np.ndim(getattr(self, name))
        }
        return dataclasses.replace(self, **taken)

    def layout(self, n: int) -> Layout:
        """The n-th layout.

        Raises:
          ValueError: `Layout` refuses its fields.
        """
        fields: dict[str, Any] = dataclasses.asdict(self)
        for name in INTEGER_FIELDS:
            fields[name] = int(np.broadcast_to(fields[name], (len(self),))[n])
        return Layout(**fields)


def stack_layouts(layouts: list[Layout]) -> LayoutBatch:
    """A batch of layouts whose string settings are equal."""
    common: dict[str, Any] = {
        field.name: getattr(layouts[0], field.name)
        for field in dataclasses.fields(Layout)
        if field.name not in INTEGER_FIELDS
    }
    integers: dict[str, Any] = {
        name: np.array([getattr(one, name) for one in layouts]) for name in INTEGER_FIELDS
    }
    return LayoutBatch(**common, **integers)


@dataclass(frozen=True)
class _ConfigBatch:
    """A config with a batch of layouts: the fields that the memory formulas read."""

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
    """`memory.step.step_memory` of a config with one layout or a batch: fields are int, or int [N].

    Args:
      buffers: of a pipeline's busiest rank; None without a pipeline.
    """
    many: Any = _ConfigBatch(config.model, config.data, config.optimizer, layouts)
    buffers = buffers or RankBuffers(rows=config.model.num_layers)
    return step_memory(many, back_end, own_host=own_host, buffers=buffers)
