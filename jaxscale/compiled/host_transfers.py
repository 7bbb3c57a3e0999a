"""Transfers between device memory and host memory in a compiled program."""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxscale.compiled import hlo
from jaxscale.compiled.collectives import Span, end_index, flops_in
from jaxscale.compiled.flops import computation_costs, instruction_flops
from jaxscale.compiled.hlo import Instruction, Program

_ARRAY = re.compile(r"\b([a-z]\w*\[[\d,]+\])(\{[^}]*\})?")
ON_HOST = "S(5)"
"""In the layout of an array: XLA's memory space of the host."""

MOVES = ("copy", "dynamic-slice", "dynamic-update-slice")
"""Operations that move an array, or an entry of it; asynchronous ones end in `-start`."""


@dataclass(frozen=True)
class HostTransfer:
    """One transfer of a program, or several of one array, and how often a call runs them."""

    array: str  # the argument read, or the type and dimensions of the array
    to_host: bool
    count: float  # runs
    num_bytes: float  # of one run
    overlapped_flops: float  # of one run: matmuls between its start and its end


def host_transfers(program: Program) -> list[HostTransfer]:
    """All transfers that a call of the program runs; transfers of one array, size, direction and
    computation are one entry, with the mean of the overlapped FLOPs."""
    runs, costs = program.executions(), computation_costs(program, instruction_flops, 1)
    found: dict[tuple, list[HostTransfer]] = collections.defaultdict(list)
    for name, instructions in program.computations.items():
        if not runs.get(name):
            continue
        named = {one.name: one for one in instructions}
        for index, one in enumerate(instructions):
            moved = _moved(one, named)
            if moved is None:
                continue
            shape, to_host = moved
            last = end_index(instructions, index) if one.opcode.endswith("-start") else index
            flops = flops_in(program, Span(name, index, last), costs)
            array = shape if to_host else _argument(program, name, one.operands[0]) or shape
            size = hlo.shape_bytes(shape)
            each = HostTransfer(array, to_host, runs[name], size, flops)
            found[array, to_host, size, name].append(each)
    return [_together(several) for several in found.values()]


def _together(several: list[HostTransfer]) -> HostTransfer:
    count = sum(one.count for one in several)
    flops = sum(one.count * one.overlapped_flops for one in several) / count
    return dataclasses.replace(several[0], count=count, overlapped_flops=flops)


def _moved(one: Instruction, named: Mapping[str, Instruction]) -> tuple[str, bool] | None:
    """The shape of the array on the device that an instruction moves, and whether to the host; None
    for other instructions."""
    if one.opcode.removesuffix("-start") not in MOVES:
        return None
    shapes = [one.shape]
    if not one.opcode.endswith("-start"):  # whose shape lists the operands
        shapes += [named[operand].shape for operand in one.operands if operand in named]
    arrays = [found for shape in shapes for found in _ARRAY.findall(shape)]
    if not arrays:
        return None
    hosted = [ON_HOST in layout for _, layout in arrays]
    if all(hosted) or not any(hosted):
        return None
    own = [shape for (shape, _), is_hosted in zip(arrays, hosted) if not is_hosted]
    # A copy's start lists its result first, a slice's operands first.
    results_first = one.opcode in ("copy-start", *MOVES)
    return min(own, key=_elements), hosted[0 if results_first else -1]


def _elements(shape: str) -> int:
    return math.prod(int(size) for size in re.findall(r"\d+", shape.partition("[")[2]))


def _argument(program: Program, computation: str, name: str) -> str:
    """The argument of the program that a value is, also through the carry of loops; "" if it is
    another value."""
    instructions = {one.name: one for one in program.computations[computation]}
    one, index = instructions.get(name), None
    while one is not None:
        if one.opcode == "get-tuple-element":
            index = int(one.attribute(r"index=(\d+)"))
        elif one.opcode == "tuple" and index is not None:
            one, index = instructions.get(one.operands[index]), None
            continue
        elif one.opcode == "parameter" and computation == program.entry:
            return one.op_name.replace("\\'", "'")
        elif one.opcode == "parameter":
            callers = _loops(program, computation)
            if not callers or index is None:
                return ""
            computation, one = callers[0]
            instructions = {each.name: each for each in program.computations[computation]}
        elif one.opcode not in ("while", "bitcast", "optimization-barrier"):
            return ""
        one = instructions.get(one.operands[0])
    return ""


def _loops(program: Program, body: str) -> list[tuple[str, Instruction]]:
    """The loops with a body, each with the computation that has it."""
    return [
        (name, one)
        for name, instructions in program.computations.items()
        for one in instructions
        if one.opcode == "while" and body in one.callees
    ]
