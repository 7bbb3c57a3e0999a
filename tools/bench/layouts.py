"""python tools/bench/layouts.py [--fsdp 4] [--data 2] [--microbatches 8] [--rounds 5]

Times one model's step for each accumulation and ZeRO stage on virtual CPU devices, interleaved in
one process. A ratio is the median over rounds, so that other load on the machine affects all
equally. A micro-batch has few tokens compared with the model's width, so that the number of weight
gathers matters.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from provenance import provenance  # noqa: E402

from jaxscale import command_line  # noqa: E402 - which imports no JAX

STAGES = (0, 1, 2, 3)
ACCUMULATIONS = ("sequential", "layered")


class Case(NamedTuple):
    """A compiled step, its arguments, and its times."""

    accumulation: str
    zero_stage: int
    step: Any
    state: Any
    batch: Any
    temp_bytes: int
    seconds: list[float]
    cpu_seconds: list[float]  # of every device's threads


def main(argv: Sequence[str]) -> int:
    """Prints a table, and appends a line for each case to `--json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fsdp", type=command_line.whole(1, 10**6), default=4)
    parser.add_argument("--data", type=command_line.whole(1, 10**6), default=2)
    parser.add_argument("--microbatches", type=command_line.whole(1, 10**6), default=8)
    parser.add_argument("--num_layers", type=command_line.whole(1, 10**6), default=6)
    parser.add_argument("--d_model", type=int, default=256)
    parser.add_argument("--seq_len", type=command_line.whole(1, 10**6), default=16)
    parser.add_argument("--rounds", type=command_line.whole(1, 10**6), default=7)
    parser.add_argument(
        "--json", metavar="FILE", type=command_line.output_file, help="append a line for each case"
    )
    options = parser.parse_args(argv)
    os.environ["JAX_NUM_CPU_DEVICES"] = str(options.fsdp * options.data)
    os.environ["JAX_PLATFORMS"] = "cpu"

    cases = [make(options, a, stage) for stage, a in itertools.product(STAGES, ACCUMULATIONS)]
    for _ in range(options.rounds):
        for index, case in enumerate(cases):
            cases[index] = timed(case)
    report(cases, options)
    return 0


def make(options: argparse.Namespace, accumulation: str, zero_stage: int) -> Case:
    """Compiles a case and runs a first step."""
    # After JAX_NUM_CPU_DEVICES is set.
    import jax  # noqa: PLC0415

    from jaxscale.config import from_dict  # noqa: PLC0415
    from jaxscale.data.synthetic import synthetic_batch  # noqa: PLC0415
    from jaxscale.sharding.mesh import make_mesh  # noqa: PLC0415
    from jaxscale.training.engine import make_engine  # noqa: PLC0415

    width, rows = options.d_model, options.fsdp * options.data * options.microbatches
    config = from_dict(
        {
            "model": {
                "num_layers": options.num_layers,
                "d_model": width,
                "num_heads": width // 64,
                "num_kv_heads": width // 64,
                "head_dim": 64,
                "d_ff": 3 * width,
                "vocab_size": 1024,
                "compute_dtype": "float32",
            },
            "data": {"global_batch_size": rows, "seq_len": options.seq_len},
            "layout": {
                "data": options.data,
                "fsdp": options.fsdp,
                "zero_stage": zero_stage,
                "microbatches": options.microbatches,
                "accumulation": accumulation,
                "remat": "full",
            },
        }
    )
    engine = make_engine(config, make_mesh(config.layout))
    batch = engine.shard(synthetic_batch(config))
    state = engine.init(jax.random.key(0))
    step = engine.step.lower(state, batch).compile()
    temp_bytes = step.memory_analysis().temp_size_in_bytes
    case = timed(Case(accumulation, zero_stage, step, state, batch, temp_bytes, [], []))
    case.seconds.clear()  # the first step warms up
    case.cpu_seconds.clear()
    print(f"  compiled zero {zero_stage}, {accumulation}", flush=True)
    return case


def timed(case: Case) -> Case:
    """One more step."""
    begin, cpu_begin = time.perf_counter(), time.process_time()
    state, out = case.step(case.state, case.batch)
    float(out.loss)
    case.seconds.append(time.perf_counter() - begin)
    case.cpu_seconds.append(time.process_time() - cpu_begin)
    return case._replace(state=state)


def report(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """The table: medians, and ratios of neighbouring steps."""
    base = {case.zero_stage: case for case in cases if case.accumulation == "sequential"}
    lines, about = [], provenance()
    print(
        f"\n{about['command']}\nmedian of {options.rounds} steps; "
        "speed-up: sequential over layered, median of the rounds' ratios\n"
    )
    heads = ("zero", "accumulation", "s a step", "speed-up", "cpu s", "speed-up", "temp MB")
    rows: list[tuple[str, ...]] = [heads]
    for case in cases:
        against = base[case.zero_stage]
        speedup, cpu_speedup = (
            statistics.median(a / b for a, b in zip(*pair, strict=True))
            for pair in ((against.seconds, case.seconds), (against.cpu_seconds, case.cpu_seconds))
        )
        seconds, cpu = statistics.median(case.seconds), statistics.median(case.cpu_seconds)
        figures = (seconds, speedup, cpu, cpu_speedup, case.temp_bytes / 1e6)
        rows.append((f"{case.zero_stage}", case.accumulation, *(f"{x:.3g}" for x in figures)))
        lines.append(
            {
                "benchmark": "layouts",
                **about,
                "zero_stage": case.zero_stage,
                "accumulation": case.accumulation,
                "step_seconds": seconds,
                "all_seconds": case.seconds,
                "temp_bytes": case.temp_bytes,
                "cpu_seconds": cpu,
                "speedup_over_sequential": speedup,
                "cpu_speedup_over_sequential": cpu_speedup,
            }
        )
    from jaxscale.formatting import table  # noqa: PLC0415 - imports JAX

    print(table(rows))
    if options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
