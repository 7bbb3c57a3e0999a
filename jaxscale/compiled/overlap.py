"""How long a device waits for its collectives: a compiled program's schedule, played."""

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
    """The collectives with their seconds on the links and those that the device waits for.

    Several of them share the matmuls that run beside them: the links carry one collective after
    another, in the order in which they are started, as XLA's own stream for them does, and the
    device waits where it needs a result that has not arrived. A collective's `wait_seconds` are
    those of its time on the links in which the device waits, for it or for one behind it.

    Only matmuls take time here, so the device waits no longer than this says, as far as the
    seconds on the links are right. Each computation is played by itself, from idle links: what a
    loop's own collectives take from one that is under way around the loop is not counted.

    Args:
      program: the one that they are of.
      found: as `collectives.collectives` returns them.
      link_seconds: of one run, alone on its links.
      flops_per_second: at which the device does matmuls.
    """
    costs = computation_costs(program, instruction_flops, unknown_trips=1)
    homes = collections.defaultdict(list)
    for one in found:
        homes[one.computation].append(dataclasses.replace(one, link_seconds=link_seconds(one)))
    played = []
    for name, members in homes.items():
        each = instruction_costs(program, name, instruction_flops, costs, unknown_trips=1)
        played += _play(members, [cost / flops_per_second for cost in each])
    return played


def _play(members: Sequence[Collective], seconds: Sequence[float]) -> list[Collective]:
    """Those of one computation, whose instructions compute for so long."""
    places = collections.defaultdict(list)
    for i, one in enumerate(members):
        places[one.first, "start"].append(i)
        # One that ends where it starts has nothing beside it, not even what it is fused with.
        places[one.last, "end" if one.last > one.first else "at once"].append(i)
    clock = links = 0.0  # when the device, and the links, are done with all so far
    sent: list[tuple[float, float]] = [(0.0, 0.0)] * len(members)  # from when until when
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
