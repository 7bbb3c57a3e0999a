"""python tools/bench/pipeline.py [--schedules 1f1b,zb_h1] [--microbatches 2,4,8,16] [--rounds 5]

Times the loss and gradients of a pipeline of two ranks, each a CPU device of one thread. The times
are compared with the table's prediction, and with the usual pipeline in JAX: stages under
`jax.vmap`, a shift of their inputs, and a scan that autodiff reverses (GPipe).

The prediction is the sum over the table's ticks of the slower rank's operation: F, B, W, X, R, or a
pair of them. An operation's time is measured with both ranks running it at once, in tables of only
such operations from the same schedule. All cases are interleaved, so that other load affects all
equally. Times are medians of the rounds; "times faster" is the median of the rounds' ratios.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from provenance import provenance  # noqa: E402

from jaxscale import command_line  # noqa: E402 - which imports no JAX

RANKS = 2
UNIT_TIMES = 8
SCHEDULES = {
    "1f1b": {},
    "1f1b:fused": {},
    "gpipe": {},
    "zb_h1": {},
    "seq1f1b": {"sequence_chunks": 2},
    "seq1f1b_interleaved": {"sequence_chunks": 2, "virtual_stages": 2},
    "chimera": {},
    "dualpipe": {},
    "dualpipe_v": {"virtual_stages": 2},
}
"""Settings of schedules for two ranks. BitPipe needs four."""
DEFAULT = "1f1b,1f1b:fused,gpipe,zb_h1"
REMATS = ("keep:1", "full")  # of 1f1b, in addition to none
USUAL, USUAL_REMAT = "vmap, shift, autodiff", "the same, layers rematerialised"


Kind = tuple[int, ...]
"""The kind of a rank's operation on each lane of a tick."""


class Case(NamedTuple):
    """A compiled function of parameters and batch, and the times of its runs."""

    name: str
    microbatches: int
    cells: Any  # int [ticks, ranks, lanes], kinds of operations; None for `usual`
    run: Callable[[], Any]
    temp_bytes: int
    seconds: list[float]
    unit: "tuple[Unit, ...]" = ()  # whose times predict this one's


class Unit(NamedTuple):
    """A table of a schedule's operations of some kinds: one more than the unit before it."""

    kind: Kind
    times: int  # operations of that kind on a rank
    case: Case


def main(argv: Sequence[str]) -> int:
    """Prints a table, and appends a line for each case to `--json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=schedules, default=DEFAULT)
    parser.add_argument("--microbatches", type=counts, default="2,4,8,16")
    parser.add_argument("--num_layers", type=command_line.whole(1, 10**6), default=8)
    parser.add_argument("--d_model", type=int, default=512)
    parser.add_argument("--seq_len", type=command_line.whole(1, 10**6), default=128)
    parser.add_argument(
        "--sequences", type=command_line.whole(1, 10**6), default=2, help="of a micro-batch"
    )
    parser.add_argument("--rounds", type=command_line.whole(1, 10**6), default=5)
    parser.add_argument(
        "--json", metavar="FILE", type=command_line.output_file, help="append a line for each case"
    )
    options = parser.parse_args(argv)
    os.environ["JAX_NUM_CPU_DEVICES"] = str(RANKS)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    )

    kinds = [(schedule, "none") for schedule in options.schedules]
    kinds += [("1f1b", remat) for remat in REMATS] if "1f1b" in options.schedules else []
    unit = {kind: units(options, *kind) for kind in kinds}
    cases = []
    for m in options.microbatches:
        cases += [ours(options, *kind, m)._replace(unit=unit[kind]) for kind in kinds]
        cases += [usual(options, m), usual(options, m, remat=True)]
        print(f"compiled for {m} micro-batches", flush=True)
    measured = [one.case for some in unit.values() for one in some]
    for number in range(options.rounds):
        for case in (*measured, *cases):
            case.seconds.append(seconds(case.run))
        print(f"round {number + 1} of {options.rounds}", flush=True)
    report(cases, unit, options)
    return 0


def schedules(text: str) -> list[str]:
    """The type of --schedules."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SCHEDULES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not among {', '.join(SCHEDULES)}")
    return names


def counts(text: str) -> list[int]:
    """The type of --microbatches."""
    return list(map(command_line.whole(1, 10**4), text.split(",")))


