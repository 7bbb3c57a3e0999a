"""Time breakdown of traced steps by cause, for each device of this process.

Reads the `.xplane.pb` of `jax.profiler`. An event is matched to an instruction by name, and the
instruction to a cause by the text of the compiled program; library kernels are matched by name.
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
"""Causes that hide collectives. When several run at once, on GPU streams or CPU threads, the time
counts for the first of these."""

CAUSES = (*COMPUTE, "collectives", "idle")

CONTAINERS = ("while", "conditional", "call")
"""Instructions whose time is the sum of the instructions inside them."""

MATMULS = ("dot", "convolution", "ragged-dot")
KERNELS = {
    "collectives": re.compile("nccl|" + "|".join(kind.replace("-", "[-_]?") for kind in KINDS)),
    "attention": re.compile("fmha|sdpa|flash|splash"),
    "matmul": re.compile(
        "gemm|cublas|cutlass|nvjet|xmma|wgmma|cudnn|matmul|gmm|grouped|convolution|dot"
    ),
}
"""Words in the names of kernels, in lower case: cuBLAS writes `sm90_xmma_gemm_...`, `nvjet_...`
and `cutlass_...`, cuDNN `cudnn_generated_..._sdpa_...`, NCCL `ncclDevKernel_AllGather_...`."""

_DEVICE = re.compile(r"/device:(GPU|TPU):\d+$")
_LINE = re.compile(r"Stream #|(Async )?XLA Ops$")
_NAME = re.compile(r"%?([\w.\-]+)")
_PALLAS = re.compile(r"/(\w+)/pallas_call$")


@dataclass(frozen=True)
class DeviceTime:
    """The time of one device, from its first traced operation to its last."""

    device: str  # such as "GPU:0"
    seconds: float
    # Keys are CAUSES; the sum is `seconds`. "collectives" counts only while no compute runs, which
    # is their exposed time.
    seconds_by_cause: Mapping[str, float]
    collective_seconds: float  # in flight, hidden or exposed


@dataclass(frozen=True)
class OperationTime:
    """The time of an operation of the compiled program, in all its runs on one device."""

    operation: str  # the instruction's name in the program's text, else the kernel's
    source: str  # the traced primitive, such as "jit(step)/.../dot_general"
    cause: str  # of CAUSES
    runs: int
    seconds: float


def read_trace(folder: pathlib.Path) -> Any:
    """The newest trace, a `ProfileData`, in a folder of `jax.profiler.start_trace`.

    Raises:
      FileNotFoundError: the folder has no trace.
    """
    found = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f"{folder} has no trace, *.xplane.pb")
    return ProfileData.from_file(str(found[-1]))


def time_by_cause(trace: Any, program_text: str) -> list[DeviceTime]:
    """The time of each device of a trace by cause.

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
    """The `number` longest operations of a trace's first device, by the time of all their runs.

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
                # A kernel in a CUDA graph (command buffer) has the graph's name and its own.
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
    """Ignores warnings about types that jaxlib creates on first use; as errors, they would end the
    process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _operations(trace: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Device, event and statistics of each operation's events."""
    planes = list(trace.planes)
    devices = [plane for plane in planes if _DEVICE.match(plane.name)]
    for plane in devices:
        for line in plane.lines:
            if _LINE.match(line.name):
                for event in line.events:
                    yield plane.name.removeprefix("/device:"), event, dict(event.stats)
    if devices:
        return  # host events would be launches of kernels
    for plane in planes:
        for line in plane.lines if plane.name == "/host:CPU" else ():
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    yield f"CPU:{stats.get('device_ordinal', 0)}", event, stats


def _causes(program: Program, text: str) -> Callable[[str, Any, Any], str | None]:
    """A function (event, `hlo_op`, `hlo_module`) -> cause; None for a container."""
    named = re.match(r"HloModule ([\w.\-]+)", text)
    module = named[1] if named else ""
    instructions = {one.name: one for body in program.computations.values() for one in body}

    @functools.cache
    def cause(event: str, operation: str | None, of: str | None) -> str | None:
        # On TPUs the event's name is the text of the instruction, "%fusion.3 = ...".
        name = operation or ("" if (found := _NAME.match(event)) is None else found[1])
        if name in instructions and of in (None, module):
            return instruction_cause(instructions[name], program)
        if re.match("|".join(CONTAINERS), name):
            return None
        words = f"{name} {event.partition(' = ')[0]}".lower()
        return next((key for key, kernel in KERNELS.items() if kernel.search(words)), "other")

    return cause


def instruction_cause(instruction: Instruction, program: Program) -> str | None:
    """The cause (of CAUSES) of an instruction's time; None for CONTAINERS."""
    if instruction.opcode in CONTAINERS:
        return None
    whole = list(_whole(instruction, program))
    # The target of a Pallas kernel is the back end, and its name is a scope.
    kernels = [
        word.lower()
        for one in whole
        if one.opcode == "custom-call"
        for word in (one.attribute(r'custom_call_target="([^"]*)"'), *_PALLAS.findall(one.op_name))
    ]
    multiplies = any(one.opcode in MATMULS for one in whole) or any(
        map(KERNELS["matmul"].search, kernels)
    )
    if not multiplies and any(one.opcode.startswith(KINDS) for one in whole):
        return "collectives"
    # The `op_name` of a fusion is that of its root.
    scope = next(filter(None, (one.op_name for one in whole)), "")
    if ATTENTION_SCOPE in scope or any(map(KERNELS["attention"].search, kernels)):
        return "attention"
    return "matmul" if multiplies else "other"


def _whole(instruction: Instruction, program: Program) -> Iterator[Instruction]:
    """An instruction, and the instructions of the computations that it calls."""
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
    """One line of text: shares of the time, mean over devices."""
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
