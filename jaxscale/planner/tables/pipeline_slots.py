"""The buffers of a pipeline rank, by the table of its schedule: layers and slots.

As with makespans (`table_makespan`), beyond a few micro-batches per rank every further round adds
the same number of slots, so no table needs to be large.
"""

import functools
from dataclasses import dataclass

import numpy as np

from jaxscale.config import Config
from jaxscale.pipeline.buffer_slots import count_slots
from jaxscale.pipeline.partition import best_partition, candidate_partitions
from jaxscale.pipeline.stages import chunk_stages, open_stages
from jaxscale.planner.model.param_shapes import Ints
from jaxscale.planner.tables.table_makespan import (
    OperationSeconds,
    TableSpec,
    makespan,
    pipeline_table,
)

SLOTS = ("residual_b", "residual_w", "cotangent", "input", "inbox")


@dataclass(frozen=True)
class RankBuffers:
    """Layers and buffer slots of a rank: ints, or int [N]; the defaults are those without a
    pipeline."""

    rows: Ints  # layers of all chunks, each with the capacity of the largest
    capacity: Ints = 0  # layers of one chunk
    residual_b: Ints = 0  # slots
    residual_w: Ints = 0
    cotangent: Ints = 0
    input: Ints = 0
    inbox: Ints = 0


def busiest_rank_buffers(spec: TableSpec, layers: tuple[int, ...]) -> RankBuffers:
    """Buffers of the busiest rank, which all ranks allocate.

    Args:
      layers: of each virtual stage.
    """
    capacity = max(layers)
    return RankBuffers(spec.virtual_stages * capacity, capacity, **most_slots(spec))


def buffers_by_rank(spec: TableSpec, layers: tuple[int, ...]) -> list[RankBuffers]:
    """Buffers that each rank uses; all allocate those of the busiest."""
    table = pipeline_table(spec)
    slots = count_slots(table)
    return [
        RankBuffers(
            int(mine.sum()), int(mine.max()), **{name: int(slots[name][n]) for name in SLOTS}
        )
        for n, mine in enumerate(np.array(layers)[chunk_stages(table.order)])
    ]


def config_buffers(config: Config) -> RankBuffers:
    """Buffers of a rank for a config with a resolved layout.

    Raises:
      ValueError: no such pipeline exists.
    """
    model, layout = config.model, config.layout
    if layout.pipeline == 1:
        return RankBuffers(rows=model.num_layers)
    stages = open_stages(layout, model.num_layers, model.head_cost(config.data.seq_len))
    order = stages.table.order
    slots = {name: stages.program.slots[name] for name in SLOTS}
    return RankBuffers(
        rows=order.virtual_stages * stages.capacity(), capacity=stages.capacity(), **slots
    )


@functools.lru_cache(maxsize=4096)
def most_slots(spec: TableSpec) -> dict[str, int]:
    """Slots of each buffer on the rank that has most of them."""
    first = spec.settled()
    if first is None or spec.microbatches <= first + (step := spec.round):
        counts = count_slots(pipeline_table(spec))
        return {name: int(of_ranks.max()) for name, of_ranks in counts.items()}
    base, after = (most_slots(spec._replace(microbatches=m)) for m in (first, first + step))
    rounds = (spec.microbatches - first) // step
    return {name: base[name] + rounds * (after[name] - base[name]) for name in base}


def default_stage_layers(spec: TableSpec, num_layers: int, head_cost: float) -> tuple[int, ...]:
    """The layers of each virtual stage where the layout leaves them to the engine
    (`pipeline.partition.partition_layers`).

    Args:
      head_cost: FLOPs of the head over those of a layer.
    """
    splits = candidate_partitions(num_layers, spec.stages)
    each = np.array(splits, float)
    head = np.zeros_like(each)
    head[:, -1] = 3 * head_cost
    costs = OperationSeconds(f=each, b=each + head, w=each, r=each)
    return splits[best_partition(splits, makespan(spec, costs).tolist())]
