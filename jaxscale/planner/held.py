"""What a rank of a pipeline holds, by the real table: its layers, and slots of its buffers.

As with the makespans of `ticks`, from a few micro-batches per rank on every further round of them
adds the same, so that no table needs to be large.
"""

import functools
from dataclasses import dataclass

import numpy as np

from jaxscale.config import Config
from jaxscale.pipeline.slots import count_slots
from jaxscale.pipeline.stages import best_dealing, chunk_stages, dealings, open_stages
from jaxscale.pipeline.table import Table
from jaxscale.planner.arrays import Ints
from jaxscale.planner.ticks import ROUNDS, Costs, makespan, open_table

SLOTS = ("residual_b", "residual_w", "cotangent", "input", "inbox")


@dataclass(frozen=True)
class Held:
    """Numbers of one layout, or arrays [N]; the defaults are those without a pipeline."""

    rows: Ints  # layers that a rank has room for, over all of its chunks
    capacity: Ints = 0  # of one chunk
    residual_b: Ints = 0  # slots
    residual_w: Ints = 0
    cotangent: Ints = 0
    input: Ints = 0
    inbox: Ints = 0


def hold(
    schedule: str, ranks: int, virtual_stages: int, microbatches: int, *, fused: bool,
    recompute: bool, layers: tuple[int, ...], keep: int = 0,
) -> Held:  # fmt: skip
    """What the busiest rank holds.

    Args:
      layers: of each virtual stage.
      keep: passes that it keeps at a time and need not recompute.
    """
    slots = slots_of(schedule, ranks, virtual_stages, fused, recompute, microbatches, keep)
    return Held(rows=virtual_stages * max(layers), capacity=max(layers), **slots)


def hold_config(config: Config) -> Held:
    """What a rank of a config's resolved layout holds.

    Raises:
      ValueError: the layout's pipeline cannot be.
    """
    model, layout = config.model, config.layout
    if layout.pipeline == 1:
        return Held(rows=model.num_layers)
    stages = open_stages(layout, model.num_layers, head_cost(config))
    order = stages.table.order
    slots = {name: stages.program.slots[name] for name in SLOTS}
    return Held(rows=order.virtual_stages * stages.capacity, capacity=stages.capacity, **slots)


def head_cost(config: Config) -> float:
    """FLOPs of the head over those of a layer, as a step deals its layers by."""
    model = config.model
    return 2 * model.d_model * model.vocab_size / model.layer_forward_flops(config.data.seq_len)


@functools.lru_cache(maxsize=4096)
def slots_of(
    schedule: str, ranks: int, virtual_stages: int, fused: bool, recompute: bool,
    microbatches: int, keep: int = 0,
) -> dict[str, int]:  # fmt: skip
    """The slots of each buffer."""
    if keep:
        key = schedule, ranks, virtual_stages, fused, recompute, microbatches, keep
        return _most(open_table(*key))
    step = ranks if schedule == "interleaved" else 1
    key = schedule, ranks, virtual_stages, fused, recompute
    settled = ranks * ROUNDS.get(schedule, microbatches)
    first = settled + (microbatches - settled) % step
    if microbatches <= first + step:
        return _most(open_table(*key, microbatches))
    base, after = slots_of(*key, first), slots_of(*key, first + step)
    rounds = (microbatches - first) // step
    return {name: base[name] + rounds * (after[name] - base[name]) for name in base}


def _most(table: Table) -> dict[str, int]:
    return {name: int(counts.max()) for name, counts in count_slots(table).items()}


@functools.lru_cache(maxsize=4096)
def deal(
    schedule: str, ranks: int, virtual_stages: int, microbatches: int, *, fused: bool,
    recompute: bool, num_layers: int, head_cost: float, keep: int = 0,
) -> tuple[int, ...]:  # fmt: skip
    """The layers of each virtual stage where a layout leaves it to `pipeline.stages.deal`.

    Args:
      head_cost: FLOPs of the head over those of a layer.
      keep: passes that a rank keeps at a time and need not recompute.
    """
    dealt = dealings(num_layers, ranks * virtual_stages)
    each = np.array(dealt, float)
    head = np.zeros_like(each)
    head[:, -1] = 3 * head_cost
    costs = Costs(f=each, b=each + head, w=each, r=each * recompute)
    found = makespan(schedule, ranks, microbatches, virtual_stages, costs, fused=fused, keep=keep)
    return dealt[best_dealing(dealt, found.tolist())]


def hold_each(
    schedule: str, ranks: int, virtual_stages: int, microbatches: int, *, fused: bool,
    recompute: bool, layers: tuple[int, ...], keep: int = 0,
) -> list[Held]:  # fmt: skip
    """What each rank makes use of, as `hold` has it of the busiest, whose buffers all have."""
    key = schedule, ranks, virtual_stages, fused, recompute, microbatches, keep
    table = open_table(*key)
    slots = count_slots(table)
    return [
        Held(int(mine.sum()), int(mine.max()), **{name: int(slots[name][n]) for name in SLOTS})
        for n, mine in enumerate(np.array(layers)[chunk_stages(table.order)])
    ]
