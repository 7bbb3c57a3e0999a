"""Parses the HLO text of a compiled program: computations, and the number of runs of each."""

import collections
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxscale.training.layers.layer_scan import ONE_LAYER

BYTES = {
    "pred": 1,
    "s4": 0.5,
    "u4": 0.5,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "c64": 8,
    "c128": 16,
}
"""Bytes per element."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLS = re.compile(
    r"\b(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED = re.compile(r"\b(?:branch|called)_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Instruction:
    """An HLO instruction."""

    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes

    def attribute(self, pattern: str) -> str:
        """The first group of a regular expression found in the attributes, or ""."""
        found = re.search(pattern, self.rest)
        return found[1] if found else ""

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        return tuple(re.findall(r"%([\w.\-]+)", self.rest.split(")", 1)[0]))

    @functools.cached_property  # read in several passes over a program
    def callees(self) -> tuple[str, ...]:
        """Names of the computations that it calls."""
        listed = ",".join(_CALLED.findall(self.rest))
        more = (name.strip().lstrip("%") for name in listed.split(",") if name)
        return (*_CALLS.findall(self.rest), *more)

    @property
    def op_name(self) -> str:
        """Its scope and primitive in the traced program."""
        return self.attribute(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Program:
    """A compiled program, as its computations."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    donated: frozenset[int] = frozenset()  # donated arguments
    scopes: Mapping[str, float] = field(default_factory=dict)  # see `parse_hlo`

    def executions(self) -> dict[str, float]:
        """Runs of each computation in one call; nan if a trip count is unknown."""
        runs: dict[str, float] = collections.defaultdict(float)
        runs[self.entry] = 1
        for name in self.callers_first():
            for instruction in self.computations[name]:
                for callee, times in self.calls(instruction):
                    runs[callee] += runs[name] * times
        return dict(runs)

    def calls(self, instruction: Instruction) -> list[tuple[str, float]]:
        """The computations that an instruction calls, with the number of calls."""
        if instruction.opcode.endswith(("-update", "-done")):
            return []  # counted at the start
        callees = [name for name in instruction.callees if name in self.computations]
        times = self.trips(instruction) if instruction.opcode == "while" else 1
        return [(callee, times) for callee in callees]

    def trips(self, loop: Instruction) -> float:
        """The trip count of a `while`; nan where it depends on data."""
        known = loop.attribute(r'known_trip_count"?:\{"?n"?:"?(\d+)')
        if known:
            return int(known)
        if loop.op_name.endswith(f"{ONE_LAYER}/while"):
            return 1
        counted = self._counted_trips(loop)
        return self._expected_trips(loop) if math.isnan(counted) else counted

    def _expected_trips(self, loop: Instruction) -> float:
        """The trip count from the loop's own scope, or from the name of a scope around it."""
        is_own = True  # whether the word is of this loop, not of one around it
        for depth, word in enumerate(reversed(loop.op_name.split("/"))):
            if is_own and word in self.scopes:
                return self.scopes[word]
            if said := re.search(r"\bexpected_trips_([\d.]+)", word):
                return float(said[1])
            is_own = is_own and (depth == 0 or word != "while")
        return math.nan

    def _counted_trips(self, loop: Instruction) -> float:
        """The trip count from a condition `counter < constant`, as `lax.scan` writes it."""
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
            for callee in instruction.callees:
                yield from self.computations.get(callee, ())

    def callers_first(self) -> list[str]:
        """Names of the computations that the entry reaches, each after its callers."""
        order: list[str] = []
        seen: set[str] = set()

        def visit(name: str) -> None:
            seen.add(name)
            for instruction in self.computations[name]:
                for callee, _ in self.calls(instruction):
                    if callee not in seen:
                        visit(callee)
            order.append(name)

        visit(self.entry)
        return order[::-1]


def parse_hlo(text: str, scopes: Mapping[str, float] | None = None) -> Program:
    """Parses `compiled.as_text()`.

    Args:
      scopes: `jax.named_scope` -> mean trip count, for loops whose trip count depends on data.
    """
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
    aliases = re.search(r"input_output_alias=\{(.*?\)) *\}", text)
    donated = re.findall(r"\((\d+), ", aliases[1]) if aliases else ()
    return Program(
        {name: tuple(body) for name, body in computations.items()},
        entry,
        frozenset(int(number) for number in donated),
        scopes or {},
    )


def shape_bytes(shape: str) -> float:
    """Bytes of every array in a shape, such as "(f32[2,3]{1,0}, bf16[])"."""
    return sum(array_bytes(dtype, dims) for dtype, dims in arrays(shape))


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Type and dimensions of every array in a shape."""
    return [
        (dtype, tuple(int(size) for size in dims.split(",") if size))
        for dtype, dims in _SHAPE.findall(shape)
        if dtype in BYTES
    ]


def array_bytes(dtype: str, dims: Iterable[int]) -> float:
    """Bytes of an array, without padding."""
    return BYTES[dtype] * math.prod(dims)