def seconds(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    import jax  # noqa: PLC0415

    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def make_config(
    options: argparse.Namespace, schedule: str, microbatches: int, remat: str = "none"
) -> Any:
    """A Llama-style model of two ranks' size, with a small vocabulary."""
    from jaxscale.config import from_dict  # noqa: PLC0415

    width = options.d_model
    return from_dict(
        {
            "model": {
                "num_layers": options.num_layers,
                "d_model": width,
                "num_heads": width // 64,
                "num_kv_heads": width // 64,
                "head_dim": 64,
                "d_ff": 4 * width,
                "vocab_size": 256,
                "compute_dtype": "float32",
            },
            "data": {
                "global_batch_size": options.sequences * microbatches,
                "seq_len": options.seq_len,
            },
            "layout": {
                "data": 1,
                "pipeline": RANKS,
                "microbatches": microbatches,
                "schedule": schedule,
                "remat": remat,
                **SCHEDULES[schedule],
            },
        }
    )


def make_stages(config: Any) -> tuple[Any, Any]:
    """The engine of a config, and its pipeline."""
    from jaxscale.sharding.mesh import make_mesh  # noqa: PLC0415
    from jaxscale.training.engine import make_engine  # noqa: PLC0415

    engine = make_engine(config, make_mesh(config.layout))
    assert engine.stages is not None
    return engine, engine.stages


def ours(
    options: argparse.Namespace,
    schedule: str,
    remat: str,
    microbatches: int,
    kinds: Sequence[Kind] = (),
) -> Case:
    """A schedule run by the executor.

    Args:
      kinds: if given, only these operations of each rank run, kind by kind, on both ranks at once.
    """
    import jax  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    from jaxscale.data.synthetic import synthetic_batch  # noqa: PLC0415
    from jaxscale.training.gradients import make_gradients  # noqa: PLC0415

    config = make_config(options, schedule, microbatches, remat)
    engine, stages = make_stages(config)
    cells = stages.program.columns["kind"]
    if kinds:
        ticks = np.concatenate([ticks_of(cells, kind) for kind in kinds])
        columns = {
            name: np.take_along_axis(column, ticks[..., None], axis=0)
            for name, column in stages.program.columns.items()
        }
        program = dataclasses.replace(stages.program, columns=columns)
        stages = dataclasses.replace(stages, program=program)
    gradients = make_gradients(engine.model, engine.layout, engine.zero, engine.mesh, stages)
    params = engine.init(jax.random.key(0)).params
    batch = engine.shard(synthetic_batch(config))
    program = jax.jit(gradients).lower(params, batch).compile()
    temp = program.memory_analysis().temp_size_in_bytes  # pyright: ignore
    jax.block_until_ready(program(params, batch))  # warms up
    name = schedule if remat == "none" else f"{schedule} {remat}"
    return Case(name, microbatches, cells, lambda: program(params, batch), temp, [])


def ticks_of(cells: Any, kind: Kind) -> Any:
    """int [times, ranks]: each rank's ticks of a kind, as many as every rank has."""
    import numpy as np  # noqa: PLC0415

    found = [np.flatnonzero((of_rank == kind).all(-1)) for of_rank in cells.swapaxes(0, 1)]
    times = min(map(len, found))
    return np.stack([one[:times] for one in found], axis=1)


def units(options: argparse.Namespace, schedule: str, remat: str) -> tuple[Unit, ...]:
    """Tables of some operations of a schedule, each with one kind more than the one before: values
    saved by F and B must be read, or the compiler would remove them."""
    from jaxscale.pipeline_schedules.operations import B, F, R, W, X  # noqa: PLC0415

    remat = "full" if remat in REMATS else remat  # which has each operation on both ranks
    cells = make_stages(make_config(options, schedule, UNIT_TIMES, remat))[1].program.columns[
        "kind"
    ]
    there = {tuple(one) for one in cells.reshape(-1, cells.shape[-1]).tolist()}
    kinds = [kind for one in (W, X, B, R, F) for kind in there if kind in ((one,), (one, 0))]
    kinds += sorted(kind for kind in there if all(kind) and len(kind) > 1)
    return tuple(
        Unit(
            kinds[n],
            len(ticks_of(cells, kinds[n])),
            ours(options, schedule, remat, UNIT_TIMES, kinds[n::-1]),
        )
        for n in range(len(kinds))
    )


def unit_seconds(unit: Sequence[Unit]) -> dict[Kind, float]:
    """Seconds of each operation, medians of the rounds."""
    totals = [statistics.median(one.case.seconds) for one in unit]
    return {
        one.kind: (total - before) / one.times
        for one, total, before in zip(unit, totals, [0.0, *totals])
    }


def predict(case: Case) -> float:
    """Predicted seconds of a case from those of its operations, with ticks in lockstep."""
    each = {**unit_seconds(case.unit), (0,): 0.0, (0, 0): 0.0}
    return sum(max(each[tuple(kind)] for kind in tick) for tick in case.cells.tolist())


def usual(options: argparse.Namespace, microbatches: int, remat: bool = False) -> Case:
    """GPipe as a scan over shifts: all stages compute at once, each on a different micro-batch, and
    pass their outputs on. Autodiff derives the backward pass and saves residuals of every tick.

    Args:
      remat: saves only the inputs of layers and recomputes the rest, as peers do to limit the
        memory of the scan.
    """
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    from jax.sharding import NamedSharding, PartitionSpec  # noqa: PLC0415

    from jaxscale.data.synthetic import synthetic_batch  # noqa: PLC0415
    from jaxscale.models.decoder import Decoder  # noqa: PLC0415
    from jaxscale.models.kernels import Kernels  # noqa: PLC0415
    from jaxscale.models.protocol import head_params  # noqa: PLC0415
    from jaxscale.ops.attention.attention import attention  # noqa: PLC0415
    from jaxscale.sharding.mesh import make_mesh  # noqa: PLC0415

    config = make_config(options, "gpipe", microbatches)
    mesh = make_mesh(config.layout)
    attend = functools.partial(attention, implementation="blockwise")  # as ours on a CPU
    model = Decoder(config.model, Kernels(attend))
    split_over = NamedSharding(mesh, PartitionSpec("pipeline"))

    def loss(params, batches):
        stacks = jax.tree.map(lambda x: x.reshape(RANKS, -1, *x.shape[1:]), params["layers"])
        embedded = jax.vmap(lambda batch: model.embed(params["embed"], batch))(batches)

        def stage(layers, x, batch):
            block = jax.checkpoint(model.block) if remat else model.block
            return jax.lax.scan(lambda x, layer: (block(layer, x, batch), None), x, layers)[0]

        def tick(xs, t):
            came = jax.lax.dynamic_index_in_dim(embedded, jnp.minimum(t, microbatches - 1))
            xs = jnp.concatenate([came, xs[:-1]])  # the shift
            xs = jax.lax.with_sharding_constraint(xs, split_over)
            number = jnp.clip(t - jnp.arange(RANKS), 0, microbatches - 1)
            xs = jax.vmap(stage)(stacks, xs, jax.tree.map(lambda x: x[number], batches))
            xs = jax.lax.with_sharding_constraint(xs, split_over)
            return xs, xs[-1]

        zeros = jnp.zeros((RANKS, *embedded.shape[1:]), embedded.dtype)
        _, outs = jax.lax.scan(tick, zeros, jnp.arange(microbatches + RANKS - 1))
        head = head_params(model, params)
        return jax.lax.map(
            lambda args: model.loss(head, {"x": args[0]}, args[1])["loss"],
            (outs[RANKS - 1 :], batches),
        ).sum()

    params = model.init(jax.random.key(0))
    whole = NamedSharding(mesh, PartitionSpec())
    shardings = {name: jax.tree.map(lambda _: whole, part) for name, part in params.items()}
    shardings["layers"] = jax.tree.map(lambda _: split_over, params["layers"])
    params = jax.device_put(params, shardings)
    batches = jax.tree.map(
        lambda x: jnp.asarray(x).reshape(microbatches, -1, *x.shape[1:]), synthetic_batch(config)
    )
    batches = jax.device_put(batches, NamedSharding(mesh, PartitionSpec()))
    program = jax.jit(jax.value_and_grad(loss)).lower(params, batches).compile()
    temp = program.memory_analysis().temp_size_in_bytes  # pyright: ignore
    jax.block_until_ready(program(params, batches))
    name = USUAL_REMAT if remat else USUAL
    return Case(name, microbatches, None, lambda: program(params, batches), temp, [])


def report(cases: Sequence[Case], unit: dict, options: argparse.Namespace) -> None:
    """Times, predictions and ratios."""
    from jaxscale.pipeline_schedules.operations import LETTERS  # noqa: PLC0415

    for (schedule, remat), some in unit.items():
        each = (
            f"{''.join(LETTERS[one] for one in kind if one)} {1e3 * seconds_each:.1f}"
            for kind, seconds_each in unit_seconds(some).items()
        )
        print(f"{schedule} {remat}: {', '.join(each)} ms")
    usually = {case.microbatches: case for case in cases if case.name == USUAL}
    print(
        f"\n{'schedule':34}{'micro':>6}{'ms':>9}{'of predicted':>14}{'times faster':>14}"
        f"{'temp MB':>9}{'of usual':>10}"
    )
    lines, about = [], provenance()
    for case in cases:
        base, predicted, of_predicted = usually[case.microbatches], None, ""
        faster = median_ratio(base.seconds, case.seconds)
        if case.cells is not None:
            predicted = predict(case)
            of_predicted = f"{statistics.median(case.seconds) / predicted:.3f}"
        print(
            f"{case.name:34}{case.microbatches:6}{1e3 * statistics.median(case.seconds):9.0f}"
            f"{of_predicted:>14}{faster:14.2f}{case.temp_bytes / 1e6:9.1f}"
            f"{case.temp_bytes / base.temp_bytes:10.2f}"
        )
        lines.append(
            {
                "benchmark": "pipeline",
                **about,
                "schedule": case.name,
                "microbatches": case.microbatches,
                "seconds": case.seconds,
                "predicted_seconds": predicted,
                "times_faster": faster,
                "temp_bytes": case.temp_bytes,
            }
        )
    if options.json:
        with open(options.json, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def median_ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """The median ratio of times in the same round."""
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
