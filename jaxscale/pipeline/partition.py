"""Partition of layers into the virtual stages of a pipeline. NumPy only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxscale.pipeline.simulator import Costs, simulate
from jaxscale.pipeline.table import Table
from jaxscale.pipeline_schedules.operations import Order, R


@dataclass(frozen=True)
class StackLayers:
    """The layers of a model's stack, which a pipeline divides in whole periods."""

    name: str
    num_layers: int
    period: int = 1
    model_layers: int = 1  # of the model, in one layer of the stack


def check_enough(stacks: Sequence[StackLayers], order: Order) -> None:
    """Refuses a pipeline with a stage without layers."""
    stages = f"layout.pipeline = {order.ranks} x {order.virtual_stages} chunks"
    if order.stages < len(stacks):
        names = ", ".join(stack.name for stack in stacks)
        raise ValueError(
            f"{stages} makes {order.stages} stages, fewer than the model's {len(stacks)} stacks "
            f"({names}); a stage has layers of one stack: raise layout.pipeline or "
            "layout.virtual_stages"
        )
    if len(stacks) == 1 and stacks[0].period == 1:
        (stack,) = stacks
        if stack.num_layers < order.stages:
            got, least = f"model.num_layers = {stack.model_layers * stack.num_layers}", "layer"
            if stack.model_layers > 1:
                got += f", {stack.num_layers} periods of model.expert_pattern,"
                least = f"period of {stack.model_layers} layers"
            raise ValueError(
                f"{got} is less than the {order.stages} stages of {stages}; each needs at least "
                f"one {least}: set model.num_layers = {stack.model_layers * order.stages}, or "
                f"layout.pipeline = {max(1, stack.num_layers // order.virtual_stages)}"
            )
    shares = assign_stages([stack.num_layers for stack in stacks], order.stages)
    for stack, share in zip(stacks, shares):
        if stack.num_layers // stack.period < share:
            raise ValueError(
                f"{stages}: the {stack.num_layers} layers of {stack.name!r}, whose settings repeat "
                f"every {stack.period}, make {stack.num_layers // stack.period} whole periods for "
                f"{share} stages; each needs at least one: lower layout.pipeline or "
                "layout.virtual_stages"
            )


