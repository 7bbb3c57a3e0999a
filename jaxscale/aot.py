"""Ahead-of-time compilation of the train step for a TPU or GPU topology, without the hardware.

python -m jaxscale.aot --config configs/X.py --topology NAME [--config.section.key=value ...]
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from etils import epy

from jaxscale import command_line
from jaxscale import config as configs
from jaxscale.config.layout import resolve_sizes
from jaxscale.formatting import human_bytes, table

with epy.lazy_imports():  # they import JAX: a mistyped flag is refused before
    from jaxscale.compiled import compile_ahead, topology
    from jaxscale.planner import auto_layout
    from jaxscale.planner.memory import device_limit

SHOWN = 12
"""The number of buffers printed."""

NOT_NUMBERS = ("refusal", "program", "uses", "collectives", "transfers")
"""Fields of a `CompileReport` that `--json` omits or writes in another form."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, also when the step does not fit."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxscale.aot",
        description="Compiles a config's train step for hardware that need not be attached. "
        "Prints memory against the limit, the largest buffers, FLOPs, the compiler's estimate of "
        "time, and every collective.",
        epilog="Topologies: v5p:4x4x4 (chips along each dimension of the torus), v5e:16x16:2 (two "
        "such slices), h200:8x8 (nodes x GPUs); an unknown name lists all. Any setting of the "
        "config can be changed: --config.layout.tensor=4",
    )
    add = parser.add_argument
    add(
        "--config",
        required=True,
        metavar="FILE",
        help="a file, or the name of a shipped config: quickstart, ...",
    )
    add("--topology", required=True, metavar="NAME", help="the machine: v5p:8x8x8, h200:8x8, ...")
    add(
        "--unroll_loops",
        action="store_true",
        help="unroll the loops over layers and of the loss, for XLA's cost analysis (slow)",
    )
    add(
        "--skip_memory_check",
        action="store_true",
        help="compile even if the planner predicts out of memory",
    )
    add(
        "--hlo",
        type=command_line.output_file,
        metavar="FILE",
        help="write the compiled program to FILE",
    )
    add("--json", type=command_line.output_file, metavar="FILE", help="write the numbers to FILE")
    options, overrides = command_line.parse(
        parser, sys.argv[1:] if argv is None else argv, configs.leaves()
    )
    with command_line.refusals():
        config = configs.load(options.config, overrides)
    topology.leave_hardware_alone()
    command_line.log_to_stdout()
    try:
        with command_line.refusals():
            machine = topology.open_topology(options.topology)
            layout = resolve_sizes(config.layout, len(machine.devices))
            config = dataclasses.replace(config, layout=layout)
            kind = machine.devices[0].device_kind
            if layout.undecided:
                cluster = auto_layout.devices_here(kind, machine.platform, len(machine.devices))
                config, line = auto_layout.choose_settings(config, cluster)
                print(line)
            if not options.skip_memory_check:
                device_limit.check_device_limit(config, machine.platform, machine.limit_bytes, kind)
            report = compile_ahead.compile_for(config, machine, unroll_loops=options.unroll_loops)
    except ModuleNotFoundError as error:
        command_line.refuse(str(error))
    print(program_text(report))
    if options.hlo and report.program:
        options.hlo.write_text(report.program)
    elif options.hlo:
        print(f"\n{options.hlo} is not written: the compiler refused the step, without a program")
    command_line.write_json(options.json, numbers(report))
    return 0


