"""Where the time of traced steps went, by cause, on each device of this process.

Reads the `.xplane.pb` that `jax.profiler` writes. Which operation an event belongs to is known by
the name of its instruction, and what that instruction is by the text of the compiled program; the
kernels of libraries are known by their names.
"""

import contextlib
import functools
import pathlib
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.profiler import ProfileData

from jaxscale.compiled.collectives import KINDS
from jaxscale.compiled.hlo import Instruction, Program, parse_hlo
from jaxscale.training.kernels import ATTENTION_SCOPE

COMPUTE = ("attention", "matmul", "other")
"""What hides collectives. Where several run at once, on streams of a GPU or threads of a CPU, time
counts for the first of these."""

CAUSES = (*COMPUTE, "collectives", "idle")

CONTAINERS = ("while", "conditional", "call")
"""Instructions whose time is that of the instructions which they run."""

MATMULS = ("dot", "convolution", "ragged-dot")
KERNELS = {
    "collectives": re.compile("nccl|" + "|".join(kind.replace("-", "[-_]?") for kind in KINDS)),
    "attention": re.compile("fmha|sdpa|flash|splash"),
    "matmul": re.compile("gemm|cublas|cutlass|nvjet|xmma|wgmma|cudnn|matmul|gmm|convolution|dot"),
}
"""Words in the names of kernels, in lower case: cuBLAS writes `sm90_xmma_gemm_...`, `nvjet_...`
and `cutlass_...`, cuDNN `cudnn_generated_..._sdpa_...`, NCCL `ncclDevKernel_AllGather_...`."""

_DEVICE = re.compile(r"/device:(GPU|TPU):\d+$")
_LINE = re.compile(r"Stream #|(Async )?XLA Ops$")
_NAME = re.compile(r"%?([\w.\-]+)")


@dataclass(frozen=True)
class DeviceTime:
    """Of one device, from its first traced operation to its last."""

    device: str  # such as "GPU:0"
    seconds: float
    # Key: of CAUSES. Their sum is `seconds`: "collectives" counts only while no compute runs, which
    # is what is exposed of them.
    seconds_by_cause: Mapping[str, float]
    collective_seconds: float  # in flight, hidden or exposed


@dataclass(frozen=True)
class OperationTime:
    """Of an operation of the compiled program, in all its runs on one device."""

    operation: str  # the instruction's name in the program's text, else the kernel's
    source: str  # what it was compiled from, such as "jit(step)/.../dot_general"
    cause: str  # of CAUSES
    runs: int
    seconds: float


def read_trace(folder: pathlib.Path) -> Any:
    """The newest trace, a `ProfileData`, in a folder that `jax.profiler.start_trace` was given.

    Raises:
      FileNotFoundError: there is none.
    """
    found = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f"{folder} has no trace, *.xplane.pb")
    return ProfileData.from_file(str(found[-1]))


def time_by_cause(trace: Any, program_text: str) -> list[DeviceTime]:
    """What each device of a trace did.

    Args:
      trace: a `jax.profiler.ProfileData`.
      program_text: of the compiled step, `compiled.as_text()`.
    """
    cause_of = _causes(parse_hlo(program_text), program_text)
    spans: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    with _without_warnings():
        for device, event, stats in _operations(trace):
            if cause := cause_of(event.name, stats.get("hlo_op"), stats.get("hlo_module")):
                spans[device][cause].append((event.start_ns, event.start_ns + event.duration_ns))
    return [_device_time(device, spans[device]) for device in sorted(spans)]


