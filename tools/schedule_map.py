"""python tools/schedule_map.py [--png FILE] [--stages 4,8,16] [--rounds 1,2,4,8] [--segments 2,4]

Which pipeline schedule has the least lockstep time, by ranks, micro-batches and a limit of memory;
docs/schedule_map.png shows it. Forward pass, input gradient and weight gradient of a rank's layers
take 1 each. Memory is that of a rank, in the activations that a rank saves for one micro-batch:
buffer slots times their shares, and what only some schedules have. The shares are settings: by
default those of llama2_13b (float32, as compiled), `--weights` of sequences of about 5,500 tokens.
"""

import argparse
import itertools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.patches import Rectangle

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from jaxscale import command_line  # noqa: E402
from jaxscale.pipeline.buffer_slots import GRADIENT, MEMORY, count_slots  # noqa: E402
from jaxscale.pipeline.orders import make_order  # noqa: E402
from jaxscale.pipeline.simulator import simulate  # noqa: E402
from jaxscale.pipeline.table import Table, compile_order  # noqa: E402
from jaxscale.pipeline_schedules.shipped import SHIPPED  # noqa: E402

CHUNKS = (1, 2, 4)
LIMITS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Memory limits of a map, in micro-batches, divided by the ranks."""
SLOTS = {"residual_b": 0.37, "residual_w": 0.63, "cotangent": 0.78}
"""Buffer -> the share of its slots: activations for B, for W, and gradients from B to W."""
COLORS = {
    "gpipe": "#9a9a9a",
    "1f1b": "#4f7fc4",
    "interleaved": "#8fb3e3",
    "breadth_first": "#c9c9c9",
    "seq1f1b": "#e8a13c",
    "seq1f1b_interleaved": "#f4cf8e",
    "chimera": "#b06fb5",
    "bitpipe": "#d3aed6",
    "zb_h1": "#3f9a5f",
    "zb_h2": "#7cc08f",
    "zb_v": "#b5deb9",
    "dualpipe": "#cf6358",
    "dualpipe_v": "#eba59c",
}


@dataclass(frozen=True)
class Shares:
    """What only some schedules have, in a rank's activations or times of one micro-batch."""

    weights: float  # the other direction's weights and gradients
    keys: float  # keys and values of whole sequences, or their gradients
    attention: float  # of the time of an operation: attention
    exchange: float  # the time of a tick's messages


@dataclass(frozen=True)
class Entry:
    """A schedule with its numbers, for some ranks and micro-batches."""

    name: str
    chunks: int
    segments: int
    time: float  # of a step, in lockstep, in forward passes of a rank's layers
    memory: float  # of the rank with the most

    @property
    def title(self) -> str:
        """The schedule, with its chunks c and segments s."""
        parts = [f"{self.chunks}c"] * (self.chunks > 1) + [f"{self.segments}s"] * (
            self.segments > 1
        )
        return " ".join([self.name, *parts])