def has_layers(stacks: Sequence[StackLayers], stages: int) -> bool:
    """Whether every virtual stage would have a layer."""
    periods = [stack.num_layers // stack.period for stack in stacks]
    if not len(stacks) <= stages <= sum(periods):  # a fast test first, for searches
        return False
    shares = assign_stages([stack.num_layers for stack in stacks], stages)
    return all(have >= needed for have, needed in zip(periods, shares))


def stack_shares(layers: tuple[int, ...], stacks: Sequence[StackLayers]) -> tuple[int, ...]:
    """Virtual stages of each stack, from the layers of each stage."""
    ends = np.searchsorted(np.cumsum(layers), np.cumsum([s.num_layers for s in stacks])) + 1
    return tuple(np.diff(ends, prepend=0).tolist())


def check_layers(layers: tuple[int, ...], order: Order, stacks: Sequence[StackLayers]) -> None:
    """Refuses a partition in `layout.schedule` that does not match the stages or the stacks."""
    got, num_layers = ",".join(map(str, layers)), sum(stack.num_layers for stack in stacks)
    if len(layers) != order.stages:
        raise ValueError(
            f"layout.schedule assigns layers {got} to {len(layers)} stages, and there are "
            f"{order.stages}: layout.pipeline = {order.ranks} x {order.virtual_stages} chunks; "
            f"give {order.stages} numbers, or leave them out"
        )
    if sum(layers) != num_layers:
        raise ValueError(
            f"layout.schedule assigns layers {got} to stages, {sum(layers)} in all, and "
            f"model.num_layers = {num_layers}; give numbers that sum to it, or leave them out"
        )
    ends, done = set(np.cumsum(layers).tolist()), 0
    for stack in stacks:
        done += stack.num_layers
        if done not in ends:
            raise ValueError(
                f"layout.schedule assigns layers {got} to stages: no stage ends with layer {done}, "
                f"the last of {stack.name!r}, and a stage has layers of one stack; give numbers "
                "that end a stage there, or leave them out"
            )
    begin = 0
    for stack, share in zip(stacks, stack_shares(layers, stacks)):
        if any(n % stack.period for n in layers[begin : begin + share - 1]):
            raise ValueError(
                f"layout.schedule assigns layers {got} to stages: the settings of {stack.name!r} "
                f"repeat every {stack.period} layers, and a stage has whole periods of them; "
                f"give multiples of {stack.period}, or leave them out"
            )
        begin += share


def assign_stages(sizes: Sequence[int], stages: int) -> tuple[int, ...]:
    """The number of consecutive virtual stages of each stack, in proportion to its layers, at least
    one. Two equal stacks with an even number of chunks on a rank have half of each rank's."""
    shares = [1] * len(sizes)
    for _ in range(stages - len(sizes)):
        neediest = max(range(len(sizes)), key=lambda n: sizes[n] / shares[n])
        shares[neediest] += 1
    return tuple(shares)


def partition_layers(
    table: Table, stacks: Sequence[StackLayers], shares: Sequence[int], head_cost: float
) -> tuple[int, ...]:
    """The layers of each virtual stage that minimise the simulated step, as even as possible.

    The head's work, forward and backward, is in the last stage's B, so that this stage may need
    fewer layers than the others.

    Args:
      shares: virtual stages of each stack.
      head_cost: FLOPs of the head relative to a layer.
    """
    found = model_partitions(stacks, shares)
    makespans = [simulate(table, stage_costs(table, n, head_cost)).lockstep_makespan for n in found]
    return found[best_partition(found, makespans)]


def model_partitions(stacks: Sequence[StackLayers], shares: Sequence[int]) -> list[tuple[int, ...]]:
    """Candidate partitions: as even as possible, except that the last stage may have fewer layers.

    Args:
      shares: virtual stages of each stack.
    """
    before = tuple(
        layers
        for stack, share in zip(stacks[:-1], shares)
        for layers in _even_partition(stack, share)
    )
    return [(*before, *one) for one in _partitions(stacks[-1], shares[-1])]


def _partitions(stack: StackLayers, stages: int) -> list[tuple[int, ...]]:
    """Candidate partitions in whole periods; layers after the last period are in the last stage."""
    periods, rest = divmod(stack.num_layers, stack.period)
    if stages == 1:
        return [(stack.num_layers,)]
    return [
        (*(n * stack.period for n in one[:-1]), one[-1] * stack.period + rest)
        for one in candidate_partitions(periods, stages)
    ]


def _even_partition(stack: StackLayers, stages: int) -> tuple[int, ...]:
    return min(_partitions(stack, stages), key=lambda one: max(one) - min(one))


def candidate_partitions(num_layers: int, stages: int) -> list[tuple[int, ...]]:
    """Candidate partitions of layers: any number in the last stage, the others as even as
    possible."""

    def partition(last: int) -> tuple[int, ...]:
        each, more = divmod(num_layers - last, stages - 1)
        # The first stage has the embedding, so it is the last to get an extra layer.
        extra = [int(n < more) for n in (*range(stages - 2), stages - 2)]
        return (each + extra[-1], *(each + n for n in extra[:-1]), last)

    return [partition(last) for last in range(1, -(-num_layers // stages) + 1)]


def best_partition(partitions: Sequence[tuple[int, ...]], makespans: Sequence[float]) -> int:
    """The index of the partition with the shortest makespan; of ties (to nine digits) the most
    even."""
    shortest = min(makespans)
    short = [n for n, one in enumerate(makespans) if one <= shortest * (1 + 1e-9)]
    return min(short, key=lambda n: max(partitions[n]) - min(partitions[n]))


def stage_costs(table: Table, layers: tuple[int, ...], head_cost: float) -> Costs:
    """Costs of each stage: a layer costs 1 in each of F, B and W, and in R if the table has R."""
    each = tuple(map(float, layers))
    recompute = each if (table.ops.kind == R).any() else 0.0
    return Costs(f=each, b=(*each[:-1], each[-1] + 3 * head_cost), w=each, r=recompute)
