"""Ahead-of-time compilation of the train step for absent hardware: memory, FLOPs, collectives."""

import dataclasses
import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxscale.compiled import hlo
from jaxscale.compiled.attribute import BufferUse, attribute_buffers
from jaxscale.compiled.collectives import Collective, Subgroup, collectives, summed
from jaxscale.compiled.flops import (
    computation_costs,
    instruction_cycles,
    instruction_flops,
    narrow_flops,
    rematerialised_flops,
)
from jaxscale.compiled.host_transfers import HostTransfer, host_transfers
from jaxscale.compiled.live_buffers import live_at_peak
from jaxscale.compiled.overlap import with_waits
from jaxscale.compiled.topology import Topology, has_cudnn, open_topology
from jaxscale.config import Config
from jaxscale.config.layout import Layout, resolve_sizes
from jaxscale.hardware import find_chip
from jaxscale.pipeline import summary
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.cost.collectives import collective_seconds
from jaxscale.sharding.mesh import axes_between_slices, make_mesh
from jaxscale.training.engine import Engine, make_engine

OUT_OF_MEMORY = re.compile(
    r"total memory required for HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds|"
    r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm"
)


@dataclass(frozen=True)
class CompileReport:
    """A compiled step, per device. Bytes are of device memory, FLOPs and seconds of one step."""

    topology: str
    devices: int
    layout: Layout
    attention: str
    fits: bool
    limit_bytes: int
    peak_bytes: int  # arguments, temporaries and code; also when it does not fit
    argument_bytes: int
    temp_bytes: int
    compile_seconds: float
    # The defaults are those of a step that the compiler refuses.
    output_bytes: int = 0
    alias_bytes: int = 0  # outputs that alias donated arguments
    host_bytes: int = 0
    flops: float | None = None  # of an average rank; None with data-dependent trip counts
    narrow_flops: float | None = None  # of these, with 8-bit operands
    rematerialised_flops: float | None = None  # of these, XLA's own recomputation
    optimal_seconds: float | None = None  # the compiler's estimate; None on GPUs
    collectives: tuple[Collective, ...] = ()  # per step, by axes and kind
    transfers: tuple[HostTransfer, ...] = ()  # from and to host memory
    uses: tuple[BufferUse, ...] = ()  # at the peak, largest first; empty if it does not fit
    refusal: str = ""  # the compiler's message if it ran out of memory
    program: str = ""  # HLO text

    @property
    def missing_bytes(self) -> int:
        """Bytes that are missing; 0 if the step fits."""
        return max(0, self.peak_bytes - self.limit_bytes)

    @property
    def collective_bytes(self) -> float:
        """Bytes of all runs of all collectives."""
        return sum(one.num_bytes for one in self.collectives)

    @property
    def overlapped_bytes(self) -> float:
        """Bytes of runs with any matmul between their start and their end."""
        return sum(one.num_bytes for one in self.collectives if one.overlapped_flops > 0)

    @property
    def link_seconds(self) -> float | None:
        """Seconds of all collectives, each alone on its links; None for a chip without figures."""
        return _total(one.link_seconds for one in self.collectives)

    @property
    def wait_seconds(self) -> float | None:
        """The exposed part of `link_seconds`, which matmuls do not hide."""
        return _total(one.wait_seconds for one in self.collectives)


def _total(seconds: Iterable[float | None]) -> float | None:
    each = list(seconds)
    return None if None in each else sum(x for x in each if x is not None)


def compile_for(
    config: Config, topology: str | Topology, *, unroll_loops: bool = False
) -> CompileReport:
    """Compiles a config's train step for absent hardware.

    Running out of memory is a result: `fits` is False.

    Args:
      config: one axis of its layout may be -1.
      topology: a topology, or its name (see `topology.open_topology`).
      unroll_loops: unrolls the loops over layers and of the loss, which is slow to compile. XLA's
        cost analysis, and so `optimal_seconds`, is complete only then, since it counts the body of
        a loop once.

    Raises:
      ValueError: the layout does not match the model or the topology.
      ModuleNotFoundError: a compiler is not installed; names the package.
    """
    machine = open_topology(topology) if isinstance(topology, str) else topology
    layout = resolve_sizes(config.layout, len(machine.devices))
    config = dataclasses.replace(config, layout=layout)
    engine = make_engine(config, make_mesh(layout, machine.devices), unroll_loops=unroll_loops)
    start = time.perf_counter()
    try:
        # JAX queries cuDNN's version during tracing.
        compiled = engine.step.lower(engine.abstract_state, engine.abstract_batch).compile()
    except RuntimeError as error:
        if engine.attention == "cudnn" and not has_cudnn():
            raise ModuleNotFoundError(
                "cuDNN's attention needs its library to compile (540 MB): uv sync --inexact "
                "--extra aot-cudnn; or set model.attention = 'flash' or 'blockwise'"
            ) from error
        if engine.attention == "cudnn" and isinstance(error, NotImplementedError):
            raise ValueError(
                f"{error} JAX looks at the GPU of this machine, not at the absent one; set "
                "model.attention = 'flash'"
            ) from error
        if not OUT_OF_MEMORY.search(str(error)):
            raise
        return _refused(machine, engine, str(error), time.perf_counter() - start)
    seconds = time.perf_counter() - start
    return _report(machine, engine, compiled, seconds, unroll_loops)


