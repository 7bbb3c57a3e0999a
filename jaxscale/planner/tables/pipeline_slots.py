"""Buffers of a pipeline rank, from the table of its schedule: layers and slots.

As with makespans (`table_makespan`), beyond a few micro-batches per rank every further round adds
the same number of slots, so small tables suffice.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.config import DataConfig
from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelConfig
from jaxscale.pipeline.buffer_slots import GRADIENT, MEMORY, count_slots
from jaxscale.pipeline.partition import (
    StackLayers,
    assign_stages,
    best_partition,
    model_partitions,
    stack_shares,
)
from jaxscale.pipeline.stages import chunk_stages, open_stages
from jaxscale.planner.tables.table_makespan import (
    OperationSeconds,
    TableSpec,
    count_copies,
    extended,
    makespan,
    pipeline_table,
)
from jaxscale.sharding.model_trace import Ints
from jaxscale.training.tracing.traces import model_trace, model_work

SLOTS = ("residual_b", "residual_w", "cotangent", "input", "inbox", MEMORY, GRADIENT)
COUNTS = (*SLOTS, "chunks", "directions", "lanes")


@dataclass(frozen=True)
class RankBuffers:
    """Layers and buffer slots of a rank: ints, or int [N]; the defaults are for no pipeline."""

    rows: tuple[Ints, ...]  # of each stack, layers of all chunks, each as large as the largest
    capacity: tuple[Ints, ...] = ()  # of each stack, layers of one chunk
    residual_b: Ints = 0  # slots
    residual_w: Ints = 0
    cotangent: Ints = 0
    input: Ints = 0
    inbox: Ints = 0
    memory: Ints = 0
    memory_gradient: Ints = 0
    chunks: Ints = 1  # of a rank, of both directions together
    directions: Ints = 1  # of micro-batches; of 2 a rank also works with the mirrored rank's layers
    lanes: Ints = 1  # operations of a rank in a tick: 2 where some are overlapped pairs

    @classmethod
    def whole(cls, model: ModelConfig) -> "RankBuffers":
        """Buffers without a pipeline."""
        return cls(tuple(stack.num_layers for stack in model_trace(model).stacks))


def stack_buffers(each: Sequence[RankBuffers], index: Any) -> RankBuffers:
    """Buffers of N layouts; fields are int [N].

    Args:
      index: int [N], the entry of `each` that a layout has.
    """
    several: dict[str, Any] = {
        name: tuple(np.array(one)[index] for one in zip(*(getattr(rank, name) for rank in each)))
        for name in ("rows", "capacity")
    }
    slots: dict[str, Any] = {
        name: np.array([getattr(one, name) for one in each])[index] for name in COUNTS
    }
    return RankBuffers(**several, **slots)


def join_buffers(batches: Sequence[RankBuffers]) -> RankBuffers:
    """Buffers of several batches of layouts, whose fields are arrays, joined to one batch."""
    several: dict[str, Any] = {
        name: tuple(np.concatenate(one) for one in zip(*(getattr(each, name) for each in batches)))
        for name in ("rows", "capacity")
    }
    slots: dict[str, Any] = {
        name: np.concatenate([getattr(each, name) for each in batches]) for name in COUNTS
    }
    return RankBuffers(**several, **slots)


def stack_layers(model: ModelConfig) -> tuple[StackLayers, ...]:
    """The stacks of a model, as a pipeline divides them."""
    return tuple(
        StackLayers(one.name, one.num_layers, one.period, one.model_layers)
        for one in model_trace(model).stacks
    )


def busiest_rank_buffers(
    spec: TableSpec, layers: tuple[int, ...], stacks: Sequence[StackLayers]
) -> RankBuffers:
    """Buffers of the busiest rank, which all ranks allocate.

    Args:
      layers: of each virtual stage.
    """
    stack_of_stage = stage_stacks(layers, stacks)
    numbers = range(len(stacks))
    capacity = tuple(int(np.array(layers)[stack_of_stage == n].max()) for n in numbers)
    chunks = stack_of_stage[stages_by_rank(spec.schedule, spec.ranks, spec.virtual_stages)]
    rows = tuple(int((chunks == n).sum(axis=1).max()) * capacity[n] for n in numbers)
    directions, lanes = count_copies(spec.schedule)
    return RankBuffers(
        rows,
        capacity,
        **most_slots(spec),
        chunks=chunks.shape[1] * directions,
        directions=directions,
        lanes=lanes,
    )


def buffers_by_rank(
    spec: TableSpec, layers: tuple[int, ...], stacks: Sequence[StackLayers]
) -> list[RankBuffers]:
    """Buffers that each rank uses; all allocate the busiest rank's."""
    table = pipeline_table(spec)
    slots = count_slots(table, spec.parts)
    chunks = chunk_stages(table.order)
    of_stack = stage_stacks(layers, stacks)[chunks], range(len(stacks))

    def of_stacks(rank: int) -> list[np.ndarray]:
        return [np.array(layers)[chunks][rank][of_stack[0][rank] == n] for n in of_stack[1]]

    return [
        RankBuffers(
            tuple(int(mine.sum()) for mine in of_stacks(rank)),
            tuple(int(mine.max(initial=0)) for mine in of_stacks(rank)),
            **{name: int(slots[name][rank]) for name in SLOTS if name in slots},
            chunks=chunks.shape[1] * table.order.directions,
            directions=table.order.directions,
            lanes=table.order.lanes,
        )
        for rank in range(len(chunks))
    ]


