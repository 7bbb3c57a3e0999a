"""Memory traffic of a compiled program: bytes that its kernels read and write.

Each argument and result of a kernel counts once, times the trip counts of loops; repeated reads for
a matmul's tiles and savings by caches are not counted. For an array that a kernel slices or updates
in place only the slice counts, also after elementwise operations. A kernel that reads more of an
array than the slice that it updates copies the whole array.
"""

from collections.abc import Collection, Mapping, Sequence

from jaxscale.compiled import hlo
from jaxscale.compiled.flops import computation_costs
from jaxscale.compiled.hlo import Instruction, Program

FREE = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "partition-id",
    "replica-id",
    "after-all",
    "opt-barrier",
)
CALLS = ("while", "conditional", "call", "async-start")
"""Instructions with the bytes of the computations that they call."""
SLICES = ("slice", "dynamic-slice")
UPDATE = "dynamic-update-slice"
FUSIONS = ("fusion", "fusion-start")
ELEMENTWISE = (
    "abs",
    "add",
    "and",
    "bitcast",
    "bitcast-convert",
    "clamp",
    "compare",
    "convert",
    "divide",
    "exponential",
    "maximum",
    "minimum",
    "multiply",
    "negate",
    "or",
    "reduce-precision",
    "select",
    "subtract",
)
"""Elementwise instructions, of which a kernel computes only the elements that it needs."""


def bytes_moved(program: Program) -> float:
    """Bytes of one run of the program; nan if a trip count depends on data."""

    def own(instruction: Instruction, named: Mapping[str, Instruction]) -> float | None:
        if instruction.opcode in CALLS:
            return None
        if instruction.opcode in FREE or instruction.opcode.endswith(("-done", "-update")):
            return 0.0
        if instruction.opcode in FUSIONS:
            callee = instruction.attribute(r"calls=%?([\w.\-]+)")
            return _fusion_bytes(program.computations[callee])
        if instruction.opcode in (*SLICES, UPDATE):
            return 2 * _part_bytes(instruction, named)
        if 'custom_call_target="AllocateBuffer"' in instruction.rest:
            return 0.0
        read = sum(hlo.shape_bytes(named[name].shape) for name in instruction.operands)
        return read + _written_bytes(instruction.shape)

    return computation_costs(program, own)[program.entry]


def updates_in_place(update: Instruction, inside: Sequence[Instruction]) -> bool:
    """Whether XLA for GPUs writes only the slice (`CanEmitFusedDynamicUpdateSliceInPlaceForGpu`):
    the kernel reads nothing else of the array, and reads it by a `dynamic-slice` at the same index.
    A constant index becomes a `slice`, which prevents it."""
    users: dict[str, list[Instruction]] = {}
    for user in inside:
        for name in user.operands:
            users.setdefault(name, []).append(user)
    named = {instruction.name: instruction for instruction in inside}
    target = named[update.operands[0]]
    while target.opcode == "bitcast":
        target = named[target.operands[0]]
    seen, names = {update.name}, [target.name]
    while names:
        for user in users.get(names.pop(), ()):
            if user.name in seen:
                continue
            seen.add(user.name)
            names.append(user.name)
            same = user.opcode == "dynamic-slice" and user.operands[1:] == update.operands[2:]
            if not (same or user.opcode in (*ELEMENTWISE, "tuple")):
                return False
    return target.opcode == "parameter"


def _fusion_bytes(inside: Sequence[Instruction]) -> float:
    """Bytes of one kernel, from its computation."""
    named = {instruction.name: instruction for instruction in inside}
    in_place = {
        one.name for one in inside if one.opcode == UPDATE and updates_in_place(one, inside)
    }
    shares = _read_shares(inside, named, in_place)
    read = sum(
        shares[instruction.name] * hlo.shape_bytes(instruction.shape)
        for instruction in inside
        if instruction.opcode == "parameter"
    )
    root = inside[-1]
    results = [named[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return read + sum(_result_bytes(result, named, in_place) for result in results)


def _read_shares(
    inside: Sequence[Instruction], named: Mapping[str, Instruction], in_place: Collection[str]
) -> dict[str, float]:
    """The fraction of each array that a kernel reads or computes."""
    shares = dict.fromkeys(named, 0.0)
    for user in reversed(inside):  # each comes after its operands
        is_root = user is inside[-1]
        for place, name in enumerate(user.operands):
            share = 1.0
            if user.opcode in SLICES and place == 0:
                share = _part_bytes(user, named) / hlo.shape_bytes(named[name].shape)
            elif user.name in in_place and place == 0:
                share = 0.0
            elif user.opcode in ELEMENTWISE and not is_root:
                share = shares[user.name]
            shares[name] = min(shares[name] + share, 1.0)
    return shares


def _result_bytes(
    result: Instruction, named: Mapping[str, Instruction], in_place: Collection[str]
) -> float:
    while result.opcode == "bitcast":
        result = named[result.operands[0]]
    if result.name in in_place:
        return _part_bytes(result, named)
    return _written_bytes(result.shape)


def _part_bytes(instruction: Instruction, named: Mapping[str, Instruction]) -> float:
    """Bytes of the slice that is read or written."""
    if instruction.opcode in SLICES:
        return hlo.shape_bytes(instruction.shape)
    return hlo.shape_bytes(named[instruction.operands[1]].shape)


def _written_bytes(shape: str) -> float:
    """Bytes of results, without the workspace of library matmuls, an s8[...]."""
    return sum(
        hlo.array_bytes(dtype, dims)
        for dtype, dims in hlo.arrays(shape)
        if dtype != "s8" or len(dims) != 1
    )
