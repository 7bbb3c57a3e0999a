"""Simulation and picture of a pipeline schedule: time, bubble, memory, messages.

python -m jaxscale.schedule 1f1b --stages 8 --microbatches 32
"""

import argparse
import math
import pathlib
import shutil
import sys
from collections.abc import Sequence

import numpy as np

from jaxscale import command_line
from jaxscale.choices import did_you_mean
from jaxscale.pipeline import draw
from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.schedule_csv import write_csv
from jaxscale.pipeline.simulator import Costs, Run, simulate
from jaxscale.pipeline.table import Table, compile_order
from jaxscale.pipeline_schedules.shipped import NAMES, find_schedule

MOST_OPERATIONS = 2**20
"""The most forward passes of a schedule, over all ranks."""

KEYS = (
    "makespan",
    "idle_fraction",
    "lockstep_makespan",
    "lockstep_idle_fraction",
    "peak_stash",
    "messages",
)


def main(argv: Sequence[str]) -> None:
    """Runs the command: prints the schedule, and writes the requested files."""
    args, _ = command_line.parse(_parser(), argv)
    with command_line.refusals():
        name, fused, _ = args.name.partition(":fused")
        if fused:  # the syntax of layout.schedule
            raise ValueError(f"{args.name} is for layout.schedule; here give {name} --fused")
        costs = parse_costs(args.costs)
        if args.keep and not costs.r:
            raise ValueError(
                f"--keep {args.keep} exempts passes from recompute, which has no cost: set it, as "
                "with --costs r=1, or leave --keep out"
            )
        check_size(args.stages, args.microbatches, args.virtual_stages, args.sequence_chunks)
        order = make_order(
            args.name,
            args.stages,
            args.microbatches,
            args.virtual_stages,
            args.sequence_chunks,
            fused=args.fused,
            keep=args.keep if costs.r else None,
        )
        table = compile_order(order)
        run = simulate(table, costs)
        command_line.write_json(args.json, {key: getattr(run, key) for key in KEYS})
        if args.csv:
            pathlib.Path(args.csv).write_text(write_csv(order))
        if args.png:
            idle = f"{100 * run.idle_fraction:.1f} % idle"
            draw.write_png(args.png, table, run, f"{_headline(table)}: {run.makespan:g}, {idle}")
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    print(describe_schedule(table, run, columns))
    if not args.name.endswith(".csv"):
        print(f"paper       {find_schedule(args.name).paper}")


def check_size(*numbers: int | None) -> None:
    """Refuses a table that would take hours to build.

    Raises:
      ValueError: with the number of its operations.
    """
    operations = math.prod(number or 1 for number in numbers)
    if operations > MOST_OPERATIONS:
        raise ValueError(
            f"--stages x --microbatches x --virtual_stages x --sequence_chunks = {operations} "
            f"forward passes; at most {MOST_OPERATIONS}"
        )


def parse_costs(text: str) -> Costs:
    """Reads "f=1,b=2"; operations left out keep their defaults.

    Raises:
      ValueError: an unknown kind of operation, or a number that cannot be a time.
    """
    costs = Costs()
    for part in text.split(","):
        kind, _, number = part.partition("=")
        kind = kind.strip()
        if kind not in Costs._fields:
            hint = did_you_mean(kind.lower(), Costs._fields)
            raise ValueError(
                f"--costs {part!r} is not a kind of operation; write f=1,b=1,w=1,r=0{hint}"
            )
        try:
            cost = command_line.real(0, 1e9)(number)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"--costs {part!r}: {error}; write {kind}=1") from None
        costs = costs._replace(**{kind: cost})
    return costs


def describe_schedule(table: Table, run: Run, columns: int = 0) -> str:
    """Timeline and figures of a simulated step, for a terminal of `columns` columns (0: any)."""
    timelines = [draw.timeline_text(table, run.start, run.duration, columns)]
    if not np.allclose(run.start, run.lockstep_start):
        timelines = [
            f"As soon as possible:\n{timelines[0]}",
            "In lockstep, every tick as long as its slowest operation:\n"
            + draw.timeline_text(table, run.lockstep_start, run.duration, columns),
        ]
    stash = " ".join(f"{units:g}" for units in run.peak_stash)
    kinds = [f"{draw.SIGNS[k]} {draw.WORDS[k]}" for k in draw.WORDS if (table.ops.kind == k).any()]
    return "\n\n".join(
        [
            f"{_headline(table)}  ({', '.join(kinds)}, . idle)",
            *timelines,
            f"                       makespan      idle\n"
            f"as soon as possible  {run.makespan:10g}  {100 * run.idle_fraction:6.1f} %\n"
            f"in lockstep ticks    {run.lockstep_makespan:10g}  "
            f"{100 * run.lockstep_idle_fraction:6.1f} %",
            f"peak stash  {stash}  (per rank; unit: its activations of one micro-batch)\n"
            f"messages    {run.messages}  (between different ranks)",
        ]
    )


def _headline(table: Table) -> str:
    order = table.order
    parts = [f"{order.ranks} ranks", f"{order.microbatches} micro-batches"]
    if order.virtual_stages > 1:
        parts.append(f"{order.virtual_stages} virtual stages per rank")
    if order.sequence_chunks > 1:
        parts.append(f"{order.sequence_chunks} sequence chunks")
    return f"{order.name}: {', '.join(parts)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxscale.schedule",
        description="Draws a pipeline schedule, and prints its makespan, idle share, peak "
        "activation memory of each rank, and messages.",
        epilog=f"Schedules: {', '.join(NAMES)}, module:RECORD for a custom one, or a CSV file "
        "with a row of operations for each rank (2F0 is stage 2, forward, micro-batch 0; kinds F, "
        "R, B, W and X).",
    )
    add = parser.add_argument
    add("name", metavar="NAME", help="a schedule, module:RECORD, or a .csv file")
    count = command_line.whole(1, MOST_OPERATIONS)
    add("--stages", type=count, metavar="P", help="ranks on the pipeline axis")
    add("--microbatches", type=count, metavar="M", help="micro-batches per step")
    add("--virtual_stages", type=count, metavar="V", help="chunks of the model per rank")
    add("--sequence_chunks", type=count, metavar="K", help="segments of a micro-batch")
    add(
        "--costs",
        default="f=1,b=1,w=1,r=0",
        metavar="f=1,b=1,w=1,r=0",
        help="times of a rank's share of the model for one micro-batch: forward, input gradient, "
        "weight gradient, recompute (0: no recompute operations)",
    )
    add(
        "--keep",
        type=command_line.whole(0, MOST_OPERATIONS),
        default=0,
        metavar="K",
        help="passes whose residuals a rank saves at a time, without recompute; needs r > 0",
    )
    add("--fused", action="store_true", help="one operation for the backward pass, of cost b + w")
    add(
        "--png",
        metavar="FILE",
        type=command_line.output_file,
        help="write the timeline as a picture",
    )
    add("--json", metavar="FILE", type=command_line.output_file, help="write the numbers")
    add(
        "--csv",
        metavar="FILE",
        type=command_line.output_file,
        help="write the schedule, to be edited and given as NAME",
    )
    return parser


if __name__ == "__main__":
    command_line.run(main)
