"""The buffers that are live at the peak memory of a compiled program.

Compilers report the amount of memory but not its contents. Here the instruction schedule in the
program's text is replayed: an array is live from the instruction that defines it to its last use.
An array that is updated in place, or whose last use defines an array of the same size, shares its
buffer with the new one. Padding and fragmentation are not modelled.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxscale.compiled import hlo
from jaxscale.compiled.hlo import Instruction, Program

SAME = ("bitcast", "while", "opt-barrier", "domain")
"""Instructions whose result aliases their operand."""

Indices = Any
"""The buffer of a result: an index into a list of buffers, or for a tuple a list of these."""

_LEAF = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?|[()]")


@dataclass(frozen=True)
class Buffer:
    """An array in device memory."""

    num_bytes: float
    shape: str  # such as "bf16[4,4096,11008]"
    op_name: str  # scope and primitive in the traced program
    argument: bool  # of the program: live from the start


@dataclass
class _Life:
    """A buffer and its live range, in instructions."""

    buffer: Buffer
    start: int
    end: int
    outside: bool = False  # allocated and counted by the caller
    kept: bool = False  # an argument that is not donated


def live_at_peak(program: Program) -> list[Buffer]:
    """The buffers that are live at peak memory, largest first."""
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
                key=_total,
                default=[],
            )
            alive = [life.buffer for life in lives if life.start <= i <= life.end]
            best = max(best, alive + inside, key=_total)
    return best


def _total(buffers: Sequence[Buffer]) -> float:
    return sum(buffer.num_bytes for buffer in buffers)


@dataclass
class _Replay:
    """The state of the replay of a computation."""

    entry: bool  # whether it is the program's entry computation
    lives: list[_Life] = field(default_factory=list)
    results: dict[str, Indices] = field(default_factory=dict)  # result -> indices in `lives`
    begins: dict[str, int] = field(default_factory=dict)  # index of it, or of its start
    # New buffers: the defining instruction, index in `lives`, indices of the operands.
    made: list[tuple[int, int, list[int]]] = field(default_factory=list)

    def add(self, buffer: Buffer, start: int, *, outside: bool = False, kept: bool = False) -> int:
        """Allocates a buffer; returns its index."""
        self.lives.append(_Life(buffer, start, start, outside, kept))
        return len(self.lives) - 1

    def read(self, indices: Indices, at: int) -> None:
        """Keeps buffers live up to an instruction."""
        for index in _flat(indices):
            self.lives[index].end = at


def _lives(program: Program, instructions: Sequence[Instruction], *, entry: bool) -> list[_Life]:
    """The live ranges of the buffers that a computation allocates, without its callees."""
    replay = _Replay(entry)
    for i, instruction in enumerate(instructions):
        operands = [replay.results.get(operand, []) for operand in instruction.operands]
        if instruction.opcode != "get-tuple-element":  # selects an array without reading it
            replay.read(operands, i)
        replay.begins[instruction.name] = i
        if instruction.opcode.endswith(("-update", "-done")):
            replay.begins[instruction.name] = replay.begins[instruction.operands[0]]
        replay.results[instruction.name] = _result(program, replay, i, instruction, operands)
    replay.read(replay.results[instructions[-1].name], len(instructions))
    for life in replay.lives:
        if life.kept:
            life.end = len(instructions)
    _share(replay)
    return [life for life in replay.lives if not life.outside and life.buffer.num_bytes]


def _result(
    program: Program, replay: _Replay, i: int, instruction: Instruction, operands: list[Indices]
) -> Indices:
    """The buffers of an instruction's result: those of its operands, or new ones."""
    if instruction.opcode == "parameter":
        kept = replay.entry and int(instruction.rest.split(")")[0]) not in program.donated
        new = functools.partial(replay.add, start=0, outside=not replay.entry, kept=kept)
        return _leaves(instruction, new)
    if instruction.opcode == "get-tuple-element":
        return operands[0][int(instruction.attribute(r"index=(\d+)"))]
    if instruction.opcode == "tuple":
        return operands
    if instruction.opcode in SAME:
        return operands[0]
    read = _flat(operands)
    if instruction.opcode.endswith(("-start", "-update")):
        return read  # the result of a start is defined by its `-done`
    return _leaves(
        instruction, functools.partial(_buffer_of, program, replay, i, instruction, read)
    )


def _buffer_of(
    program: Program,
    replay: _Replay,
    i: int,
    instruction: Instruction,
    read: list[int],
    leaf: Buffer,
) -> int:
    """The buffer of a leaf of a result: an operand's, if updated in place; else a new one, live
    from the start of an asynchronous instruction."""
    index = _updated(program, instruction, leaf, [(p, replay.lives[p]) for p in read])
    if index is None:
        index = replay.add(leaf, replay.begins[instruction.name])
        replay.made.append((i, index, read))
    return index


def _flat(indices: Indices) -> list[int]:
    """All buffer indices, tuples flattened."""
    if isinstance(indices, int):
        return [indices]
    return [index for inner in indices for index in _flat(inner)]


def _leaves(instruction: Instruction, allocate: Callable[[Buffer], int]) -> Indices:
    """The buffers of a result's arrays, nested like the result; arrays outside the device's main
    memory have 0 bytes."""
    tuples: list[list[Indices]] = [[]]
    for found in _LEAF.finditer(instruction.shape):
        if found[0] == "(":
            tuples.append([])
        elif found[0] == ")":
            inner = tuples.pop()
            tuples[-1].append(inner)
        else:
            tuples[-1].append(allocate(_leaf(instruction, *found.groups())))
    return tuples[0][0]


def _leaf(instruction: Instruction, dtype: str, dims: str, arrangement: str | None) -> Buffer:
    # Memory space 5 is host memory; on TPUs, whose layouts have tiles T, others are on-chip.
    space = re.search(r"S\((\d+)\)", arrangement or "")
    elsewhere = space and (space[1] == "5" or "T(" in (arrangement or ""))
    sizes = [int(size) for size in dims.split(",") if size]
    num_bytes = 0 if elsewhere or dtype not in hlo.BYTES else hlo.array_bytes(dtype, sizes)
    argument = instruction.opcode == "parameter"
    return Buffer(num_bytes, f"{dtype}[{dims}]", instruction.op_name, argument)


def _updated(
    program: Program, instruction: Instruction, leaf: Buffer, read: Sequence[tuple[int, _Life]]
) -> int | None:
    """The buffer that an instruction updates in place for a leaf of its result."""
    updates = instruction.opcode in ("dynamic-update-slice", "scatter") or any(
        inner.opcode in ("dynamic-update-slice", "scatter") and inner.shape.startswith(leaf.shape)
        for callee, _ in program.calls(instruction)
        for inner in program.computations[callee]
    )
    if not updates:
        return None
    return next((index for index, life in read if life.buffer.shape == leaf.shape), None)


def _share(replay: _Replay) -> None:
    """Ends live ranges whose last use defines an array of the same size, which takes over the
    buffer."""
    given = set()
    for i, index, read in replay.made:
        new = replay.lives[index]
        for other in read:
            old = replay.lives[other]
            same = old.buffer.num_bytes == new.buffer.num_bytes and not old.kept
            if same and old.end == i and new.start == i and other not in given:
                given.add(other)
                old.end, new.outside = i - 1, old.outside
                break
