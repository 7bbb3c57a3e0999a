"""How long a device waits for its collectives, by simulating a compiled program's schedule."""

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
    """The collectives with their seconds on the links, and those of them that are exposed.

    The links carry one collective at a time, in the order in which they are started, as XLA's
    stream for them does, so that several of them share the matmuls that they overlap with. The
    device waits where it needs a result that has not arrived. `wait_seconds` are the part of a
    collective's time on the links in which the device waits, for it or for one queued after it.

    Only matmuls take time here, so this is an upper bound of the waiting, as far as the seconds on
    the links are right. Each computation is simulated alone, from idle links: that collectives in
    a loop delay one that is in flight across the loop is not counted.

    Args:
      program: the compiled program.
      found: as `collectives.collectives` returns them.
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
    """The collectives of one computation.

    Args:
      seconds: of compute, of each instruction.
    """
    places = collections.defaultdict(list)
    for i, one in enumerate(members):
        places[one.first, "start"].append(i)
        # A collective that ends where it starts overlaps nothing, not even what it is fused with.
        places[one.last, "end" if one.last > one.first else "at once"].append(i)
    clock = links = 0.0  # when the device, and the links, have finished all so far
    sent: list[tuple[float, float]] = [(0.0, 0.0)] * len(members)  # begin and end on the links
    waits = [0.0] * len(members)

    def wait(ending: list[int]) -> None:
        nonlocal clock
        if not ending:
            return
        arrival = max([clock, *(sent[i][1] for i in ending)])
        for i, (begin, end) in enumerate(sent):
            waits[i] += max(0.0, min(end, arrival) - max(begin, clock))
        clock = arrival

    for place, computing in enumerate(seconds):
        for i in places[place, "start"]:
            begin = max(links, clock)
            links = begin + (members[i].link_seconds or 0.0)
            sent[i] = begin, links
        wait(places[place, "at once"])
        clock += computing
        wait(places[place, "end"])
    return [dataclasses.replace(one, wait_seconds=wait) for one, wait in zip(members, waits)]