def stage_stacks(layers: tuple[int, ...], stacks: Sequence[StackLayers]) -> np.ndarray:
    """int [stages], the index of each virtual stage's stack."""
    return np.repeat(np.arange(len(stacks)), stack_shares(layers, stacks))


@functools.cache
def stages_by_rank(schedule: str, ranks: int, virtual_stages: int) -> np.ndarray:
    """int [ranks, chunks], the virtual stage of each chunk: the same for any number of
    micro-batches and any recompute."""
    return chunk_stages(pipeline_table(TableSpec(schedule, ranks, 2 * ranks, virtual_stages)).order)


def layout_buffers(model: ModelConfig, data: DataConfig, layout: Layout) -> RankBuffers:
    """Buffers of a rank for a resolved layout.

    Raises:
      ValueError: no such pipeline exists.
    """
    if layout.pipeline == 1:
        return RankBuffers.whole(model)
    stacks = stack_layers(model)
    work = model_work(model, data.seq_len, data.output_len)
    head_cost = work.head_cost(sum(stack.num_layers for stack in stacks))
    stages = open_stages(layout, stacks, head_cost)
    capacity = tuple(stages.capacity(n) for n in range(len(stacks)))
    slots = {name: stages.program.slots.get(name, 0) for name in SLOTS}
    rows = tuple(len(rows) // layout.pipeline for rows in stages.layer_of_row.values())
    directions, lanes = stages.table.order.directions, stages.table.order.lanes
    chunks = stages.counts.shape[1] * directions
    return RankBuffers(rows, capacity, **slots, chunks=chunks, directions=directions, lanes=lanes)


def most_slots(spec: TableSpec) -> dict[str, int]:
    """Slots of each buffer on the rank that has the most."""
    return dict(zip(SLOTS, extended(spec, _most_slots).tolist()))


@functools.lru_cache(maxsize=4096)
def _most_slots(spec: TableSpec) -> np.ndarray:
    counts = count_slots(pipeline_table(spec), spec.parts)
    return np.array([counts[name].max() if name in counts else 0 for name in SLOTS])


@functools.lru_cache(maxsize=4096)
def default_stage_layers(
    spec: TableSpec, stacks: tuple[StackLayers, ...], head_cost: float
) -> tuple[int, ...]:
    """Layers of each virtual stage where the layout leaves them to the engine
    (`pipeline.partition.partition_layers`).

    Args:
      head_cost: FLOPs of the head over those of a layer.
    """
    shares = assign_stages([stack.num_layers for stack in stacks], spec.stages)
    splits = model_partitions(stacks, shares)
    each = np.array(splits, float)
    head = np.zeros_like(each)
    head[:, -1] = 3 * head_cost
    costs = OperationSeconds(f=each, b=each + head, w=each, r=each)
    return splits[best_partition(splits, makespan(spec, costs).tolist())]
