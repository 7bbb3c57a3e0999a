"""Which arrays of a compiled program are alive when it needs the most memory.

The compilers say how much they need and not for what. Here the schedule in the program's text is
replayed: an array lives from the instruction that makes it to the last one that reads it, and one
that is updated, or last read where another of its size is made, gives its place to that one.
Padding and fragments are not seen.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxscale import hlo
from jaxscale.hlo import Instruction, Program

SAME = ("bitcast", "tuple", "while", "optimization-barrier", "domain")
"""Instructions whose result is their operands, in place."""

_LEAF = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")


@dataclass(frozen=True)
class Buffer:
    """An array in device memory."""

    num_bytes: float
    shape: str  # such as "bf16[4,4096,11008]"
    op_name: str  # where in the traced program it is made
    argument: bool  # of the program: it is there from the start


@dataclass
class _Life:
    """A buffer, and the instructions from which and to which it lives."""

    buffer: Buffer
    start: int
    end: int
    outside: bool = False  # of this computation: whoever calls it counts it
    lent: bool = False  # an argument that is not donated


def live_at_peak(program: Program) -> list[Buffer]:
    """The buffers that are alive when the most bytes are, largest first."""
    peaks: dict[str, list[Buffer]] = {}
    for name in reversed(program.callers_first()):
        peaks[name] = _peak(program, name, peaks)
    return sorted(peaks[program.entry], key=lambda buffer: -buffer.num_bytes)


def _peak(program: Program, name: str, peaks: dict[str, list[Buffer]]) -> list[Buffer]:
    instructions = program.computations[name]
    lives = _lives(program, instructions, entry=name == program.entry)
    starts = {life.start for life in lives}
    best: list[Buffer] = []
    for i, instruction in enumerate(instructions):
        calls = instruction.opcode in ("while", "conditional", "call")
        if calls or i in starts:
            inside = max(
                (peaks[callee] for callee, _ in program.calls(instruction) if calls),
                key=_total, default=[],
            )  # fmt: skip
            alive = [life.buffer for life in lives if life.start <= i <= life.end]
            best = max(best, alive + inside, key=_total)
    return best


def _total(buffers: Sequence[Buffer]) -> float:
    return sum(buffer.num_bytes for buffer in buffers)


def _lives(program: Program, instructions: Sequence[Instruction], *, entry: bool) -> list[_Life]:
    """The buffers of a computation that have bytes and are its own."""
    lives: list[_Life] = []
    holds: dict[str, list[int]] = {}  # instruction -> places in `lives`, by leaf of its result
    begins: dict[str, int] = {}
    made: list[tuple[int, int, list[int]]] = []

    def make(buffer: Buffer, start: int, outside: bool = False) -> int:
        lives.append(_Life(buffer, start, start, outside))
        return len(lives) - 1

    for i, instruction in enumerate(instructions):
        read = [place for operand in instruction.operands for place in holds.get(operand, ())]
        for place in read:
            lives[place].end = i
        begins[instruction.name] = i
        if instruction.opcode == "parameter":
            result = [make(leaf, 0, not entry) for leaf in _leaves(instruction, argument=True)]
            lent = entry and int(instruction.rest.split(")")[0]) not in program.donated
            for place in result:
                lives[place].lent = lent
        elif instruction.opcode == "get-tuple-element":
            result = [read[int(instruction.attribute(r"index=(\d+)"))]]
        elif instruction.opcode in SAME:
            result = read
        elif instruction.opcode.endswith(("-start", "-update")):
            # What it makes is handed over by the `-done`, and is there from now on.
            result = read
            begins[instruction.name] = (
                min(begins.get(o, i) for o in (*instruction.operands, ""))
                if instruction.opcode.endswith("-update")
                else i
            )
        else:
            start = i
            if instruction.opcode.endswith("-done"):
                start = begins[instruction.operands[0]]
            result = []
            for leaf in _leaves(instruction):
                place = _updated(program, instruction, leaf, [(p, lives[p]) for p in read])
                if place is None:
                    place = make(leaf, start)
                    made.append((i, place, read))
                result.append(place)
        holds[instruction.name] = result
    for life in lives:
        if life.lent:
            life.end = len(instructions)
    for place in holds[instructions[-1].name]:
        lives[place].end = len(instructions)
    _share(lives, made)
    return [life for life in lives if not life.outside and life.buffer.num_bytes]


def _leaves(instruction: Instruction, argument: bool = False) -> list[Buffer]:
    """An array of each leaf of a result; 0 bytes for what is not in a device's main memory."""
    leaves = []
    for dtype, dims, arrangement in _LEAF.findall(instruction.shape):
        # Space 5 is the host's; a TPU, whose arrays have tiles T, keeps others on the chip.
        space = re.search(r"S\((\d+)\)", arrangement)
        elsewhere = space and (space[1] == "5" or "T(" in arrangement)
        sizes = [int(size) for size in dims.split(",") if size]
        num_bytes = 0 if elsewhere or dtype not in hlo.BYTES else hlo.array_bytes(dtype, sizes)
        leaves.append(Buffer(num_bytes, f"{dtype}[{dims}]", instruction.op_name, argument))
    return leaves


def _updated(
    program: Program, instruction: Instruction, leaf: Buffer, read: Sequence[tuple[int, _Life]]
) -> int | None:
    """The buffer that an instruction changes in part to make a leaf of its result."""
    updates = instruction.opcode in ("dynamic-update-slice", "scatter") or any(
        inner.opcode in ("dynamic-update-slice", "scatter") and inner.shape.startswith(leaf.shape)
        for callee, _ in program.calls(instruction)
        for inner in program.computations[callee]
    )
    if not updates:
        return None
    return next((place for place, life in read if life.buffer.shape == leaf.shape), None)


def _share(lives: Sequence[_Life], made: Sequence[tuple[int, int, list[int]]]) -> None:
    """Ends what is last read where an array of its size is made before that, which takes its
    place."""
    given = set()
    for i, place, read in made:
        for other in read:
            old, new = lives[other], lives[place]
            same = old.buffer.num_bytes == new.buffer.num_bytes and not old.lent
            if same and old.end == i and new.start == i and other not in given:
                given.add(other)
                old.end, new.outside = i - 1, old.outside
                break
