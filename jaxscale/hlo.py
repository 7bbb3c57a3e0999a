"""Reads a compiled program's text: its collectives, how often each runs, and over which mesh axes.

The compilers write them in many ways: one instruction or a start and a done; several arrays in one;
on TPUs one gather cut into pieces that are fused with the computations that hide it. Loops are
multiplied out by their trip counts.
"""

import collections
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2,
    "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
    "c64": 8, "c128": 16,
}  # fmt: skip
"""Of an element."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLS = re.compile(
    r"\b(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED = re.compile(r"\b(?:branch|called)_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Instruction:
    """A line of a program."""

    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes

    def attribute(self, pattern: str) -> str:
        """The first group of a regular expression in the attributes, or ""."""
        found = re.search(pattern, self.rest)
        return found[1] if found else ""

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from."""
        return self.attribute(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Program:
    """A compiled program, as its computations."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str

    def executions(self) -> dict[str, float]:
        """How often each computation runs in one call; nan where a loop's trips are not known."""
        runs: dict[str, float] = collections.defaultdict(float)
        runs[self.entry] = 1
        for name in self._callers_first():
            for instruction in self.computations[name]:
                for callee, times in self._calls(instruction):
                    runs[callee] += runs[name] * times
        return dict(runs)

    def _calls(self, instruction: Instruction) -> list[tuple[str, float]]:
        callees = _CALLS.findall(instruction.rest)
        for listed in _CALLED.findall(instruction.rest):
            callees += [name.strip().lstrip("%") for name in listed.split(",")]
        times = self.trips(instruction) if instruction.opcode == "while" else 1
        return [(callee, times) for callee in callees if callee in self.computations]

    def trips(self, loop: Instruction) -> float:
        """How often a `while` runs its body; nan where that is only known when it runs."""
        known = loop.attribute(r'known_trip_count"?:\{"?n"?:"?(\d+)')
        if known:
            return int(known)
        return self._counted_trips(loop)

    def _counted_trips(self, loop: Instruction) -> float:
        """From a condition `counter < constant`, for loops that `lax.scan` makes."""
        condition = self.computations.get(loop.attribute(r"condition=%?([\w.\-]+)"), ())
        constants = [
            int(value)
            for instruction in self._reachable(condition)
            if instruction.opcode == "constant" and re.match(r"[su]32\[\]", instruction.shape)
            if (value := re.match(r"(\d+)\)", instruction.rest)) and (value := value[1])
        ]
        return constants[0] if len(constants) == 1 else math.nan

    def _reachable(self, instructions: Iterable[Instruction]) -> Iterable[Instruction]:
        for instruction in instructions:
            yield instruction
            for callee in _CALLS.findall(instruction.rest):
                yield from self.computations.get(callee, ())

    def _callers_first(self) -> list[str]:
        order: list[str] = []
        seen: set[str] = set()

        def visit(name: str) -> None:
            seen.add(name)
            for instruction in self.computations[name]:
                for callee, _ in self._calls(instruction):
                    if callee not in seen:
                        visit(callee)
            order.append(name)

        visit(self.entry)
        return order[::-1]


@dataclass(frozen=True)
class Collective:
    """One collective of a program, with all its runs in a call."""

    kind: str  # of KINDS
    axes: tuple[str, ...]  # mesh axes that its groups span; () is a group of one device
    count: float  # runs
    arrays: int  # that travel together
    num_bytes: float  # of one run: the whole arrays on one side, gathered or not yet scattered
    asynchronous: bool
    op_name: str
    computation: str


def parse(text: str) -> Program:
    """A program from `compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.append(Instruction(*found.groups()))
    if not entry:
        raise ValueError("not the text of a compiled program: it has no ENTRY computation")
    return Program({name: tuple(body) for name, body in computations.items()}, entry)


def collectives(program: Program, mesh: Mapping[str, int]) -> list[Collective]:
    """Every collective that a call runs.

    Args:
      mesh: axis -> size, in the order in which the program's devices are laid out.
    """
    runs, found, pieces = program.executions(), [], set()
    for name, instructions in program.computations.items():
        for instruction in instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS or not runs.get(name):
                continue
            if chain := instruction.attribute(r'chain_id="(\d+)"'):
                # A piece of a collective that a TPU runs beside computations.
                piece = (chain, instruction.attribute(r"channel_id=(\d+)"))
                if piece in pieces:
                    continue
                pieces.add(piece)
            found.append(
                Collective(
                    kind=kind,
                    axes=_axes(instruction, mesh),
                    count=runs[name],
                    arrays=_arrays(instruction),
                    num_bytes=_payload(instruction, kind),
                    asynchronous=bool(chain) or instruction.opcode.endswith("-start"),
                    op_name=instruction.op_name,
                    computation=name,
                )
            )
    return found


def shape_bytes(shape: str) -> float:
    """Bytes of every array in a shape, such as "(f32[2,3]{1,0}, bf16[])"."""
    return sum(size for size in _sizes(shape))


def _sizes(shape: str) -> list[float]:
    return [
        BYTES[dtype] * math.prod(int(size) for size in dims.split(",") if size)
        for dtype, dims in _SHAPE.findall(shape)
        if dtype in BYTES
    ]


def _parts(instruction: Instruction) -> list[str]:
    """The shape's arrays; for a start that lists operands and results, only the results."""
    shapes = [f"{dtype}[{dims}]" for dtype, dims in _SHAPE.findall(instruction.shape)]
    lists_both = instruction.shape.startswith("((") or (
        instruction.opcode in ("all-gather-start", "collective-permute-start")
    )
    return shapes[len(shapes) // 2 :] if lists_both else shapes


def _arrays(instruction: Instruction) -> int:
    if instruction.opcode == "collective-permute-start":
        return 1
    return len(_parts(instruction))


def _payload(instruction: Instruction, kind: str) -> float:
    if instruction.opcode == "collective-permute-start":
        return _sizes(instruction.shape)[0]
    num_bytes = shape_bytes(" ".join(_parts(instruction)))
    if kind == "reduce-scatter":
        num_bytes *= len(_groups(instruction)[0])
    return num_bytes


def _groups(instruction: Instruction) -> list[list[int]]:
    """Devices of each group, by their place in the mesh."""
    rest = instruction.rest
    if pairs := re.search(r"source_target_pairs=\{(.*?\})\}", rest):
        return [[int(x) for x in pair] for pair in re.findall(r"(\d+),(\d+)", pairs[1])]
    if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", rest):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        spanned = re.findall(r"'(\w+)'", named[2])
        places = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        names = list(sizes)
        kept = [i for i, axis in enumerate(names) if axis not in spanned]
        gone = [i for i, axis in enumerate(names) if axis in spanned]
        width = math.prod(places.shape[i] for i in gone)
        return places.transpose(*kept, *gone).reshape(-1, width).tolist()
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        shape, source, order = (
            [int(x) for x in (group or "").split(",") if x] for group in iota.groups()
        )
        places = np.arange(math.prod(source)).reshape(source)
        return places.transpose(order or range(len(source))).reshape(shape).tolist()
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", rest):
        groups = re.findall(r"\{([\d,]*)\}", listed[1])
        return [[int(x) for x in group.split(",")] for group in groups if group]
    return [[0]]


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


def summed(found: Iterable[Collective]) -> list[Collective]:
    """Those of one kind, axes and way of running as one: runs added up, `num_bytes` of all runs."""

    def key(one: Collective) -> tuple:
        return one.kind, one.axes, one.asynchronous

    rows = []
    for (kind, axes, asynchronous), group in itertools.groupby(sorted(found, key=key), key):
        members = list(group)
        rows.append(
            Collective(
                kind=kind,
                axes=axes,
                count=sum(one.count for one in members),
                arrays=sum(round(one.count * one.arrays) for one in members),
                num_bytes=sum(one.count * one.num_bytes for one in members),
                asynchronous=asynchronous,
                op_name="",
                computation="",
            )
        )
    return rows
