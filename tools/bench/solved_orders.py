"""python tools/bench/solved_orders.py [--stages 4,5,6,7,8] [--time_limit 60] [--threads 1]

Orders by a solver against the named schedules: for each number of ranks p, with 2p micro-batches,
two kinds of uneven costs and three limits of saved passes, p / 2, p and 2p - 1. The unit is that of
a forward pass. `head`: the B of the last stage has the head, as long as one more forward pass, and
a B takes 1.1, a W 0.9. `uneven`: also, B takes 1.2, W 0.8, and the first and the last stage have
fewer layers, 0.8 of the others'. Prints rows of Markdown.
"""

import argparse
import math
import pathlib
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from pipeline import counts  # noqa: E402

from jaxscale import command_line  # noqa: E402
from jaxscale.pipeline.orders import make_order  # noqa: E402
from jaxscale.pipeline.simulator import Costs  # noqa: E402
from jaxscale.pipeline.solve_order import Solution, comparable, solve_order  # noqa: E402

HEAD = "| ranks | costs | limit | fastest schedule | solver | gap, % | faster, % |"


def main(argv: Sequence[str]) -> int:
    """Prints a row per case, and how many cases have a faster order than the schedules."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=counts, default="4,5,6,7,8")
    seconds = command_line.real(0, 1e6, above=True)
    parser.add_argument("--time_limit", type=seconds, default=60, metavar="SECONDS")
    parser.add_argument("--threads", type=command_line.whole(1, 1024), default=1)
    options, _ = command_line.parse(parser, argv)
    print(f"{HEAD}\n|{'---|' * (HEAD.count('|') - 1)}")
    found = []
    for p in options.stages:
        names = comparable(p, 2 * p, 1)
        for title, costs in {"head": head(p), "uneven": uneven(p)}.items():
            for limit in (p // 2, p, 2 * p - 1):
                solution = solve_order(
                    [make_order(name, p, 2 * p) for name in names],
                    (p, 2 * p, 1),
                    costs,
                    limit,
                    seconds=options.time_limit,
                    threads=options.threads,
                )
                print(row(p, title, limit, solution), flush=True)
                found.append(solution)
    better = [one for one in found if faster(one) > 0 and one.named]
    named = [one for one in found if one.named]
    gaps = sorted(one.gap for one in found)
    print(
        f"\nFaster than every schedule in {len(better)} of the {len(named)} cases that have one; "
        f"gap at most {100 * gaps[-1]:.1f} %, median {100 * gaps[len(gaps) // 2]:.1f} %; "
        f"{sum(gap < 1e-9 for gap in gaps)} of {len(gaps)} proven the fastest."
    )
    return 0


def head(ranks: int) -> Costs:
    """Equal stages, and the head in the last one's B."""
    return Costs(f=1.0, b=(*(1.1,) * (ranks - 1), 2.1), w=0.9)


def uneven(ranks: int) -> Costs:
    """Fewer layers in the first and the last stage, and the head in the last one's B."""
    layers = (0.8, *(1.0,) * (ranks - 2), 0.8)
    each = {kind: tuple(round(n * x, 9) for n in layers) for kind, x in zip("fbw", (1, 1.2, 0.8))}
    return Costs(**{**each, "b": (*each["b"][:-1], round(each["b"][-1] + 1, 9))})


def faster(solution: Solution) -> float:
    """The fraction by which the order is faster than the fastest schedule; 0 without one."""
    found, named = solution.run.lockstep_makespan, solution.named_time
    return max(0.0, round(named / found - 1, 9)) if math.isfinite(named) else 0.0


def row(ranks: int, title: str, limit: int, solution: Solution) -> str:
    """A row of the table."""
    named = f"`{solution.named}` {solution.named_time:.2f}" if solution.named else "none"
    gain = f"{100 * faster(solution):.1f}" if solution.named else ""
    found = f"{solution.run.lockstep_makespan:.2f} | {100 * solution.gap:.1f}"
    return f"| {ranks} | {title} | {limit} | {named} | {found} | {gain} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