def program_text(report: Any) -> str:
    """A `CompileReport` as readable text."""
    verdict = "fits" if report.fits else f"does not fit, by {human_bytes(report.missing_bytes)}"
    parts = [
        f"{report.topology}: {report.devices} devices, "
        f"{report.layout.axes_text or 'every axis 1'}, {report.attention} attention\n"
        f"{verdict}: {human_bytes(report.peak_bytes)} of {human_bytes(report.limit_bytes)} per "
        f"device; compiled in {report.compile_seconds:.1f} s",
        "memory per device\n"
        + table(
            [
                ("arguments", human_bytes(report.argument_bytes)),
                ("temporaries", human_bytes(report.temp_bytes)),
                ("outputs", human_bytes(report.output_bytes)),
                ("  aliasing arguments", human_bytes(report.alias_bytes)),
                ("host memory", human_bytes(report.host_bytes)),
            ]
        ),
    ]
    if report.refusal:
        return "\n\n".join([*parts, f"the compiler says: {report.refusal.splitlines()[0]}"])
    rows = [("bytes", "arrays", "shape", "module", "kind", "smaller with")]
    rows += [
        (
            human_bytes(use.num_bytes),
            str(use.count),
            use.shape,
            use.module or "-",
            use.what,
            use.smaller_with,
        )
        for use in report.uses[:SHOWN]
    ]
    parts.append("largest buffers live at the peak\n" + table(rows))
    flops = "unknown: a loop has a data-dependent trip count"
    if report.flops is not None:
        flops = _flops(report.flops)
    if report.flops and report.narrow_flops:
        flops += f", {report.narrow_flops / report.flops:.1%} of them with 8-bit operands"
    if report.flops and report.rematerialised_flops:
        share = report.rematerialised_flops / report.flops
        flops += f", {share:.1%} of them recomputed by XLA to save memory"
    seconds = "none" if report.optimal_seconds is None else f"{report.optimal_seconds:.4g} s"
    parts.append(
        "a step, per device\n"
        + table([("matmuls", flops), ("compiler's estimate of compute time", seconds)])
    )
    rows = [("axes", "collective", "runs", "bytes", "on the links", "exposed", "overlaps with")]
    rows += [
        (
            _ranks(one),
            one.kind + (f" for {one.asked}" if one.asked != one.kind else ""),
            f"{one.count:g}",
            human_bytes(one.num_bytes),
            _seconds(one.link_seconds),
            _seconds(one.wait_seconds),
            _overlapping(one),
        )
        for one in report.collectives
    ]
    parts.append("collectives of a step\n" + table(rows))
    if report.collectives:
        parts.append(_hidden(report))
    if report.transfers:
        parts.append(_transfers(report))
    return "\n\n".join(parts)


def _transfers(report: Any) -> str:
    """The table of transfers between the device and host memory."""
    rows = [("array", "to the", "runs", "bytes", "overlaps with")]
    rows += [
        (
            one.array,
            "host" if one.to_host else "device",
            f"{one.count:g}",
            human_bytes(one.count * one.num_bytes),
            f"{_flops(one.overlapped_flops)} of matmuls each" if one.overlapped_flops else "none",
        )
        for one in report.transfers
    ]
    return "transfers of host memory\n" + table(rows)


def _ranks(one: Any) -> str:
    """The mesh axes of a collective, and which ranks of them a group has, if not all."""
    axes = "+".join(one.axes) or "none"
    if not one.subgroup:
        return axes
    size, consecutive = one.subgroup
    return f"{axes}, {size} {'consecutive' if consecutive else 'strided'} ranks"


def _hidden(report: Any) -> str:
    """How much of a step's communication is hidden behind matmuls."""
    share = report.overlapped_bytes / report.collective_bytes
    line = f"{share:.0%} of {human_bytes(report.collective_bytes)} overlap with matmuls"
    if report.link_seconds:
        hidden = max(0.0, 1 - report.wait_seconds / report.link_seconds)  # sums of floats
        line += (
            f"; by the planner's formulas they take {_seconds(report.link_seconds)} on the links, "
            f"of which matmuls hide at least {hidden:.0%}"
        )
    return line


def _seconds(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{seconds:.3g} s"


def _overlapping(one: Any) -> str:
    if not one.asynchronous:
        return "nothing: synchronous"
    if not one.overlapped_flops:
        return "no matmuls"
    each = one.overlapped_flops / one.count
    return f"{_flops(each)} of matmuls each, on average"


def _flops(count: float) -> str:
    """
    >>> _flops(12345.6e12), _flops(2.834e9)
    ('12,345.6 TFLOP', '2.83 GFLOP')
    """
    return f"{count / 1e12:,.1f} TFLOP" if count >= 1e12 else f"{count / 1e9:.3g} GFLOP"


def numbers(report: Any) -> dict[str, Any]:
    """A `CompileReport` as plain values, for `--json`."""
    own = {name: value for name, value in vars(report).items() if name not in NOT_NUMBERS}
    return {
        **own,
        "layout": dataclasses.asdict(report.layout),
        "collective_bytes": report.collective_bytes,
        "beside_bytes": report.overlapped_bytes,
        "link_seconds": report.link_seconds,
        "wait_seconds": report.wait_seconds,
        "transfers": [vars(one) for one in report.transfers],
        "buffers": [vars(use) for use in report.uses[:SHOWN]],
        "collectives": [
            {
                "axis": _ranks(one),
                "kind": one.kind,
                "asked": one.asked,
                "count": one.count,
                "bytes": one.num_bytes,
                "async": one.asynchronous,
                "beside_flops": one.overlapped_flops,
                "link_seconds": one.link_seconds,
                "wait_seconds": one.wait_seconds,
            }
            for one in report.collectives
        ],
    }


if __name__ == "__main__":
    command_line.run(main)
