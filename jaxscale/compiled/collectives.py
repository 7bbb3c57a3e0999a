"""The collectives of a compiled program: runs, mesh axes, and the matmuls that overlap each.

Compilers write a collective in many forms: one instruction, or a start and a done; several arrays
in one; a call that a TPU's sparse cores run; one gather cut into pieces that are fused with the
computations that hide it. Runs count the trips of loops.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxscale.compiled import hlo
from jaxscale.compiled.flops import computation_costs, instruction_costs, instruction_flops
from jaxscale.compiled.hlo import Instruction, Program

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)

PRIMITIVES = {
    "all_gather": "all-gather",
    "psum_scatter": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
}
"""Last part of an `op_name` -> the kind of collective that the program asked for."""


class Subgroup(NamedTuple):
    """Groups of some ranks of one mesh axis, not of all."""

    size: int
    consecutive: bool  # whether a group is of neighbours; else of every (axis size / `size`)th rank


@dataclass(frozen=True)
class Collective:
    """One collective of a program, and how often one call of the program runs it."""

    kind: str  # of KINDS
    asked: str  # the kind that the program asked for; a compiler may replace it
    axes: tuple[str, ...]  # mesh axes that its groups span; () is a group of one device
    count: float  # runs
    arrays: int  # sent together
    # Of one run: the larger side, gathered or not yet scattered. For a ragged all-to-all, the rows
    # of the side without gaps, of which some may be empty.
    num_bytes: float
    asynchronous: bool
    overlapped_flops: float  # of one run: lower bound for matmuls between its start and its end
    op_name: str
    computation: str  # with its start
    first: int = 0  # index of its start in the computation
    last: int = 0  # index of its end
    link_seconds: float | None = None  # of one run; see `overlap.with_waits`
    wait_seconds: float | None = None  # of one run, exposed: the device waits for it
    subgroup: Subgroup | None = None  # of its axis; None if a group has all ranks of its axes


@dataclass(frozen=True)
class Span:
    """The instructions `first` to `last` of a computation, in which a collective is in flight."""

    computation: str
    first: int
    last: int


def collectives(
    program: Program, mesh: Mapping[str, int], between: tuple[str, ...] = ()
) -> list[Collective]:
    """All collectives that a call of the program runs.

    Args:
      mesh: axis -> size, in the order of the program's devices.
      between: the axes that use the network between TPU slices, through their hosts (DCN).
    """
    runs = program.executions()
    costs = computation_costs(program, instruction_flops, unknown_trips=1)
    callers = _callers(program)
    pieces: dict[tuple[str, str], list[tuple[str, Instruction]]] = {}
    for name, instructions in program.computations.items():
        for instruction in instructions:
            if instruction.opcode.removesuffix("-start") in KINDS and runs.get(name):
                # The TPU compiler may cut an asynchronous collective into pieces of one chain.
                chain = instruction.attribute(r'chain_id="(\d+)"')
                channel = instruction.attribute(r"channel_id=(\d+)") if chain else name
                key = (chain or instruction.name, channel)
                pieces.setdefault(key, []).append((name, instruction))
    found = []
    for members in pieces.values():
        home, instruction = members[0]
        kind = instruction.opcode.removesuffix("-start")
        span = _span(program, members, callers, runs)
        found.append(
            Collective(
                kind=kind,
                asked=PRIMITIVES.get(instruction.op_name.rsplit("/", 1)[-1], kind),
                axes=_axes(instruction, mesh),
                subgroup=_subgroup(instruction, mesh, kind),
                count=runs[span.computation],
                arrays=len(_parts(instruction)),
                num_bytes=_payload(program.computations[home], instruction, kind),
                asynchronous=span.last > span.first,
                overlapped_flops=flops_in(program, span, costs),
                op_name=instruction.op_name,
                computation=span.computation,
                first=span.first,
                last=span.last,
            )
        )
    return found + list(_between_slices(program, between, runs, costs))


def _between_slices(
    program: Program,
    between: tuple[str, ...],
    runs: Mapping[str, float],
    costs: Mapping[str, float],
) -> Iterator[Collective]:
    """Collectives between slices, which hosts carry out: a send to the host, later a receive."""
    for name, instructions in program.computations.items():
        for index, instruction in enumerate(instructions):
            transfer = instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"')
            if instruction.opcode == "send" and transfer and runs.get(name):
                kind = transfer.lower().replace("_", "-")
                where = Span(name, index, end_index(instructions, index))
                yield Collective(
                    kind=kind,
                    asked=kind,
                    axes=between,
                    count=runs[name],
                    arrays=1,
                    num_bytes=hlo.array_bytes(*hlo.arrays(instruction.shape)[0]),
                    asynchronous=True,
                    overlapped_flops=flops_in(program, where, costs),
                    op_name=instruction.op_name,
                    computation=name,
                    first=where.first,
                    last=where.last,
                )


def _callers(program: Program) -> dict[str, tuple[str, int]]:
    """Computation -> the computation that calls it and the index of the call there."""
    return {
        callee: (name, i)
        for name, instructions in program.computations.items()
        for i, instruction in enumerate(instructions)
        for callee, _ in program.calls(instruction)
    }


def _span(
    program: Program,
    members: list[tuple[str, Instruction]],
    callers: Mapping[str, tuple[str, int]],
    runs: Mapping[str, float],
) -> Span:
    """The span from the start to the end of a collective, in the computation that has both."""
    positions = [_position(program, name, instruction, callers) for name, instruction in members]
    # Pieces between start and end may be in a loop, so these two run least often.
    home = min((name for name, _ in positions), key=lambda name: runs[name])
    at = sorted(i for name, i in positions if name == home)
    first, last = at[0], at[-1]
    if program.computations[home][first].opcode.endswith("-start"):
        last = end_index(program.computations[home], first)
    return Span(home, first, last)


def _position(
    program: Program, name: str, instruction: Instruction, callers: Mapping[str, tuple[str, int]]
) -> tuple[str, int]:
    """The computation and index of a collective, or of the fusion or async call around it."""
    index = program.computations[name].index(instruction)
    while name in callers:
        caller, i = callers[name]
        opcode = program.computations[caller][i].opcode
        if opcode in ("while", "conditional", "call"):
            break
        name, index = caller, i
    return name, index


def end_index(instructions: tuple[Instruction, ...], start: int) -> int:
    """The index of the `-done` of a `-start`, which `-update`s may precede."""
    following = {instructions[start].name}
    for i, instruction in enumerate(instructions[start + 1 :], start + 1):
        if following & set(instruction.operands):
            if instruction.opcode.endswith("-done"):
                return i
            if instruction.opcode.endswith("-update"):
                following.add(instruction.name)
    return len(instructions) - 1


def flops_in(program: Program, span: Span, costs: Mapping[str, float]) -> float:
    """FLOPs of the matmuls of a span, given the costs of computations; 0 of one instruction."""
    if span.first == span.last:
        return 0.0
    each = instruction_costs(program, span.computation, instruction_flops, costs, unknown_trips=1)
    return sum(each[span.first : span.last + 1])


def _parts(instruction: Instruction) -> list[float]:
    """Bytes of each array of the shape; only of the results, if a start lists operands, too."""
    sizes = [hlo.array_bytes(*array) for array in hlo.arrays(instruction.shape)]
    nested = instruction.shape.startswith("((")
    if instruction.opcode == "collective-permute-start" and not nested:
        return sizes[:1]  # then the result and, on TPUs, values for the done
    lists_both = nested or instruction.opcode == "all-gather-start"
    return sizes[len(sizes) // 2 :] if lists_both else sizes


def _payload(computation: Sequence[Instruction], instruction: Instruction, kind: str) -> float:
    if kind == "ragged-all-to-all":
        sides = [one.shape for one in computation if one.name in instruction.operands[:2]]
        return min(hlo.array_bytes(*hlo.arrays(shape)[0]) for shape in sides)
    num_bytes = sum(_parts(instruction))
    if kind == "reduce-scatter":
        num_bytes *= len(_groups(instruction)[0])
    return num_bytes


def _groups(instruction: Instruction) -> list[list[int]]:
    """Devices of each group, by their index in the mesh."""
    for pattern, read in _GROUPS.items():
        if found := re.search(pattern, instruction.rest):
            return read(*found.groups())
    return [[0]]


def _numbers(text: str | None) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", text or "")]


def _groups_by_names(mesh: str, names: str) -> list[list[int]]:
    sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    spanned = re.findall(r"'(\w+)'", names)
    places = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    kept = [i for i, axis in enumerate(sizes) if axis not in spanned]
    gone = [i for i, axis in enumerate(sizes) if axis in spanned]
    width = math.prod(places.shape[i] for i in gone)
    return places.transpose(*kept, *gone).reshape(-1, width).tolist()


def _groups_by_iota(shape: str, source: str, order: str | None) -> list[list[int]]:
    places = np.arange(math.prod(_numbers(source))).reshape(_numbers(source))
    dims = _numbers(order) or range(places.ndim)
    return places.transpose(dims).reshape(_numbers(shape)).tolist()


_GROUPS: dict[str, Callable[..., list[list[int]]]] = {
    r"source_target_pairs=\{(.*?\})\}": lambda text: [
        [int(x) for x in pair] for pair in re.findall(r"(\d+),(\d+)", text)
    ],
    r"replica_groups=mesh\[(.*?)\] \{(.*?)\}": _groups_by_names,
    r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?": _groups_by_iota,
    r"replica_groups=\{(\{.*?\})\}": lambda text: [
        _numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)
    ],
}
"""The forms in which HLO text lists the groups of a collective."""


def _axes(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[str, ...]:
    sizes = tuple(mesh.values())
    spanned = set()
    for group in _groups(instruction):
        if max(group) >= math.prod(sizes):
            raise ValueError(
                f"{instruction.name} runs on device {max(group)} and the mesh "
                f"{dict(mesh)} has {math.prod(sizes)}"
            )
        places = np.array(np.unravel_index(group, sizes))
        spanned |= {i for i, row in enumerate(places) if len(set(row.tolist())) > 1}
    return tuple(axis for i, axis in enumerate(mesh) if i in spanned)


def _subgroup(instruction: Instruction, mesh: Mapping[str, int], kind: str) -> Subgroup | None:
    axes = _axes(instruction, mesh)
    if len(axes) != 1 or kind == "collective-permute":
        return None
    (axis,), group = axes, _groups(instruction)[0]
    places = np.unravel_index(group, tuple(mesh.values()))[list(mesh).index(axis)]
    if len(group) == mesh[axis]:
        return None
    return Subgroup(len(group), int(np.ptp(places)) == len(group) - 1)


def summed(found: Iterable[Collective]) -> list[Collective]:
    """Sums collectives of the same kind, ranks and asynchrony to rows: runs, and the bytes, seconds
    and `overlapped_flops` of all runs.

    A row has either only collectives that overlap with matmuls or only exposed ones.
    """

    def key(one: Collective) -> tuple:
        part = one.subgroup or ()
        return one.axes, part, one.kind, one.asked, one.asynchronous, one.overlapped_flops > 0

    def total(members: list[Collective], field: str) -> Any:
        each = [getattr(one, field) for one in members]
        return None if None in each else sum(one.count * x for one, x in zip(members, each))

    rows = []
    for (axes, part, kind, asked, asynchronous, _), group in itertools.groupby(
        sorted(found, key=key), key
    ):
        members = list(group)
        names = ("num_bytes", "overlapped_flops", "link_seconds", "wait_seconds")
        rows.append(
            Collective(
                kind=kind,
                asked=asked,
                axes=axes,
                count=sum(one.count for one in members),
                arrays=sum(round(one.count * one.arrays) for one in members),
                asynchronous=asynchronous,
                subgroup=part or None,
                op_name="",
                computation="",
                **{name: total(members, name) for name in names},
            )
        )
    return rows
