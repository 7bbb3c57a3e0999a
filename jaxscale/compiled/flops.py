"""FLOPs of a compiled program, and the compiler's estimate of cycles.

XLA's cost analysis counts the body of a loop once; here it is multiplied by the trip count.
"""

import json
import math
import re
from collections.abc import Callable, Mapping

import numpy as np

from jaxscale.compiled import hlo
from jaxscale.compiled.hlo import Instruction, Program

UNKNOWN_CYCLES = 2.0**60
"""The compiler writes 2**63 - 1 for unknown cycles."""

FLASH_MATMULS = {
    "flash_forward": (1, 1),
    "flash_query_gradients": (2, 1),
    "flash_key_gradients": (2, 2),
}
KERNEL_MATMULS = FLASH_MATMULS | {
    "splash_forward": (1, 1),
    "splash_query_gradients": (2, 1),
    "splash_key_gradients": (2, 2),
}
JAX_MATMULS = {"splash_mha_fwd": (1, 1), "splash_mha_dq": (2, 1), "splash_mha_dkv": (2, 2)}
"""Pallas kernel without declared FLOPs (ours on GPUs and TPUs, JAX's on TPUs) -> its matmuls of all
queries and keys: as wide as a head's queries, and as its values."""

GROUPED_KERNEL = re.compile(r"/grouped_(?:rows|weights)_(\d+)/")
"""The name of a grouped matmul's kernel on GPUs, with the expected rows of all groups. The matrices
of the groups are its only array of three dimensions."""

RAGGED_DOT = 'ragged_dot_tiling="'
"""An attribute of all XLA kernels of `ragged_dot` on TPUs. Their names are the compiler's, and the
name of the traced operation is lost if it transposes the matrices. The tables of groups, which are
vectors, come before the operands."""

Own = Callable[[Instruction, Mapping[str, Instruction]], float | None]
"""The cost of an instruction itself, given the instructions of its computation by name; None if its
cost is that of the computations that it calls."""


def computation_costs(
    program: Program, own: Own, unknown_trips: float = math.nan
) -> dict[str, float]:
    """The cost of one run of each computation, including its callees.

    Args:
      unknown_trips: trip count to assume for loops whose trip count depends on data.
    """
    costs: dict[str, float] = {}
    for name in reversed(program.callers_first()):
        costs[name] = sum(instruction_costs(program, name, own, costs, unknown_trips))
    return costs


def instruction_costs(
    program: Program,
    computation: str,
    own: Own,
    costs: Mapping[str, float],
    unknown_trips: float = math.nan,
) -> list[float]:
    """The cost of one run of each instruction of a computation, given the costs of computations."""
    instructions = program.computations[computation]
    named = {instruction.name: instruction for instruction in instructions}

    def one(instruction: Instruction) -> float:
        itself = own(instruction, named)
        if itself is not None:
            return itself
        return sum(
            (unknown_trips if math.isnan(times) else times) * costs[callee]
            for callee, times in program.calls(instruction)
            if costs[callee]
        )

    return [one(instruction) for instruction in instructions]


def instruction_flops(instruction: Instruction, named: Mapping[str, Instruction]) -> float | None:
    """FLOPs of a matmul, a convolution or a kernel; other instructions are not counted."""
    match instruction.opcode:
        case "dot":
            return _dot_flops(instruction, named)
        case "convolution":
            return _convolution_flops(instruction, named)
        case "custom-call":
            return _kernel_flops(instruction, named)
    return None


def narrow_flops(instruction: Instruction, named: Mapping[str, Instruction]) -> float | None:
    """The part of `instruction_flops` in matmuls with 8-bit operands; none for attention kernels,
    whose first operands may be 8-bit tables."""
    flops = instruction_flops(instruction, named)
    if not flops:
        return flops
    grouped = RAGGED_DOT in instruction.rest
    multiplies = grouped or 'custom_call_target="__cublas' in instruction.rest
    if instruction.opcode == "custom-call" and not multiplies:
        return 0.0
    operands = [hlo.arrays(named[name].shape)[0] for name in instruction.operands]
    if grouped:
        operands = [(dtype, dims) for dtype, dims in operands if len(dims) > 1]
    return flops if all(hlo.BYTES[dtype] == 1 for dtype, _ in operands[:2]) else 0.0


def rematerialised_flops(program: Program) -> float:
    """FLOPs of matmuls that XLA itself repeats to save memory; nan if some are in a loop whose trip
    count depends on data.

    XLA names these copies `NAME.remat`; recomputation by `layout.remat` has other names. If XLA
    then drops NAME, the first copy counts as the original.
    """
    whole = computation_costs(program, instruction_flops)

    def own(instruction: Instruction, named: Mapping[str, Instruction]) -> float | None:
        itself = instruction_flops(instruction, named)
        copied = _COPY.match(instruction.name)
        if copied is None or instruction.name == _first(copied[1], named):
            return None if itself is None else 0.0
        if itself is None:
            return sum(times * whole[callee] for callee, times in program.calls(instruction))
        return itself

    return computation_costs(program, own)[program.entry]


_COPY = re.compile(r"(.+?)\.remat\d*(?:\.|$)")


