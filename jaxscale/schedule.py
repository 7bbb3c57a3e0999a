"""Simulation and picture of a pipeline schedule: time, bubble, memory, messages.

python -m jaxscale.schedule 1f1b --stages 8 --microbatches 32
python -m jaxscale.schedule --solve --stages 4 --microbatches 8 --saved_passes 4 --csv order.csv
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
from jaxscale.pipeline.solve_order import Solution, comparable, solve_order
from jaxscale.pipeline.table import Table, compile_order
from jaxscale.pipeline_schedules.operations import Order
from jaxscale.pipeline_schedules.shipped import NAMES, find_schedule

MOST_OPERATIONS = 2**20
"""The most forward passes of a schedule, over all ranks."""

DEFAULT_SECONDS = 60
"""The time limit of a solver."""

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
        _check_flags(args)
        costs = parse_costs(args.costs)
        if args.stage_costs:
            costs = scale_costs(costs, parse_numbers("--stage_costs", args.stage_costs, ","))
        if args.keep and not _recomputes(costs):
            raise ValueError(
                f"--keep {args.keep} exempts passes from recompute, which has no cost: set it, as "
                "with --costs r=1, or leave --keep out"
            )
        check_size(args.stages, args.microbatches, args.virtual_stages, args.sequence_chunks)
        solution = _solve(args, costs) if args.solve else None
        table = solution.table if solution else compile_order(_named_order(args, costs))
        run = simulate(table, costs)
        numbers = {key: getattr(run, key) for key in KEYS}
        if solution:
            numbers |= {key: getattr(solution, key) for key in ("bound", "gap", "named")}
        command_line.write_json(args.json, numbers)
        if args.csv:
            pathlib.Path(args.csv).write_text(write_csv(table.order))
        if args.png:
            idle = f"{100 * run.idle_fraction:.1f} % idle"
            draw.write_png(args.png, table, run, f"{_headline(table)}: {run.makespan:g}, {idle}")
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    print(describe_schedule(table, run, columns))
    if solution:
        print(describe_solution(solution))
    elif not args.name.endswith(".csv"):
        print(f"paper       {find_schedule(args.name).paper}")


def _check_flags(args: argparse.Namespace) -> None:
    if not args.solve:
        if args.name is None:
            raise ValueError("NAME is missing: a schedule, or --solve")
        for flag in ("saved_passes", "time_limit", "threads"):
            if getattr(args, flag) is not None:
                raise ValueError(f"--{flag} {getattr(args, flag):g} is for --solve; add it")
    elif args.stages is None or args.microbatches is None:
        raise ValueError("--solve needs --stages and --microbatches")
    elif args.fused or args.keep or (args.sequence_chunks or 1) > 1:
        raise ValueError(
            "--solve orders F, B and W of whole sequences; leave out --fused, --keep and "
            "--sequence_chunks"
        )
    name, fused, _ = (args.name or "").partition(":fused")
    if fused:  # the syntax of layout.schedule
        raise ValueError(f"{args.name} is for layout.schedule; here give {name} --fused")


def _named_order(args: argparse.Namespace, costs: Costs) -> Order:
    return make_order(
        args.name,
        args.stages,
        args.microbatches,
        args.virtual_stages,
        args.sequence_chunks,
        fused=args.fused,
        keep=args.keep if _recomputes(costs) else None,
    )


def _recomputes(costs: Costs) -> bool:
    return bool(np.any(costs.r))


def _solve(args: argparse.Namespace, costs: Costs) -> Solution:
    numbers = args.stages, args.microbatches, args.virtual_stages or 1
    limit = args.saved_passes or args.stages
    names = [args.name] if args.name else comparable(*numbers)
    orders = [make_order(name, *numbers) for name in names]
    if args.name and (saved := max(simulate(compile_order(orders[0])).peak_stash)) > limit:
        raise ValueError(
            f"{args.name} saves {saved:g} passes, more than --saved_passes {limit:g}; raise the "
            "limit, or leave NAME out"
        )
    try:
        return solve_order(
            orders,
            numbers,
            costs,
            limit,
            seconds=args.time_limit or DEFAULT_SECONDS,
            threads=args.threads or 0,
        )
    except ModuleNotFoundError as error:
        command_line.refuse(str(error))


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
    """Reads "f=1,b=2" or, with a cost for each stage, "f=1,b=1/1/2.5"; operations left out keep
    their defaults.

    Raises:
      ValueError: an unknown kind of operation, or a number that cannot be a time.
    """
    costs = Costs()
    for part in text.split(","):
        kind, _, numbers = part.partition("=")
        kind = kind.strip()
        if kind not in Costs._fields:
            hint = did_you_mean(kind.lower(), Costs._fields)
            raise ValueError(
                f"--costs {part!r} is not a kind of operation; write f=1,b=1,w=1,r=0{hint}"
            )
        try:
            found = parse_numbers(f"--costs {part!r}", numbers, "/")
        except ValueError as error:
            raise ValueError(f"{error}; write {kind}=1") from None
        costs = costs._replace(**{kind: found[0] if len(found) == 1 else found})
    return costs


def parse_numbers(flag: str, text: str, separator: str) -> tuple[float, ...]:
    """Reads "1,1,1.6".

    Raises:
      ValueError: a number that cannot be a time.
    """
    try:
        return tuple(command_line.real(0, 1e9)(part) for part in text.split(separator))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{flag}: {error}") from None


def scale_costs(costs: Costs, factors: Sequence[float]) -> Costs:
    """The costs with each stage's multiplied by its factor.

    Raises:
      ValueError: the costs are of another number of stages.
    """
    scaled = {}
    for kind, cost in costs._asdict().items():
        each = cost if isinstance(cost, tuple) else (cost,) * len(factors)
        if len(each) != len(factors):
            raise ValueError(
                f"--stage_costs has {len(factors)} numbers, and --costs {kind} has {len(each)}"
            )
        # As written in decimals: 1.2 x 1.6 is 1.92.
        scaled[kind] = tuple(round(a * b, 9) for a, b in zip(each, factors))
    return Costs(**scaled)


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


def describe_solution(solution: Solution) -> str:
    """The gap of a solver's order, and the fastest schedule that it was compared with."""
    found = solution.run.lockstep_makespan
    named = f"{solution.named_time:g} ({solution.named})" if solution.named else "none"
    return (
        f"solver      {found:g} in lockstep; no order is faster than {solution.bound:g}, "
        f"gap {100 * solution.gap:.1f} %\n"
        f"named       {named}, the fastest schedule within the limit"
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
    add("name", metavar="NAME", nargs="?", help="a schedule, module:RECORD, or a .csv file")
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
        "weight gradient, recompute (0: no recompute operations); b=1/1/1/2.5: one for each stage",
    )
    add(
        "--stage_costs",
        metavar="1,1,1,1.6",
        help="factors of each stage's costs",
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
    _add_solver(parser)
    return parser


def _add_solver(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--solve",
        action="store_true",
        help="search for the order with the least lockstep makespan, from NAME or else the fastest "
        "of the schedules (needs the extra `solver`)",
    )
    add(
        "--saved_passes",
        type=command_line.real(1, MOST_OPERATIONS),
        metavar="N",
        help="limit of --solve: the most activations of a rank at a time, as in peak stash; "
        "--stages without it, as 1F1B",
    )
    add(
        "--time_limit",
        type=command_line.real(0, 1e6, above=True),
        metavar="SECONDS",
        help=f"of --solve; {DEFAULT_SECONDS} without it",
    )
    add(
        "--threads",
        type=command_line.whole(1, 1024),
        metavar="N",
        help="of --solve; one per core without it",
    )


if __name__ == "__main__":
    command_line.run(main)
