"""The order in which XLA:CPU starts the collectives of a compiled program.

XLA:CPU runs the instructions of a computation concurrently unless one writes a buffer that the
other reads or writes. Collectives of one computation start in the scheduled order. A loop does not
count as one: while it runs, a later collective starts, in an order with the loop's own collectives
that differs from rank to rank (`execution_graph.cc` and `thunk_executor.cc` of openxla/xla, jaxlib
0.12).
"""

import functools
import pathlib
import re
from typing import Any, NamedTuple

from jaxscale.compiled.hlo import Instruction, Program, parse_hlo

COLLECTIVES = {"collective-permute", "all-gather", "all-reduce", "reduce-scatter", "all-to-all"}
LOOPS = {"while", "call", "conditional"}
WITHOUT_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}

Slice = tuple[int, int, int]  # allocation, begin, end


class Uses(NamedTuple):
    reads: frozenset[Slice]
    writes: frozenset[Slice]

    def conflicts(self, later: "Uses") -> bool:
        return _overlap(self.writes, later.reads | later.writes) or _overlap(
            self.reads, later.writes
        )


def _overlap(some: frozenset[Slice], others: frozenset[Slice]) -> bool:
    return any(a == b and c < f and e < d for a, c, d in some for b, e, f in others)


def dump_options(folder: pathlib.Path) -> dict[str, Any]:
    """Options of a compile that writes what `unordered` reads."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def unordered(folder: pathlib.Path) -> list[tuple[str, str]]:
    """Scopes of each loop with collectives, and of each collective or such loop that comes later in
    its computation and does not wait for it.

    Args:
      folder: has the dump of one program.
    """

    def read(suffix: str) -> str:
        (found,) = folder.glob(f"*.cpu_after_optimizations{suffix}.txt")
        return found.read_text()

    program = parse_hlo(read(""))
    slices = _slices(read("-buffer-assignment"), read("-buffer-assignment-values"))

    @functools.cache
    def communicates(instruction: Instruction) -> bool:
        return instruction.opcode in COLLECTIVES or (
            instruction.opcode in LOOPS and any(map(communicates, _called(program, instruction)))
        )

    @functools.cache
    def uses(instruction: Instruction) -> Uses:
        if instruction.opcode in LOOPS:
            found = [uses(one) for one in _called(program, instruction)]
            return Uses(*(frozenset[Slice]().union(*sets) for sets in zip(*found)))
        if instruction.opcode in WITHOUT_KERNEL:
            return Uses(frozenset(), frozenset())
        operands = re.findall(r"%([\w.\-]+)(?:#(\d+))?", instruction.rest.split("), ")[0])
        read = (slices.get((name, index)) for name, index in operands)
        written = (place for (name, _), place in slices.items() if name == instruction.name)
        return Uses(frozenset(filter(None, read)), frozenset(written))

    found = []
    for name in program.callers_first():
        body = [i for i in program.computations[name] if i.opcode not in WITHOUT_KERNEL]
        for number, loop in enumerate(body):
            if loop.opcode not in LOOPS or not communicates(loop):
                continue
            waiting = [uses(loop)]
            for later in body[number + 1 :]:
                if any(one.conflicts(uses(later)) for one in waiting):
                    waiting.append(uses(later))
                elif communicates(later):
                    found.append((loop.op_name, later.op_name))
    return found


def _called(program: Program, loop: Instruction) -> list[Instruction]:
    return [one for name in loop.callees for one in program.computations.get(name, ())]


def _slices(assignment: str, values: str) -> dict[tuple[str, str], Slice]:
    """The slice of each instruction's result, by its name and its index in a tuple, or ""."""
    by_value, allocation = {}, 0
    for line in assignment.splitlines():
        if found := re.match(r"allocation (\d+):", line):
            allocation = int(found[1])
        elif found := re.match(r" value: <(\d+) .*\(size=(\d+),offset=(\d+)\)", line):
            value, size, offset = map(int, found.groups())
            by_value[value] = allocation, offset, offset + size
    places, current, positions = {}, None, False
    for line in values.splitlines():
        if found := re.match(r"<(\d+) ", line):
            current = by_value.get(int(found[1]))
        elif re.match(r" \w", line):
            positions = line == " positions:"
        elif positions and current and (found := re.match(r"  ([\w.\-]+)(?: \{(\d*)\})?$", line)):
            places[found[1], found[2] or ""] = current
    return places