def _first(name: str, named: Mapping[str, Instruction]) -> str:
    """The first to run of an instruction and its copies."""
    if name in named:
        return name
    return next(one for one in named if (copied := _COPY.match(one)) and copied[1] == name)


def instruction_cycles(instruction: Instruction, named: Mapping[str, Instruction]) -> float | None:
    """The TPU compiler's estimate of an instruction's cycles, which excludes kernels and
    collectives."""
    del named
    expected = float(instruction.attribute(r'"estimated_cycles":"(\d+)"') or "inf")
    return expected if expected < UNKNOWN_CYCLES else None


def _dims(name: str, named: Mapping[str, Instruction]) -> tuple[int, ...]:
    return hlo.arrays(named[name].shape)[0][1]


def _dot_flops(instruction: Instruction, named: Mapping[str, Instruction]) -> float:
    left = _dims(instruction.operands[0], named)
    listed = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
    contracted = math.prod(left[int(dim)] for dim in listed.split(",") if dim)
    return 2.0 * math.prod(hlo.arrays(instruction.shape)[0][1]) * contracted


def _convolution_flops(instruction: Instruction, named: Mapping[str, Instruction]) -> float:
    """FLOPs of the window positions inside the operand, as XLA counts: the TPU compiler writes
    batched matmuls as convolutions that read mostly padding."""
    left, right = (_dims(name, named) for name in instruction.operands[:2])
    result = hlo.arrays(instruction.shape)[0][1]
    labels = instruction.attribute(r"dim_labels=([\w]+_[\w]+->[\w]+)")
    lhs, rhs, out = re.split(r"_|->", labels)
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", instruction.attribute(r"window=\{([^}]*)\}")))
    spatial = sorted(set(out) - {"b", "f"})

    def listed(key: str, default: int) -> list[int]:
        return (
            [int(x) for x in window[key].split("x")] if key in window else [default] * len(spatial)
        )

    sizes, strides = listed("size", 1), listed("stride", 1)
    low = [int(pad.split("_")[0]) for pad in window["pad"].split("x")] if "pad" in window else None
    dilations, spreads = listed("rhs_dilate", 1), listed("lhs_dilate", 1)
    positions = 1
    for i, label in enumerate(spatial):
        size, n = left[lhs.index(label)], result[out.index(label)]
        starts = np.arange(n)[:, None] * strides[i] - (low[i] if low else 0)
        at = starts + np.arange(sizes[i])[None] * dilations[i]
        inside = (at >= 0) & (at <= (size - 1) * spreads[i]) & (at % spreads[i] == 0)
        positions *= int(inside.sum())
    features = right[rhs.index("i")]
    return 2.0 * positions * features * result[out.index("b")] * result[out.index("f")]


def _kernel_flops(instruction: Instruction, named: Mapping[str, Instruction]) -> float | None:
    target = instruction.attribute(r'custom_call_target="([^"]*)"')
    if target.startswith("__cublas"):
        return _cublas_flops(instruction, named)
    if grouped := GROUPED_KERNEL.search(instruction.op_name):
        arrays = (*map(named.get, instruction.operands), instruction)
        shapes = (hlo.arrays(one.shape)[0][1] for one in arrays if one)
        return 2.0 * int(grouped[1]) * math.prod(next(d[1:] for d in shapes if len(d) == 3))
    found = re.search(rf"\b({'|'.join(KERNEL_MATMULS)})(_whole)?[/)]", instruction.op_name)
    of_jax = next(filter(instruction.name.startswith, JAX_MATMULS), "")
    if target.startswith("__cudnn$fmha") or found or of_jax:
        # Integer tables of the mask precede the operands; some kernels also have vectors.
        arrays = [hlo.arrays(named[name].shape)[0] for name in instruction.operands]
        query, key, value = [dims for dtype, dims in arrays if "f" in dtype and len(dims) > 2][:3]
        if found:  # [batch, time, heads, head_dim] on GPUs, [..., heads, time, head_dim] on TPUs
            matmuls, share = KERNEL_MATMULS[found[1]], 0.5 + 0.5 * bool(found[2])
            keys = key[1 if found[1] in FLASH_MATMULS else -2]
        elif of_jax:  # [..., heads, time, head_dim]; causal
            matmuls, share, keys = JAX_MATMULS[of_jax], 0.5, key[-2]
        else:  # [batch, heads, time, head_dim] or [batch, time, heads, head_dim]
            matmuls = (3, 2) if "Backward" in target else (1, 1)
            share = 1 / (1 + ("CAUSAL" in instruction.rest))
            keys = max(key[1:3])  # there are more keys than heads
        features = matmuls[0] * query[-1] + matmuls[1] * value[-1]
        return share * 2.0 * math.prod(query[:-1]) * keys * features
    declared = instruction.attribute(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
    return float(declared) if declared else None


def _cublas_flops(instruction: Instruction, named: Mapping[str, Instruction]) -> float:
    listed = instruction.attribute(r'"lhs_contracting_dimensions":(\[[^\]]*\])')
    left = _dims(instruction.operands[0], named)
    contracted = math.prod(left[int(dim)] for dim in json.loads(listed))
    return 2.0 * math.prod(hlo.arrays(instruction.shape)[0][1]) * contracted