def longest_operations(trace: Any, program_text: str, number: int) -> list[OperationTime]:
    """So many operations, the longest in all their runs first, of the first device of a trace.

    Args:
      trace: a `jax.profiler.ProfileData`.
      program_text: of the compiled step, `compiled.as_text()`.
    """
    program = parse_hlo(program_text)
    cause_of = _causes(program, program_text)
    sources = {one.name: one.op_name for body in program.computations.values() for one in body}
    runs: dict[tuple[str, str], int] = defaultdict(int)
    spent: dict[tuple[str, str], float] = defaultdict(float)
    first = ""
    with _without_warnings():
        for device, event, stats in _operations(trace):
            first = first or device
            name, of = stats.get("hlo_op"), stats.get("hlo_module")
            if device == first and (cause := cause_of(event.name, name, of)):
                # The kernels of a command buffer have the buffer's name and their own.
                known = name if name in sources else event.name.partition(" = ")[0].lstrip("%")
                key = (known, cause)
                runs[key] += 1
                spent[key] += event.duration_ns / 1e9
    longest = sorted(spent, key=lambda key: -spent[key])[:number]
    return [
        OperationTime(key[0], sources.get(key[0], ""), key[1], runs[key], spent[key])
        for key in longest
    ]


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Of the types that jaxlib makes when they are first used; as an error one ends the process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _operations(trace: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Events of operations: device, event, statistics."""
    planes = list(trace.planes)
    devices = [plane for plane in planes if _DEVICE.match(plane.name)]
    for plane in devices:
        for line in plane.lines:
            if _LINE.match(line.name):
                for event in line.events:
                    yield plane.name.removeprefix("/device:"), event, dict(event.stats)
    if devices:
        return  # the host's events are then launches
    for plane in planes:
        for line in plane.lines if plane.name == "/host:CPU" else ():
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    yield f"CPU:{stats.get('device_ordinal', 0)}", event, stats


def _causes(program: Program, text: str) -> Callable[[str, Any, Any], str | None]:
    """(event, its `hlo_op`, its `hlo_module`) -> its cause; None for a container."""
    named = re.match(r"HloModule ([\w.\-]+)", text)
    module = named[1] if named else ""
    instructions = {one.name: one for body in program.computations.values() for one in body}

    @functools.cache
    def cause(event: str, operation: str | None, of: str | None) -> str | None:
        # A TPU's event is named by the text of its instruction, "%fusion.3 = ...".
        name = operation or ("" if (found := _NAME.match(event)) is None else found[1])
        if name in instructions and of in (None, module):
            return instruction_cause(instructions[name], program)
        if re.match("|".join(CONTAINERS), name):
            return None
        words = f"{name} {event.partition(' = ')[0]}".lower()
        return next((key for key, kernel in KERNELS.items() if kernel.search(words)), "other")

    return cause


def instruction_cause(instruction: Instruction, program: Program) -> str | None:
    """The cause, of CAUSES, that an instruction's time counts for; None for one of CONTAINERS."""
    if instruction.opcode in CONTAINERS:
        return None
    whole = list(_whole(instruction, program))
    kernels = [one.attribute(r'custom_call_target="([^"]*)"').lower() for one in whole]
    multiplies = any(one.opcode in MATMULS for one in whole) or any(
        map(KERNELS["matmul"].search, kernels)
    )
    if not multiplies and any(one.opcode.startswith(KINDS) for one in whole):
        return "collectives"
    # A fusion's own name is that of its root.
    scope = next(filter(None, (one.op_name for one in whole)), "")
    if ATTENTION_SCOPE in scope or any(map(KERNELS["attention"].search, kernels)):
        return "attention"
    return "matmul" if multiplies else "other"


def _whole(instruction: Instruction, program: Program) -> Iterator[Instruction]:
    """An instruction, and those of the computations that it calls."""
    yield instruction
    for callee, _ in program.calls(instruction):
        for one in program.computations[callee]:
            yield from _whole(one, program)


def _device_time(device: str, spans: Mapping[str, Sequence[tuple[float, float]]]) -> DeviceTime:
    begin = min(begin for each in spans.values() for begin, _ in each)
    end = max(end for each in spans.values() for _, end in each)
    seconds, covered, found = {}, 0.0, []
    for cause in (*COMPUTE, "collectives"):
        found += spans.get(cause, ())
        seconds[cause] = _covered(found) - covered
        covered += seconds[cause]
    seconds["idle"] = end - begin - covered
    return DeviceTime(
        device,
        (end - begin) / 1e9,
        {cause: spent / 1e9 for cause, spent in seconds.items()},
        _covered(spans.get("collectives", ())) / 1e9,
    )


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, -float("inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def trace_line(times: Sequence[DeviceTime], num_steps: int) -> str:
    """One line for a person: shares of the time, mean over devices."""
    seconds = sum(time.seconds for time in times) or 1.0
    shares = {
        cause: sum(time.seconds_by_cause[cause] for time in times) / seconds for cause in CAUSES
    }
    flight = sum(time.collective_seconds for time in times) / seconds
    devices = "1 device" if len(times) == 1 else f"{len(times)} devices"
    names = {"other": "other compute", "collectives": "exposed collectives"}
    said = [f"{names.get(cause, cause)} {share:.1%}" for cause, share in shares.items()]
    if flight:
        said[-2] += f" (of {flight:.1%} in flight)"
    each = seconds / len(times) / num_steps if times else 0.0
    return f"{each:.4g} s a step on {devices}: " + ", ".join(said)
