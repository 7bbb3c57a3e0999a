"""Exposed time of collectives, by a simulation of a compiled program's schedule."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxscale.compiled.collectives import Collective
from jaxscale.compiled.flops import computation_costs, instruction_costs, instruction_flops
from jaxscale.compiled.hlo import Program


def with_waits(
    program: Program,
    found: Iterable[Collective],
    link_seconds: Callable[[Collective], float],
    flops_per_second: float,
) -> list[Collective]:
    """Adds to the collectives their seconds on the links and the exposed part of these.

    The links run one collective at a time, in the order of the starts, like XLA's stream for
    collectives, so that several of them share the matmuls with which they overlap. The device
    waits for a result that has not arrived. `wait_seconds` is the part of a collective's time on
    the links in which the device waits, for it or for one queued after it.

    Only matmuls take time here, so this is an upper bound of the exposed time, if the seconds on
    the links are right. Each computation is simulated alone, from idle links: delays of a
    collective in flight across a loop by collectives in the loop are not counted.

    Args:
      program: the compiled program.
      found: the result of `collectives.collectives`.
      link_seconds: of one run, alone on its links.
      flops_per_second: of the device, in matmuls.
    """
    costs = computation_costs(program, instruction_flops, unknown_trips=1)
    homes = collections.defaultdict(list)
    for one in found:
        homes[one.computation].append(dataclasses.replace(one, link_seconds=link_seconds(one)))
    simulated = []
    for name, members in homes.items():
        each = instruction_costs(program, name, instruction_flops, costs, unknown_trips=1)
        simulated += _simulate(members, [cost / flops_per_second for cost in each])
    return simulated


def _simulate(members: Sequence[Collective], seconds: Sequence[float]) -> list[Collective]:
    """Adds exposed seconds to the collectives of one computation.

    Args:
      seconds: compute time of each instruction.
    """
    events = collections.defaultdict(list)
    for i, one in enumerate(members):
        events[one.first, "start"].append(i)
        # A synchronous collective overlaps nothing, not even the computation it is fused with.
        events[one.last, "end" if one.last > one.first else "at once"].append(i)
    clock = links = 0.0  # time at which the device, and the links, are free
    sent: list[tuple[float, float]] = [(0.0, 0.0)] * len(members)  # start and end on the links
    waits = [0.0] * len(members)

    def wait(ending: list[int]) -> None:
        nonlocal clock
        if not ending:
            return
        arrival = max([clock, *(sent[i][1] for i in ending)])
        for i, (begin, end) in enumerate(sent):
            waits[i] += max(0.0, min(end, arrival) - max(begin, clock))
        clock = arrival

    for position, computing in enumerate(seconds):
        for i in events[position, "start"]:
            begin = max(links, clock)
            links = begin + (members[i].link_seconds or 0.0)
            sent[i] = begin, links
        wait(events[position, "at once"])
        clock += computing
        wait(events[position, "end"])
    return [dataclasses.replace(one, wait_seconds=wait) for one, wait in zip(members, waits)]