def main(argv: Sequence[str]) -> int:
    """Prints the fastest schedule of each cell, and draws the map."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, share = parser.add_argument, command_line.real(0, 1e6)
    add("--png", metavar="FILE", type=command_line.output_file)
    add("--stages", type=whole_numbers, default="4,8,16", help="ranks of each panel")
    add("--rounds", type=whole_numbers, default="1,2,4,8", help="micro-batches per rank")
    add("--segments", type=whole_numbers, default="2,4", help="of seq1f1b; 1 leaves it out")
    add("--weights", type=share, default=2.0, help="a direction's weights and gradients")
    add("--keys", type=share, default=0.12, help="keys and values of a sequence")
    add("--attention", type=share, default=0.06, help="share of attention in an operation")
    add("--exchange", type=share, default=0.02, help="time of a tick's messages")
    options, _ = command_line.parse(parser, argv)
    shares = Shares(options.weights, options.keys, options.attention, options.exchange)
    found = {
        (p, rounds): list(entries(p, rounds * p, options.segments, shares))
        for p in options.stages
        for rounds in options.rounds
    }
    for (p, rounds), some in found.items():
        for limit in LIMITS:
            best = fastest(some, limit * p)
            text = "none"
            if best:
                idle = 1 - 3 * rounds * p / best.time
                text = f"{best.title}: {best.time:g}, {idle:.1%} idle, memory {best.memory:.2f}"
            print(f"{p} ranks, {rounds * p} micro-batches, limit {limit * p:g}: {text}")
    if options.png:
        draw_map(options.png, found)
    return 0


def whole_numbers(text: str) -> tuple[int, ...]:
    """The `type` of a flag of several counts."""
    return tuple(command_line.whole(1, 64)(part) for part in text.split(","))


def entries(
    ranks: int, microbatches: int, segments: Sequence[int], shares: Shares
) -> Iterator[Entry]:
    """Every shipped schedule with the chunks and segments that it supports."""
    for schedule in SHIPPED:
        # With one segment it is another schedule.
        some = [n for n in segments if n > 1] if schedule.splits_sequences else [1]
        for numbers in itertools.product((ranks,), (microbatches,), CHUNKS, some):
            if schedule.serves(*numbers):
                table = compile_order(make_order(schedule.name, *numbers), complete=True)
                time, memory = step_time(table, shares), rank_memory(table, shares)
                yield Entry(schedule.name, *numbers[2:], time, memory)


def step_time(table: Table, shares: Shares) -> float:
    """The lockstep time, with messages, and each segment as long as the last of its sequence."""
    segments = table.order.sequence_chunks
    longer = 1 + shares.attention * (1 - 1 / segments)
    exchange = table.ticks * shares.exchange / segments
    return longer * simulate(table).lockstep_makespan + exchange


def rank_memory(table: Table, shares: Shares) -> float:
    """The memory of the rank with the most, in its activations of one micro-batch."""
    order, slots = table.order, count_slots(table)
    saved = sum(share * slots[name] for name, share in SLOTS.items()) / order.sequence_chunks
    if order.sequence_chunks > 1:
        # Segments save no separate keys and values.
        saved *= 1 - shares.keys
        saved = saved + shares.keys * (slots[MEMORY] + slots[GRADIENT])
    twice = shares.weights * (order.directions - 1)
    return float(np.max(saved)) / order.virtual_stages + twice


def fastest(some: Sequence[Entry], limit: float) -> Entry | None:
    """The entry with the least time within a limit of memory; of ties the one with the least
    memory. None if none fits."""
    within = [entry for entry in some if entry.memory <= limit]
    return min(within, key=lambda one: (round(one.time, 9), one.memory), default=None)


def draw_map(path: pathlib.Path, found: dict[tuple[int, int], list[Entry]]) -> None:
    """A panel for each number of ranks: micro-batches to the right, memory upwards."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    ranks, rounds = sorted({p for p, _ in found}), sorted({n for _, n in found})
    size = 1.2 + 1.45 * len(rounds) * len(ranks), 1.1 + 0.42 * len(LIMITS)
    figure = Figure(figsize=size, layout="constrained", dpi=80)
    panels = figure.subplots(1, len(ranks), sharey=True, squeeze=False)[0]
    for panel, p in zip(panels, ranks):
        for x, n in enumerate(rounds):
            for y, limit in enumerate(LIMITS):
                best = fastest(found[p, n], limit * p)
                color = COLORS[best.name] if best else "white"
                panel.add_patch(_cell(x, y, color))
                text = "none fits"
                if best:
                    idle = 1 - 3 * n * p / best.time
                    text = f"{best.title.replace('_interleaved', '-I')}\n{idle:.0%} idle"
                panel.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7)
        panel.set(xlim=(0, len(rounds)), ylim=(0, len(LIMITS)), title=f"{p} ranks")
        panel.set_xticks(np.arange(len(rounds)) + 0.5, [str(n * p) for n in rounds])
        panel.set_yticks(np.arange(len(LIMITS)) + 0.5, [f"{limit:g}" for limit in LIMITS])
        panel.tick_params(length=0)
        panel.set_xlabel("micro-batches")
    panels[0].set_ylabel("memory limit in saved micro-batches, divided by ranks")
    figure.savefig(path, format="png")


def _cell(x: int, y: int, color: str) -> "Rectangle":
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    return Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