def _report(
    machine: Topology, engine: Engine, compiled: Any, seconds: float, unrolled: bool
) -> CompileReport:
    memory, text = compiled.memory_analysis(), compiled.as_text()
    program = hlo.parse_hlo(text, engine.stages.trips if engine.stages else {})
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
    )
    total_flops = computation_costs(program, instruction_flops)[program.entry]
    narrow = computation_costs(program, narrow_flops)[program.entry]
    repeated = rematerialised_flops(program)
    return CompileReport(
        **_common(machine, engine),
        fits=peak <= machine.limit_bytes,
        peak_bytes=peak,
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        host_bytes=memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
        flops=None if math.isnan(total_flops) else total_flops,
        narrow_flops=None if math.isnan(total_flops) else narrow,
        rematerialised_flops=None if math.isnan(repeated) else repeated,
        optimal_seconds=_seconds(machine, engine, compiled, program, unrolled),
        compile_seconds=seconds,
        collectives=tuple(summed(_collectives(machine, engine, program))),
        transfers=tuple(host_transfers(program)),
        uses=tuple(attribute_buffers(live_at_peak(program), engine)),
        program=text,
    )


def _collectives(machine: Topology, engine: Engine, program: hlo.Program) -> list[Collective]:
    """The collectives, with their seconds if the chip's links are known."""
    sizes = engine.layout.sizes
    found = collectives(program, sizes, axes_between_slices(engine.layout, machine.devices))
    chip = find_chip(machine.devices[0].device_kind)
    if chip is None or engine.config.model.compute_dtype != "bfloat16":
        return found
    links = make_cluster(chip.name, len(machine.devices), **machine.node)

    def link_seconds(one: Collective) -> float:
        mesh, axes = sizes, one.axes
        if one.subgroup:
            (axis,) = one.axes
            mesh, axes = _divided(sizes, axis, one.subgroup)
        return collective_seconds(links, mesh, one.kind, axes, one.num_bytes)

    narrow = engine.config.model.matmul_dtype
    peak = chip.fp8_flops_per_second if narrow else chip.bf16_flops_per_second
    rate = peak * chip.matmul_fraction
    return with_waits(program, found, link_seconds, rate)


def _divided(
    sizes: Mapping[str, int], axis: str, part: Subgroup
) -> tuple[dict[str, int], tuple[str, ...]]:
    """A mesh with an axis divided in two, the outer and the inner ranks, of which a collective's
    groups are one; and the name of that one."""
    inner = part.size if part.consecutive else sizes[axis] // part.size
    divided: dict[str, int] = {}
    for name, size in sizes.items():
        divided |= {"outer": size // inner, "inner": inner} if name == axis else {name: size}
    return divided, ("inner" if part.consecutive else "outer",)


def _common(machine: Topology, engine: Engine) -> dict[str, Any]:
    return {
        "topology": machine.name,
        "devices": len(machine.devices),
        "layout": engine.layout,
        "attention": engine.attention,
        "limit_bytes": machine.limit_bytes,
    }


def _refused(machine: Topology, engine: Engine, refusal: str, seconds: float) -> CompileReport:
    found = OUT_OF_MEMORY.search(refusal)
    assert found
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    temporaries = int(float(number) * 1024 ** "_KMGT".index(unit or "_"))
    arguments = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves((engine.abstract_state, engine.abstract_batch))
        if leaf.sharding.memory_kind != "pinned_host"
    )
    return CompileReport(
        **_common(machine, engine),
        fits=False,
        peak_bytes=temporaries + arguments,
        argument_bytes=arguments,
        temp_bytes=temporaries,
        compile_seconds=seconds,
        refusal=refusal,
    )


def _seconds(
    machine: Topology, engine: Engine, compiled: Any, program: hlo.Program, unrolled: bool
) -> float | None:
    """The compiler's estimate of compute seconds per step, without collectives, plus the bubble of
    a pipeline."""
    if machine.clock_hertz is None:
        return None
    if unrolled and not engine.stages:
        return (compiled.cost_analysis() or {}).get("optimal_seconds")
    expected = computation_costs(program, instruction_cycles)[program.entry] / machine.clock_hertz
    if engine.stages:
        expected /= 1 - summary.idle(engine.stages)
    return None if math.isnan(expected) else expected
